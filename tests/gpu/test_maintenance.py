"""Sorting and merging suffixes on the GPU give what the CPU kernels give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.ops.merge import cpu as merge_cpu  # noqa: E402
from draftd.drafter.ops.merge.gpu import fill_buckets, merge  # noqa: E402
from draftd.drafter.ops.sort.cpu import sort_suffixes  # noqa: E402
from draftd.drafter.ops.sort.gpu import MAX_VOCABULARY, sort_positions, sort_text  # noqa: E402
from tests.gpu.cases import Ints  # noqa: E402

SHIFT = 9


def _text(rng: np.random.Generator, size: int, depth: int, vocab: int) -> Ints:
    text = rng.integers(0, vocab, size).astype(np.int32)
    text[rng.random(size) < rng.choice([0.001, 0.05, 0.3])] = -1
    if rng.random() < 0.4:
        text = np.tile(text[: max(1, size // 7)], 8)[:size]
    return np.concatenate([text, np.full(depth + 1, -1, np.int32)])


def _on_gpu(*arrays: Ints) -> list[Any]:
    return [torch.from_numpy(a).cuda() for a in arrays]


def _sorted(text: Ints, positions: Ints, depth: int, vocab: int = MAX_VOCABULARY) -> Ints:
    on_gpu = _on_gpu(text, positions)
    ordered: Ints = sort_positions(on_gpu[0], on_gpu[1], depth, vocab).cpu().numpy()
    return ordered


@pytest.mark.parametrize("seed", range(24))
def test_sort_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([1, 2, 3, 4, 7, 12, 64]))
    size = int(rng.integers(1, 20_000))
    text = _text(rng, size, depth, int(rng.choice([1, 2, 3, 50, 2**21 - 2])))
    positions = np.flatnonzero(text[:size] >= 0).astype(np.int32)
    expected = sort_suffixes(text, positions, depth) if len(positions) else positions
    np.testing.assert_array_equal(sort_text(torch.from_numpy(text).cuda(), size, depth).cpu().numpy(), expected)


@pytest.mark.parametrize("seed", range(32))
def test_sort_positions(seed: int) -> None:
    """Some of the positions, in any order; keys of as many tokens as the vocabulary lets in."""
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 64]))
    size = int(rng.integers(1, 70_000))
    vocab = int(rng.choice([1, 2, 700, 4095, 4096, 128_256, 2**21 - 1]))
    text = _text(rng, size, depth, int(rng.choice([1, 3, vocab])) if vocab > 3 else vocab)
    positions = np.flatnonzero((text[:size] >= 0) & (rng.random(size) < rng.choice([0.3, 1.0]))).astype(np.int32)
    expected = sort_suffixes(text, positions, depth) if len(positions) else positions
    np.testing.assert_array_equal(_sorted(text, rng.permutation(positions) if seed % 2 else positions, depth, vocab), expected)


@pytest.mark.parametrize("depth", [3, 4, 64])
@pytest.mark.parametrize(
    "documents",
    [
        [[7] * 70_000],
        [[7] * 1000] * 70,
        [[7] * n + [n % 5] for n in range(300)],
        [[1, 2, 3, 4, 5] * 2000, [2, 1] * 5000, [2, 1, 2] * 4000],
        [list(range(100, 400))] * 300,
        [[5, 6, 7, 8, i % 3] for i in range(20_000)],
        [[2**21 - 2, 0] * 3000, [0, 2**21 - 2] * 3000],
    ],
    ids=["one loop", "equal loops", "loops of all lengths", "periods", "one document repeated", "short equal documents", "largest token"],
)
def test_large_groups_of_equal_suffixes(documents: list[list[int]], depth: int) -> None:
    text = np.concatenate([np.array([*d, -1], np.int32) for d in documents] + [np.full(depth + 1, -1, np.int32)])
    positions = np.flatnonzero(text >= 0).astype(np.int32)
    np.testing.assert_array_equal(_sorted(text, positions, depth), sort_suffixes(text, positions, depth))


def test_bulk() -> None:
    """Copies of one text with some tokens replaced, as a whole text and as most of a stretch of a longer one."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 300, 100_000).astype(np.int32)
    base[rng.random(len(base)) < 0.01] = -1
    copies = [np.where((rng.random(len(base)) < 0.05) & (base >= 0), 301, base) for _ in range(13)]
    text = np.concatenate([*copies, np.full(65, -1)]).astype(np.int32)
    size = len(base) * len(copies)
    positions = np.flatnonzero(text >= 0).astype(np.int32)
    expected = sort_suffixes(text, positions, 64)
    (on_gpu,) = _on_gpu(text)
    np.testing.assert_array_equal(sort_text(on_gpu, size, 64, len(positions)).cpu().numpy(), expected)
    np.testing.assert_array_equal(_sorted(text, positions, 64, 302), expected)
    some = positions[(positions >= 12_345) & (positions < size - 54_321) & (rng.random(len(positions)) < 0.9)]
    span = (int(some[0]), int(some[-1]) + 1)
    in_span = sort_positions(on_gpu, torch.from_numpy(rng.permutation(some)).cuda(), 64, 302, span=span)
    np.testing.assert_array_equal(in_span.cpu().numpy(), sort_suffixes(text, some, 64))


