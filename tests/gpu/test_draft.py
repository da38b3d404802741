"""The compiled GPU kernels answer what the oracle and the CPU kernels answer, bit for bit, however the work is spread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.device import DeviceDrafter, DeviceDrafts  # noqa: E402
from draftd.drafter.device_matching import Launch  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from tests.gpu.cases import Case, Ints, check_equal, check_hostile_buffer, crowded_case, make_case, propose  # noqa: E402

LAUNCHES = [
    None,
    Launch(probes=16, parts=1, programs=3, slots=32, hits=128),
    Launch(probes=8, parts=3, block=512, programs=8, slots=128, hits=512, chain_registers=255),
]
PARAMS = [
    DraftParams(k=16, max_depth=24, spec_factor=1, policy="tree"),
    DraftParams(k=16, max_depth=24, spec_factor=4, policy="tree"),
    DraftParams(k=5, max_depth=64, spec_factor=2, spec_offset=1, min_token_prob=0.3, policy="tree"),
    DraftParams(k=3, max_depth=9, spec_factor=3, min_token_prob=0.0, policy="tree"),
    DraftParams(k=16, max_depth=24, spec_factor=4, min_token_prob=0.01, use_local=False, policy="tree"),
    DraftParams(k=16, max_depth=24, spec_factor=4, use_corpus=False, policy="tree"),
]
VOCABULARIES = [1, 2, 3, 8, 400, 100_000]


def _text(rng: np.random.Generator, vocab: int, size: int, units: list[list[int]]) -> list[int]:
    """Random tokens, tokens with a few frequent ones, loops, or pieces of the same units."""
    kind = rng.integers(0, 5)
    if kind == 0:
        return list(rng.integers(0, vocab, size).tolist())
    if kind == 1:
        return list(np.minimum(rng.zipf(1.5, size) - 1, vocab - 1).tolist())
    out: list[int] = []
    while len(out) < size:
        unit = units[int(rng.integers(0, len(units)))]
        if kind == 2:
            out += unit * int(rng.integers(1, 8))
        else:
            out += unit[: int(rng.integers(1, len(unit) + 1))]
            if kind == 3 and rng.random() < 0.3:
                out.append(int(rng.integers(0, vocab)))
    return out[:size]


def _random_case(seed: int, tokens: int) -> tuple[Case, list[Ints], list[bool]]:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice(VOCABULARIES))
    units = [rng.integers(0, vocab, int(rng.integers(1, 40))).tolist() for _ in range(int(rng.integers(1, 12)))]
    documents: list[list[int]] = []
    while sum(map(len, documents)) < tokens:
        documents.append(_text(rng, vocab, int(rng.integers(1, max(3, tokens // 3))), units))
    pieces = int(rng.choice([0, 0, 20]))
    count = sum(-(-len(d) // pieces) for d in documents) if pieces else len(documents)
    cuts = sorted(rng.integers(0, count + 1, 2).tolist())
    case = make_case(documents, vocab=vocab, depth=64, cuts=(cuts[0], cuts[1]), seed=seed, piece=pieces)
    rows = []
    for _ in range(12):
        row = _text(rng, vocab, int(rng.integers(1, 300)), units)
        if rng.random() < 0.6:
            document = documents[int(rng.integers(0, len(documents)))]
            end = int(rng.integers(1, len(document) + 1))
            row = row + document[max(0, end - int(rng.integers(1, 80))) : end]
        rows.append(np.array(row, np.int32))
    return case, rows, [bool(rng.random() < 0.15) for _ in rows]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("params", PARAMS)
def test_equals_cpu_kernels(params: DraftParams, launch: Launch | None) -> None:
    for seed in range(25):
        case, rows, private = _random_case(seed, tokens=[60, 500, 4000, 20_000][seed % 4])
        check_equal(propose(case.on_device("cuda"), rows, private, params, launch, repeat=2), case.by_cpu(rows, private, params), rows)


@pytest.mark.parametrize("params", PARAMS)
def test_equals_oracle(params: DraftParams) -> None:
    for seed in range(100, 112):
        case, rows, private = _random_case(seed, tokens=120)
        rows = [r[-60:] for r in rows]
        check_equal(propose(case.on_device("cuda"), rows, private, params), case.by_oracle(rows, private, params), rows)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("kind", ["same", "halves", "thirds", "distinct", "frequent"])
def test_crowded_loci(kind: str, params: DraftParams) -> None:
    # Around what lanes and registers hold, and where recency stops deciding between equals.
    for total in (31, 32, 33, 63, 64, 65, 66, 96, 99, 127, 128, 129, 130, 255, 256, 257, 1000, 5000):
        case, rows = crowded_case(total, kind, seed=total)
        for launch in LAUNCHES:
            got = propose(case.on_device("cuda"), rows, [False] * len(rows), params, launch, repeat=2)
            check_equal(got, case.by_cpu(rows, [False] * len(rows), params), rows)


def test_captured_graph_follows_new_versions() -> None:
    case, rows, private = _random_case(3, tokens=4000)
    other, _, _ = _random_case(3, tokens=2000)
    params = PARAMS[1]
    index = case.on_device("cuda")
    n = len(rows)
    buffer = torch.zeros((n, max(map(len, rows))), dtype=torch.int32, device="cuda")
    for i, row in enumerate(rows):
        buffer[i, : len(row)] = torch.from_numpy(row)
    lengths = torch.tensor([len(r) for r in rows], device="cuda")
    namespaces = torch.tensor([-1 if p else 0 for p in private], dtype=torch.int32, device="cuda")
    order = torch.arange(n, dtype=torch.int32, device="cuda")
    drafter = DeviceDrafter(index.arena, index.headers, max_batch=n, max_row_tokens=buffer.shape[1], params=params)
    out = DeviceDrafts.empty(n, params.k, "cuda")
    drafter.propose(buffer, lengths, order, namespaces, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafter.propose(buffer, lengths, order, namespaces, out)
    for _ in range(3):
        graph.replay()
    check_equal(out.numpy(), case.by_cpu(rows, private, params), rows)
    assert (out.numpy().version[~np.array(private)] == index.current.number).all()
    # A new version: only part of main.
    kept = len(case.suffixes[0]) // 2
    case.suffixes = (case.suffixes[0][:kept], case.suffixes[1], case.suffixes[2])
    index.buckets[0, 0].copy_(torch.from_numpy(case.buckets(0)))
    index.main[0, :kept].copy_(torch.from_numpy(case.suffixes[0]))
    current = index.current
    index.publish(replace(current, copies=(0, 1, 1), lengths=(kept, *current.lengths[1:])))
    graph.replay()
    check_equal(out.numpy(), case.by_cpu(rows, private, params), rows)
    assert (out.numpy().version[~np.array(private)] == current.number + 1).all()
    assert other.shape.vocab_size == case.shape.vocab_size


def test_long_repetitive_row() -> None:
    rng = np.random.default_rng(0)
    case, _, _ = _random_case(5, tokens=500)
    diffuse = rng.integers(0, 100_000, 6000).astype(np.int32)
    diffuse[::2] = 7
    # Three tokens as often as each other, and one a little less often.
    even = np.tile(np.array([7, 1, 7, 2, 7, 3], np.int32), 700)
    rng.shuffle(even[1::2])
    even[1] = 9
    rows = [np.full(9000, 3, np.int32), np.tile(np.arange(5, dtype=np.int32), 1500), diffuse[:5999], np.append(even, np.int32(7))]
    for params in PARAMS:
        for launch in LAUNCHES:
            got = propose(case.on_device("cuda"), rows, [True] * len(rows), params, launch, repeat=2)
            check_equal(got, case.by_cpu(rows, [True] * len(rows), params), rows)


def test_what_a_buffer_holds_is_not_trusted() -> None:
    check_hostile_buffer("cuda")
