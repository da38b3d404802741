"""The GPU kernels in Triton's interpreter, at tiny sizes: the same drafts as the oracle's, without a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
# Read when triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.device_matching import Launch  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from tests.gpu.cases import check_equal, check_hostile_buffer, crowded_case, make_case, propose  # noqa: E402

LAUNCH = Launch(probes=4, parts=1, block=64, programs=3, slots=32, hits=32)


def _documents(rng: np.random.Generator, vocab: int, sizes: list[int]) -> list[list[int]]:
    unit = rng.integers(0, vocab, 5).tolist()
    return [(unit * n)[:n] if rng.random() < 0.4 else rng.integers(0, vocab, n).tolist() for n in sizes]


@pytest.mark.parametrize("seed", range(6))
def test_random_corpora(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([1, 2, 3, 40]))
    documents = _documents(rng, vocab, rng.integers(1, 30, 5).tolist())
    case = make_case(documents, vocab=vocab, depth=8, cuts=(2, 4), seed=seed, piece=6 if seed % 2 else 0)
    rows = [np.array(d, np.int32) for d in _documents(rng, vocab, [1, 12, 30])]
    rows[2][-6:] = (documents[0] * 6)[:6]
    private = [False, False, False]
    params = DraftParams(
        k=int(rng.integers(1, 5)), max_depth=8, spec_factor=float(rng.choice([1, 2.5])), min_token_prob=float(rng.choice([0.0, 0.1, 0.3]))
    )
    check_equal(propose(case.on_device("cpu"), rows, private, params, LAUNCH), case.by_oracle(rows, private, params), rows)


def test_more_occurrences_than_lanes() -> None:
    documents = [[1, 2, 3, 4] * 12, [1, 2, 5] * 14, [1, 2] * 20, [2, 1, 2, 3]]
    case = make_case(documents, vocab=6, depth=8, cuts=(2, 3), seed=0)
    rows = [np.array([0, 1, 2], np.int32), np.array([1] * 50, np.int32)]
    params = DraftParams(k=4, max_depth=8, spec_factor=2, min_token_prob=0.05, policy="tree")
    check_equal(
        propose(case.on_device("cpu"), rows, [False, True], params, LAUNCH, repeat=2), case.by_oracle(rows, [False, True], params), rows
    )


@pytest.mark.parametrize(("kind", "total"), [("same", 33), ("halves", 66), ("thirds", 99), ("distinct", 66), ("frequent", 300)])
def test_crowded_loci(kind: str, total: int) -> None:
    # More occurrences than a program holds: they are sampled, and counted where they may win.
    case, rows = crowded_case(total, kind, seed=total)
    for least in (0.1, 0.0):
        params = DraftParams(k=4, max_depth=12, spec_factor=2, min_token_prob=least, policy="tree")
        got = propose(case.on_device("cpu"), rows[:2], [False] * 2, params, LAUNCH)
        check_equal(got, case.by_oracle(rows[:2], [False] * 2, params), rows[:2])


def test_repetitive_rows() -> None:
    # More hits than a program holds: they are counted in passes, by majority, by bins, and from a copy of those that are left.
    rng = np.random.default_rng(1)
    case = make_case([[1, 2, 3]], vocab=50, depth=8, cuts=(1, 1), seed=0)
    even = np.tile(np.array([7, 1, 7, 2, 7, 3], np.int32), 40)
    rng.shuffle(even[1::2])
    diffuse = rng.integers(8, 50, 200).astype(np.int32)
    diffuse[::2] = 7
    rows = [np.append(even, np.int32(7)), diffuse[:199], np.tile(np.array([4, 5], np.int32), 60)]
    for least in (0.1, 0.0):
        params = DraftParams(k=4, max_depth=8, spec_factor=2, min_token_prob=least, policy="tree")
        got = propose(case.on_device("cpu"), rows, [True] * 3, params, LAUNCH)
        check_equal(got, case.by_oracle(rows, [True] * 3, params), rows)


def test_a_new_version_is_seen() -> None:
    case, rows = crowded_case(40, "frequent", seed=2)
    params = DraftParams(k=4, max_depth=8, policy="tree")
    index = case.on_device("cpu")
    before = index.current.number
    assert (propose(index, rows[:1], [False], params, LAUNCH).version == before).all()
    index.publish(index.current)
    assert (propose(index, rows[:1], [False], params, LAUNCH).version == before + 1).all()


def test_nothing_to_draft_from() -> None:
    case = make_case([], vocab=4, depth=8, cuts=(0, 0), seed=0)
    rows = [np.array([1, 2, 3], np.int32)]
    params = DraftParams(k=4, max_depth=8, policy="tree")
    check_equal(propose(case.on_device("cpu"), rows, [False], params, LAUNCH), case.by_oracle(rows, [False], params), rows)


def test_what_a_buffer_holds_is_not_trusted() -> None:
    check_hostile_buffer("cpu")