@pytest.mark.parametrize("seed", range(32))
def test_merge_and_buckets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([1, 3, 8, 64]))
    size = int(rng.integers(40, 30_000))
    text = _text(rng, size, depth, int(rng.choice([1, 2, 3, 50, 2**21 - 2])))
    # Old text, then new text; a separator between them.
    cut = int(rng.integers(1, size))
    text[cut] = -1
    positions = np.flatnonzero(text[:size] >= 0).astype(np.int32)
    old, new = (sort_suffixes(text, p, depth) if len(p) else p for p in (positions[positions < cut], positions[positions > cut]))
    evict_start, evict_length = (0, 0) if seed % 2 else (int(rng.integers(0, cut)), int(rng.integers(1, cut + 1)))
    if seed % 4:
        evict_length = min(evict_length, cut - evict_start)
    else:
        # The evicted stretch wraps around the ring's end, so there is nothing new.
        evict_start, new = max(evict_start, size - evict_length), new[:0]
    expected = np.zeros(len(old) + len(new) + 1, np.int32)
    evict = {"evict_start": evict_start, "evict_length": evict_length, "ring": size}
    length = merge_cpu.merge(text, old, new, expected, depth=depth, **evict)
    buckets = np.zeros(((1 << 21) >> SHIFT) + 1, np.int32)
    device = _on_gpu(text, old, new, np.full_like(buckets, -7))
    fill_buckets(device[0], device[1], SHIFT, device[3])
    merge_cpu.fill_buckets(text, old, SHIFT, buckets)
    np.testing.assert_array_equal(device[3].cpu().numpy(), buckets)
    for table in (None, device[3]):
        out = torch.full((len(expected),), -7, dtype=torch.int32, device="cuda")
        merge(device[0], device[1], device[2], out, depth=depth, buckets=table, shift=SHIFT, **evict)
        np.testing.assert_array_equal(out[:length].cpu().numpy(), expected[:length])
        assert (out[length:] == -7).all(), "more was written than there is"


@pytest.mark.parametrize("evict_length", [0, 3000])
def test_captured_in_a_graph(evict_length: int) -> None:
    """A refresh in a CUDA graph is right for each text that is there when it is replayed: nothing of it waits for the host."""
    rng = np.random.default_rng(1)
    size, fresh, depth = 50_000, 5000, 64
    old_positions = np.arange(size - 1, dtype=np.int32)
    new_positions = np.arange(size, size + fresh - 1, dtype=np.int32)
    text, old, positions = _on_gpu(np.full(size + fresh + depth + 1, -1, np.int32), old_positions, new_positions)
    out = torch.zeros(len(old) + len(positions), dtype=torch.int32, device="cuda")
    buckets = torch.zeros(((1 << 21) >> SHIFT) + 1, dtype=torch.int32, device="cuda")
    kept = len(out) - evict_length

    def refresh() -> None:
        new = sort_positions(text, positions, depth)
        merge(text, old, new, out, depth=depth, evict_start=0, evict_length=evict_length, ring=size + fresh)
        fill_buckets(text, out[:kept], SHIFT, buckets)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        refresh()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            refresh()
    for vocab in (3, 5000):
        tokens = rng.integers(0, vocab, size + fresh).astype(np.int32)
        tokens[[size - 1, size + fresh - 1]] = -1
        tokens = np.concatenate([tokens, np.full(depth + 1, -1, np.int32)])
        ordered = sort_suffixes(tokens, old_positions, depth)
        text.copy_(torch.from_numpy(tokens))
        old.copy_(torch.from_numpy(ordered))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_buckets = np.zeros(len(out), np.int32), np.zeros(len(buckets), np.int32)
        new = sort_suffixes(tokens, new_positions, depth)
        merge_cpu.merge(tokens, ordered, new, expected, depth=depth, evict_length=evict_length, ring=size + fresh)
        merge_cpu.fill_buckets(tokens, expected[:kept], SHIFT, expected_buckets)
        np.testing.assert_array_equal(out[:kept].cpu().numpy(), expected[:kept])
        np.testing.assert_array_equal(buckets.cpu().numpy(), expected_buckets)
