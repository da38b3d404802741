"""Sorting and merging suffixes on the GPU give what the CPU kernels give."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.ops.merge import cpu as merge_cpu  # noqa: E402
from draftd.drafter.ops.merge.gpu import fill_buckets, merge  # noqa: E402
from draftd.drafter.ops.sort.cpu import sort_suffixes  # noqa: E402
from draftd.drafter.ops.sort.gpu import sort_text  # noqa: E402
from tests.gpu.cases import Ints  # noqa: E402


def _text(rng: np.random.Generator, size: int, depth: int) -> Ints:
    vocab = int(rng.choice([1, 2, 3, 50, 2**21 - 2]))
    text = rng.integers(0, vocab, size).astype(np.int32)
    text[rng.random(size) < rng.choice([0.001, 0.05, 0.3])] = -1
    if rng.random() < 0.4:
        text = np.tile(text[: max(1, size // 7)], 8)[:size]
    return np.concatenate([text, np.full(depth + 1, -1, np.int32)])


@pytest.mark.parametrize("seed", range(24))
def test_sort_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([1, 2, 3, 4, 7, 12, 64]))
    size = int(rng.integers(1, 20_000))
    text = _text(rng, size, depth)
    positions = np.flatnonzero(text[:size] >= 0).astype(np.int32)
    expected = sort_suffixes(text, positions, depth) if len(positions) else positions
    np.testing.assert_array_equal(sort_text(torch.from_numpy(text).cuda(), size, depth).cpu().numpy(), expected)


@pytest.mark.parametrize("seed", range(24))
def test_merge_and_buckets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([1, 3, 8, 64]))
    size = int(rng.integers(40, 20_000))
    text = _text(rng, size, depth)
    # Old text, then new text; a separator between them.
    cut = int(rng.integers(1, size))
    text[cut] = -1
    positions = np.flatnonzero(text[:size] >= 0).astype(np.int32)
    old, new = (sort_suffixes(text, p, depth) if len(p) else p for p in (positions[positions < cut], positions[positions > cut]))
    evict_start, evict_length = (0, 0) if seed % 2 else (int(rng.integers(0, cut)), int(rng.integers(1, cut + 1)))
    evict_length = min(evict_length, cut - evict_start)
    expected = np.zeros(len(old) + len(new), np.int32)
    evict = {"evict_start": evict_start, "evict_length": evict_length, "ring": size}
    length = merge_cpu.merge(text, old, new, expected, depth=depth, **evict)
    buckets = np.zeros(((1 << 21) >> 9) + 1, np.int32)
    device = [torch.from_numpy(a).cuda() for a in (text, old, new, buckets)]
    out = torch.zeros(len(expected), dtype=torch.int32, device="cuda")
    fill_buckets(device[0], device[1], 9, device[3])
    merge_cpu.fill_buckets(text, old, 9, buckets)
    np.testing.assert_array_equal(device[3].cpu().numpy(), buckets)
    for table in (None, device[3]):
        merge(device[0], device[1], device[2], out.zero_(), depth=depth, buckets=table, shift=9, **evict)
        np.testing.assert_array_equal(out[:length].cpu().numpy(), expected[:length])
