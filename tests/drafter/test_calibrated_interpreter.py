"""The GPU kernels of the rule `calibrated` in Triton's interpreter, at tiny sizes: what the oracle says, without a GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
# Read when triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from draftd.drafter import policy  # noqa: E402
from draftd.drafter.device import DeviceDrafts  # noqa: E402
from draftd.drafter.device_calibrated import DeviceCalibrated, DeviceLessons  # noqa: E402
from draftd.drafter.device_index import DeviceIndex  # noqa: E402
from draftd.drafter.device_layout import (  # noqa: E402
    DD_SIGNS,
    DEVICE_DESCRIPTOR_WORDS,
    DEVICE_DESCRIPTORS,
    DEVICE_DESCRIPTORS_START,
    DEVICE_RECLAIMED,
    LOCUS_LENGTHS,
    PIN_EPOCH,
    PIN_MAPPED,
    PIN_ROWS,
    TORN,
)
from draftd.drafter.device_matching import Launch  # noqa: E402
from draftd.drafter.lessons import Learned  # noqa: E402
from draftd.drafter.ops.calibrated import oracle  # noqa: E402
from draftd.drafter.ops.calibrated.cpu_mixer import VOTE_CELLS, VOTE_COUNT, VOTE_TOKENS  # noqa: E402
from draftd.drafter.ops.calibrated.gpu_levels import HELD, SHORT_LENGTHS, length_of, level_of  # noqa: E402
from draftd.drafter.ops.calibrated.gpu_tail import find_tail  # noqa: E402
from draftd.drafter.ops.calibrated.oracle import Corpus, Document  # noqa: E402
from draftd.drafter.ops.search.cpu import locus  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from tests.drafter.test_calibrated import scene  # noqa: E402
from tests.gpu.calibrated_cases import Rows, check_draft, on_device, propose  # noqa: E402

LAUNCH = Launch(lengths=8, probes=4, parts=1, block=64)


@pytest.mark.parametrize("seed", range(8))
def test_every_state_is_the_oracles(seed: int) -> None:
    vocab = (40, 300)[seed % 2]
    documents, rows, calibration, recent_from, live_from = scene(seed, 8, vocab, 60)
    rows = [row for row in rows if len(row) > 24 and max(Counter(row).values()) <= HELD]
    while max(Counter(t for d in documents for t in d.tokens).values()) > HELD:
        # Of more occurrences than can be held there would be samples.
        documents.pop()
    params = DraftParams(k=6, tau=(0.0, 0.2)[seed // 2 % 2], use_local=seed != 3, use_corpus=seed != 5)
    index = on_device(documents, recent_from, live_from, vocab, "cpu")
    corpus = Corpus(documents)
    lesson = propose(index, rows, calibration, params, LAUNCH)
    for r, row in enumerate(rows):
        check_draft(lesson, r, row, corpus, calibration, params)


def test_a_frequent_suffix_is_sampled() -> None:
    """More occurrences than can be held: shares by samples, and the latest of them."""
    rng = np.random.default_rng(0)
    followers = rng.choice([11, 12, 13, 14], 200, p=[0.55, 0.3, 0.1, 0.05]).tolist()
    index = on_device([Document([], [1, f, 5]) for f in followers], 120, 180, 20, "cpu")
    lesson = propose(index, [[7, 1]], policy.blank_calibration(), DraftParams(k=1, tau=0.0, use_local=False), LAUNCH)
    ints = lesson.ints[0, 0]
    votes = dict(zip(ints[VOTE_TOKENS:][: ints[VOTE_COUNT]].tolist(), ints[VOTE_CELLS:][: ints[VOTE_COUNT]].tolist(), strict=True))
    assert votes[11] in [oracle.vote(1, 0, 0, 11, followers.count(11), 200, kind).fine for kind in (0, 1)]
    assert lesson.drafts.occurrences[0] == 200


def test_more_own_matches_than_can_be_held() -> None:
    """A row that repeats itself: the most recent of the longest matches."""
    index = on_device([Document([], [1, 2])], 1, 1, 30, "cpu")
    rows = [[5, 6, 7] * 50, [9, *[8] * 100]]
    lesson = propose(index, rows, policy.blank_calibration(), DraftParams(k=5, tau=0.0), LAUNCH)
    assert lesson.drafts.tokens.tolist() == [[5, 6, 7, 5, 6], [8] * 5]
    assert lesson.drafts.occurrences.tolist() == [HELD, HELD]


@pytest.mark.parametrize(("searches", "search_tokens", "expected"), [(1, 0, [3, 4]), (2, 0, [3, 4, 5, 6, 7]), (2, 13, [3, 4, 5])])
def test_draft_that_has_searched_again_is_shorter(searches: int, search_tokens: int, expected: list[int]) -> None:
    """Where nothing is left to follow there is a search, doubt or not."""
    index = on_device([Document([], [1, 2, 3, 4]), Document([], [8, 4, 5, 6, 7])], 1, 2, 30, "cpu")
    rows = Rows.of([[9, 1, 2]], "cpu")
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=1, max_row_tokens=rows.tokens.shape[1], params=DraftParams(k=5, tau=0.0), launch=LAUNCH,
        searches=searches, doubt=0.0, search_tokens=search_tokens, prior=torch.from_numpy(policy.blank_calibration()),
    )  # fmt: skip
    out = DeviceDrafts.empty(1, 5, "cpu")
    drafter.propose(rows.tokens, rows.lengths, rows.order, rows.namespaces, out)
    assert out.tokens[0].tolist() == expected + [-1] * (5 - len(expected))


def test_draft_in_doubt_looks_for_more() -> None:
    """What follows the longest match may be an exception: where it is not sure, shorter matches that began in the draft count too."""
    documents = [Document([], [1, 2, 3, 4]), *[Document([], [10 + i, 3, 5]) for i in range(40)]]
    index = on_device(documents, 1, 2, 60, "cpu")
    rows = Rows.of([[9, 1, 2]], "cpu")
    votes = {}
    for doubt in (0.0, 1.0):
        drafter = DeviceCalibrated(
            index.arena, index.headers, max_batch=1, max_row_tokens=rows.tokens.shape[1], params=DraftParams(k=2, tau=0.0), launch=LAUNCH,
            searches=2, doubt=doubt, search_tokens=0, prior=torch.from_numpy(policy.blank_calibration()),
        )  # fmt: skip
        out, lessons = DeviceDrafts.empty(1, 2, "cpu"), DeviceLessons.empty(1, 2, "cpu")
        drafter.propose(rows.tokens, rows.lengths, rows.order, rows.namespaces, out, lessons)
        ints = lessons.ints[0, 1]
        votes[doubt] = set(ints[VOTE_TOKENS:][: ints[VOTE_COUNT]].tolist())
    assert votes == {0.0: {4}, 1.0: {4, 5}}


def test_what_a_buffer_holds_is_not_trusted() -> None:
    documents = [Document([], [1, 2, 3, 4, 5] * 4)]
    index = on_device(documents, 1, 1, 6, "cpu")
    params = DraftParams(k=3, tau=0.0)
    good = [0, 1, 2, 3, 4, 5, 1, 2, 3, 4]
    buffer = torch.tensor([good, good, [2**31 - 1, -(2**31), -1, 6, 3] * 2, [-1] * 10, [7] * 10], dtype=torch.int32)
    lengths = torch.tensor([10, 2**40, 10, 10, -5])
    rows = torch.tensor([0, 1, 2, 3, 4, -1, 5, 2**31 - 1, 0])
    blank = torch.from_numpy(policy.blank_calibration())
    drafter = DeviceCalibrated(index.arena, index.headers, max_batch=9, max_row_tokens=10, params=params, launch=LAUNCH, prior=blank)
    out = DeviceDrafts.empty(9, 3, "cpu")
    for namespace in (0, 1, 2**31 - 1, -7):
        spaces = torch.full((5,), namespace, dtype=torch.int32)
        drafter.propose(buffer, lengths, rows, spaces, out)
        got = out.numpy()
        assert got.tokens[0].tolist() == got.tokens[1].tolist() == got.tokens[8].tolist() == [5, 1, 2]
        assert got.counts[4:8].tolist() == [0, 0, 0, 0]
        if namespace:
            assert 2 not in got.source


def test_wrong_arguments_are_refused() -> None:
    index = on_device([Document([], [1, 2, 3])], 1, 1, 6, "cpu")
    drafter = DeviceCalibrated(index.arena, index.headers, max_batch=2, max_row_tokens=8, params=DraftParams(k=3))
    tokens, words = torch.zeros((2, 8), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    out = DeviceDrafts.empty(2, 3, "cpu")
    with pytest.raises(ValueError, match="lessons"):
        drafter.propose(tokens, words, words, words, out, DeviceLessons.empty(2, 4, "cpu"))
    with pytest.raises(ValueError, match="rows"):
        drafter.propose(tokens, words, words[:1], words, out)
    with pytest.raises(ValueError, match="nothing to draft from"):
        DeviceCalibrated(index.arena, index.headers, max_batch=2, max_row_tokens=8, params=DraftParams(use_local=False, use_corpus=False))


def test_row_is_drafted_by_what_its_namespace_has_learned() -> None:
    """As it is when the draft is made; rows of no namespace by the prior."""
    index = on_device([Document([], [1, 2, 3])], 1, 1, 6, "cpu")
    blank = policy.blank_calibration()
    timid = blank.copy()
    timid[policy.WEIGHTS_AT : policy.DECILES_AT] = 0
    rows = Rows.of([[1, 2, 3, 1, 2]] * 2, "cpu")
    params = DraftParams(k=1, tau=0.0)
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=2, max_row_tokens=rows.tokens.shape[1], params=params, launch=LAUNCH,
        prior=torch.from_numpy(blank),
    )  # fmt: skip
    out = DeviceDrafts.empty(2, 1, "cpu")
    spaces = torch.tensor([0, -1, 0], dtype=torch.int32)

    def survival() -> list[float]:
        drafter.propose(rows.tokens, rows.lengths, rows.order, spaces, out)
        return [float(p) for p in out.probabilities[:, 0]]

    before = survival()
    index.publish_calibration(timid)
    after = survival()
    assert after[0] != before[0], "the first row of the batch has the namespace"
    assert after[1] == before[1]
    index.publish_calibration(blank)
    assert survival() == before


def test_lessons_are_learned_on_the_host() -> None:
    documents = [Document([], [1, 2, 3, 4, 5, 6])] * 3
    index = on_device(documents, 1, 2, 30, "cpu")
    params = DraftParams(k=2, tau=0.0)
    rows = Rows.of([[9, 8, 7, 1, 2]], "cpu")
    calibration = policy.blank_calibration()
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=1, max_row_tokens=rows.tokens.shape[1], params=params, launch=LAUNCH,
        prior=torch.from_numpy(calibration),
    )  # fmt: skip
    out, lessons = DeviceDrafts.empty(1, 2, "cpu"), DeviceLessons.empty(1, 2, "cpu")
    drafter.propose(rows.tokens, rows.lengths, rows.order, rows.namespaces, out, lessons)
    learned = Learned.in_process()
    lesson = replace(lessons.numpy(out.numpy()), learned=learned)
    assert lesson.drafts.tokens.tolist() == [[3, 4]]
    assert lesson.parents.tolist() == [[-1, 0]]
    lesson.learn(np.array([0]), np.array([[3, 9]], np.int32), np.array([2]))
    delta = learned.take()
    assert delta is not None
    text = [9, 8, 7, 1, 2]
    states = {i: oracle.look(calibration, [*text, *[3, 4][:i]], Corpus(documents), True) for i in range(2)}
    nodes = [oracle.Node(t, i - 1, float(lesson.drafts.probabilities[0, i])) for i, t in enumerate([3, 4])]
    expected = oracle.learn(calibration, [(oracle.OracleDraft(nodes, states), [3, 9])])
    assert delta == pytest.approx(expected, abs=1e-4)


def test_reader_is_told_of_a_version_that_was_overwritten_meanwhile() -> None:
    index = on_device([Document([], [5, 6, 7, 8, 9, 10])], 1, 1, 100, "cpu")
    memory = index.memory
    pin = memory.readers.add("reader")
    pin[PIN_MAPPED] = 1
    rows = Rows.of([[5, 6, 7]] * 3, "cpu")
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=3, max_row_tokens=rows.tokens.shape[1], params=DraftParams(k=4, tau=0.0), launch=LAUNCH,
        control=memory.control, pins=pin, prior=torch.from_numpy(policy.blank_calibration()),
    )  # fmt: skip
    out, lessons = DeviceDrafts.empty(3, 4, "cpu"), DeviceLessons.empty(3, 4, "cpu")

    def propose_() -> DeviceDrafts:
        drafter.propose(rows.tokens, rows.lengths, rows.order, rows.namespaces, out, lessons)
        return out

    assert propose_().tokens[:, :3].tolist() == [[8, 9, 10]] * 3
    assert out.version.tolist() == [index.current.number] * 3
    assert (pin[PIN_EPOCH], pin[PIN_ROWS]) == (0, 0), "the pin is gone, and its count of rows"
    index.headers[index.slot, DEVICE_RECLAIMED] = index.current.number
    assert propose_().counts.tolist() == [0] * 3
    assert out.version.tolist() == [TORN] * 3
    assert out.tokens.unique().tolist() == [-1]
    assert lessons.ints[:, :, VOTE_COUNT].unique().tolist() == [-1], "nothing is learned from it"


def test_levels_are_the_policys() -> None:
    levels = torch.arange(policy.LEVELS, dtype=torch.int32)
    matched = torch.arange(policy.REACH + 1, dtype=torch.int32)
    lengths, found = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    _levels[(1,)](lengths, found)
    assert lengths[: policy.LEVELS].tolist() == list(policy.LENGTHS)
    assert found[: policy.REACH + 1].tolist() == [sum(m >= length for length in policy.LENGTHS) - 1 for m in matched.tolist()]
    assert len(levels) == policy.LEVELS
    assert SHORT_LENGTHS in policy.LENGTHS


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("vocab", [3, 60, 3000])
def test_tails_are_found_in_all_segments(vocab: int, signed: bool) -> None:
    """Loci of a few and of hundreds of suffixes, at both ends of a segment too, of every length; none for what is not there."""
    rng = np.random.default_rng(vocab)
    documents = [Document([], np.minimum(rng.zipf(1.3, 60) - 1, vocab - 1).tolist()) for _ in range(24)]
    index = on_device(documents, 16, 22, vocab, "cpu")
    at = DEVICE_DESCRIPTORS_START + index.current.number % DEVICE_DESCRIPTORS * DEVICE_DESCRIPTOR_WORDS
    words = index.headers[index.slot, at : at + DEVICE_DESCRIPTOR_WORDS].contiguous()
    assert (words[DD_SIGNS : DD_SIGNS + 3] > 0).all()
    if not signed:
        words[DD_SIGNS : DD_SIGNS + 3] = 0
    tails = [d.tokens[end - 12 : end] for d in (documents[0], documents[17], documents[-1]) for end in (20, 60)]
    tails += [[vocab - 1] * 9, [0] * 9, [1, 0, vocab - 1, 0], [0], [*tails[0][:-1], 2**31 - 1]]
    for place, tail in enumerate(tails):
        padded = torch.tensor(tail, dtype=torch.int32)
        loci = torch.full((3, LOCUS_LENGTHS, 2), -7, dtype=torch.int32)
        grown = 1 + place % SHORT_LENGTHS
        if grown < len(tail):
            # At first all lengths anew, then those that are longer than what was added within the loci of before.
            _find[(1,)](index.arena, words, padded, len(tail) - grown, len(tail), loci)
            _find[(1,)](index.arena, words, padded, len(tail), grown, loci)
            _check_loci(index, loci.numpy(), tail)
        _find[(1,)](index.arena, words, padded, len(tail), len(tail), loci)
        _check_loci(index, loci.numpy(), tail)


def _check_loci(index: DeviceIndex, loci: NDArray[np.int32], tail: Sequence[int]) -> None:
    row = np.array(tail, np.int32)
    for segment in range(3):
        array = index.suffixes(segment).numpy()
        text = (index.live_text[1] if segment == 2 else index.text).numpy()
        for length in range(1, SHORT_LENGTHS + 1):
            low, high = loci[segment, length].tolist()
            expected = locus(text, array, 0, len(array), row, len(row) - length, length) if length <= len(tail) else (0, 0)
            assert high - low == expected[1] - expected[0]
            assert low == expected[0] or high == low


@triton.jit
def _find(arena: tl.tensor, words: tl.tensor, tail: tl.tensor, n: tl.tensor, since: tl.tensor, loci: tl.tensor) -> None:
    find_tail(arena, words, tail + n, n, since, loci)


@triton.jit
def _levels(lengths: tl.tensor, found: tl.tensor) -> None:
    at = tl.arange(0, 32)
    tl.store(lengths + at, length_of(tl.minimum(at, 8)))
    tl.store(found + at, level_of(at))
