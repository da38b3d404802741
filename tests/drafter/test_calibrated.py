"""The rule `calibrated`: the kernel against the oracle, in what it drafts and in what it learns."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftd.drafter import policy
from draftd.drafter.ops.calibrated import oracle
from draftd.drafter.ops.calibrated.cpu_learn import learn, take_in
from draftd.drafter.ops.calibrated.cpu_mixer import CANDIDATE_COUNT, CANDIDATE_TOKENS, VOTE_CELLS, VOTE_COUNT, VOTE_TOKENS
from draftd.drafter.ops.calibrated.oracle import Corpus, Document, Node, OracleDraft
from tests.drafter.calibrated import KernelDrafts, draft, lay_out

K = 12
TOLERANCE = 2e-4


def text_of(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    """Tokens that repeat themselves now and then, as answers do."""
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 4 and rng.random() < 0.5:
            start = int(rng.integers(len(tokens)))
            tokens += tokens[start : start + int(rng.integers(1, 30))]
        else:
            tokens += rng.integers(0, vocab, int(rng.integers(1, 6))).tolist()
    return tokens[:length]


def learned(rng: np.random.Generator) -> NDArray[np.float32]:
    """A calibration with a past."""
    calibration = policy.blank_calibration()
    cells = calibration[: policy.WEIGHTS_AT].reshape(-1, 2)
    cells[:, 1] = rng.integers(0, 50, len(cells))
    cells[:, 0] = np.floor(cells[:, 1] * rng.random(len(cells)))
    weights = calibration[policy.WEIGHTS_AT : policy.DECILES_AT].reshape(-1, policy.WEIGHT_WORDS)[:, :-1]
    weights += rng.normal(0, 0.1, weights.shape)
    return calibration


def groups_of(seed: int, rows: list[list[int]], vocab: int) -> list[list[list[int]]]:
    """For each row what the others of its group have generated: texts with parts of the row in them; none for some."""
    rng = np.random.default_rng(seed + 1)
    groups: list[list[list[int]]] = []
    for row in rows:
        others = []
        for _ in range(int(rng.integers(0, 4))):
            start = int(rng.integers(len(row) + 1))
            others.append(text_of(rng, int(rng.integers(0, 50)), vocab) + row[start:] + text_of(rng, int(rng.integers(0, 20)), vocab))
        groups.append(others)
    return groups


def scene(seed: int, documents: int, vocab: int, longest: int) -> tuple[list[Document], list[list[int]], NDArray[np.float32], int, int]:
    rng = np.random.default_rng(seed)
    stem = text_of(rng, 60, vocab)
    corpus = []
    for _ in range(documents):
        start = int(rng.integers(len(stem)))
        copied = stem[start : start + int(rng.integers(0, min(40, longest)))]
        tokens = text_of(rng, int(rng.integers(0, longest)), vocab) + copied
        corpus.append(Document(text_of(rng, int(rng.integers(0, 12)), vocab), tokens))
    rows = []
    for _ in range(4):
        start = int(rng.integers(len(stem)))
        rows.append(text_of(rng, int(rng.integers(0, 80)), vocab) + stem[start : start + int(rng.integers(0, 30))])
    recent_from, live_from = sorted(int(x) for x in rng.integers(0, documents + 1, 2))
    return corpus, rows, learned(rng), recent_from, live_from


def check_rows(
    calibration: NDArray[np.float32],
    rows: list[list[int]],
    corpus: Corpus | None,
    got: KernelDrafts,
    tau: float,
    branches: int,
    local: bool,
    groups: list[list[list[int]]],
) -> list[OracleDraft | None]:
    """Every state that the kernel looked at is the oracle's, and so is what it drafts next; ties go either way.

    Returns:
        What the kernel did in the oracle's words; None for a row where rounding has ranked candidates differently.
    """
    drafts: list[OracleDraft | None] = []
    for r, row in enumerate(rows):
        draft_, same = OracleDraft([], {}), True
        waiting: dict[tuple[int, int], float] = {}
        paths: list[list[int]] = [[]]
        for place in range(got.counts[r] + 1):
            ints = got.ints[r, place]
            if place > 0:
                token, parent = int(got.tokens[r, place - 1]), int(got.parents[r, place - 1])
                survival = waiting.pop((parent, token))
                assert survival >= max(waiting.values(), default=0.0) - TOLERANCE, "not the likeliest"
                assert survival >= tau - TOLERANCE
                assert got.survival[r, place - 1] == pytest.approx(survival, abs=TOLERANCE)
                draft_.nodes.append(Node(token, parent, float(got.survival[r, place - 1])))
                paths.append([*paths[parent + 1], token])
            if not row or place == K:
                assert ints[VOTE_COUNT] == -1
                break
            state = oracle.look(calibration, [*row, *paths[place]], corpus, local, groups[r])
            draft_.states[place] = state
            count = ints[VOTE_COUNT]
            votes = list(zip(ints[VOTE_TOKENS:][:count].tolist(), ints[VOTE_CELLS:][:count].tolist(), strict=True))
            assert votes == [(v.token, v.fine) for v in state.votes]
            tokens = ints[CANDIDATE_TOKENS:][: ints[CANDIDATE_COUNT]].tolist()
            probabilities = got.floats[r, place, : len(tokens)]
            if tokens == [c.token for c in state.candidates]:
                assert probabilities == pytest.approx([c.probability for c in state.candidates], abs=TOLERANCE)
            else:
                ranked = oracle.rank(calibration, state.votes)
                first = {e.token: e.first for e in ranked}
                assert [first[t] for t in tokens] == pytest.approx([e.first for e in ranked[: len(tokens)]], abs=TOLERANCE)
                same = False
            survival = draft_.nodes[place - 1].survival if place else 1.0
            for order, best in enumerate(np.argsort(-probabilities, kind="stable")[:branches]):
                refined = oracle.refine(calibration, float(probabilities[best]), order, survival)
                waiting[place - 1, tokens[best]] = survival * refined
        assert got.counts[r] == K or max(waiting.values(), default=0.0) < tau + TOLERANCE, "stopped too early"
        drafts.append(draft_ if same else None)
    return drafts


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    documents=st.integers(0, 12),
    vocab=st.sampled_from([2, 5, 40, 1000]),
    tau=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    branches=st.sampled_from([1, 2, 3]),
    sources=st.sampled_from([(True, True), (True, False), (False, True)]),
    shift=st.sampled_from([0, 3]),
    grouped=st.booleans(),
)
def test_kernel_is_the_oracle(
    seed: int, documents: int, vocab: int, tau: float, branches: int, sources: tuple[bool, bool], shift: int, grouped: bool
) -> None:
    """Documents in all three segments; suffixes so rare that every occurrence is read; with groups and without."""
    corpus, rows, calibration, recent_from, live_from = scene(seed, documents, vocab, 4 * vocab if vocab < 40 else 60)
    assume(max(Counter(t for d in corpus for t in d.tokens).values(), default=0) <= policy.FEW)
    local, use_corpus = sources
    index = lay_out(corpus, recent_from, live_from, vocab, shift)
    groups = groups_of(seed, rows, vocab) if grouped else []
    got = draft(index, calibration, rows, k=K, tau=tau, branches=branches, use_local=local, use_corpus=use_corpus, groups=groups)
    others = groups or [[] for _ in rows]
    drafts = check_rows(calibration, rows, Corpus(corpus) if use_corpus else None, got, tau, branches, local, others)

    rng = np.random.default_rng(seed)
    truths = [text_of(rng, 3, vocab) for _ in rows]
    for r, truth in enumerate(truths):
        at = 0
        for i in range(int(rng.integers(0, 4))):
            # Mostly what was drafted, as a good draft is.
            following = [j + 1 for j in range(got.counts[r]) if got.parents[r, j] == at - 1]
            if not following:
                break
            at = following[int(rng.integers(len(following)))]
            truth[i] = int(got.tokens[r, at - 1])
    known = [r for r, d in enumerate(drafts) if d is not None]
    delta = np.zeros(policy.CALIBRATION_WORDS, np.float32)
    learn(
        np.array(known, np.int64), got.tokens, got.survival, got.parents, got.counts, got.ints, got.floats,
        np.array([truths[r] for r in known], np.int32).reshape(-1, 3), np.full(len(known), 3, np.int64), delta,
    )  # fmt: skip
    expected = oracle.learn(calibration, [(d, truth) for d, truth in zip(drafts, truths, strict=True) if d is not None])
    assert delta == pytest.approx(expected, abs=1e-5)
    after, oracles = calibration.copy(), calibration.copy()
    take_in(after, delta)
    oracle.take_in(oracles, expected)
    assert after == pytest.approx(oracles, abs=1e-4)
    assert not delta.any()


def test_of_a_group_the_last_tokens_count() -> None:
    """What stands further back than that is not seen, and nothing matches across two outputs."""
    index = lay_out([], 0, 0, 30)
    filler = [20] * (policy.GROUP_TOKENS - 1)
    blank = policy.blank_calibration()
    for outputs, expected in (
        ([[1, 2, 3, 4], filler[:-1]], [4]),
        ([[1, 2, 3, 4], filler], []),
        ([[1, 2, 9, 8], [1, 2, 3, 4], filler[3:]], [4]),
        ([[2, 3], [4, 5]], []),
    ):
        got = draft(index, blank, [[2, 3]], k=1, tau=0.0, groups=[outputs])
        assert got.tokens[0, : got.counts[0]].tolist() == expected
        nodes = oracle.propose(blank, [2, 3], None, nodes=1, tau=0.0, group=outputs).nodes
        assert [node.token for node in nodes] == expected
        assert [node.survival for node in nodes] == pytest.approx(got.survival[0, : got.counts[0]].tolist(), abs=TOLERANCE)
        assert got.source[0] == (3 if expected else 0)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.sampled_from([5, 40]))
def test_rows_without_a_group_are_drafted_as_if_there_were_none(seed: int, vocab: int) -> None:
    """To the last bit of probability, also beside rows that have one."""
    corpus, rows, calibration, recent_from, live_from = scene(seed, 6, vocab, 60)
    index = lay_out(corpus, recent_from, live_from, vocab)
    alone = draft(index, calibration, rows, k=K, tau=0.05)
    groups = [others if r % 2 else [] for r, others in enumerate(groups_of(seed, rows, vocab))]
    beside = draft(index, calibration, rows, k=K, tau=0.05, groups=groups)
    for r in range(0, len(rows), 2):
        for name in ("tokens", "survival", "counts", "source", "match_length", "occurrences"):
            assert (getattr(alone, name)[r] == getattr(beside, name)[r]).all()


def test_a_frequent_suffix_is_sampled() -> None:
    """Shares of followers of a suffix with far more occurrences than are read one by one; the latest is the last document's."""
    rng = np.random.default_rng(0)
    followers = rng.choice([11, 12, 13, 14], 900, p=[0.55, 0.3, 0.1, 0.05]).tolist()
    index = lay_out([Document([], [1, f, 5]) for f in followers], 500, 800, 20)
    got = draft(index, policy.blank_calibration(), [[7, 1]], k=2, tau=0.0, use_local=False)
    ints = got.ints[0, 0]
    count, latest = followers.count(11), followers[-1]
    expected = oracle.vote(1, 0, 0, 11, count, 900, 0 if latest == 11 else 1)
    assert ints[VOTE_TOKENS] == 11
    assert ints[VOTE_CELLS] == expected.fine
    assert got.occurrences[0] == 900
    if latest != 11:
        assert ints[VOTE_TOKENS + 1] == latest


def test_what_stands_before_documents_tells_their_beginnings_apart() -> None:
    """Many documents begin alike; the end of the prompt says which of them goes on how."""
    documents = [Document([3 + i % 2] * 6, [1, 20 + i % 2, 9]) for i in range(80)]
    index = lay_out(documents, 30, 60, 30)
    for way in (0, 1):
        got = draft(index, policy.blank_calibration(), [[3 + way] * 6 + [1]], k=2, tau=0.0, use_local=False)
        assert got.tokens[0].tolist() == [20 + way, 9]
        assert got.match_length[0] == 6


def test_what_stands_before_a_document_is_never_drafted() -> None:
    """A row that ends as a prompt does gets nothing from it."""
    index = lay_out([Document([3, 4, 5, 6], [7, 8, 9])] * 5, 2, 4, 30)
    got = draft(index, policy.blank_calibration(), [[3, 4, 5], [5, 6]], k=4, tau=0.0, use_local=False)
    assert got.counts.tolist() == [0, 0]


def test_nothing_matches_across_documents() -> None:
    """The text before a document's lead is another document's."""
    index = lay_out([Document([], [1, 2, 3]), Document([], [4, 5, 6])], 2, 2, 30)
    got = draft(index, policy.blank_calibration(), [[2, 3, 4]], k=4, tau=0.0, use_local=False)
    assert got.match_length[0] == 1
    assert got.tokens[0, :2].tolist() == [5, 6]


def test_steps_of_many_states_do_not_overshoot() -> None:
    """What thousands of rows learn from one calibration moves its weights no further than what a step of a few rows may."""
    index = lay_out([Document([], [1, 2, 3])] * 3, 3, 3, 30)
    calibration = policy.blank_calibration()
    delta = np.zeros_like(calibration)
    got = draft(index, calibration, [[7, 1]] * 500, k=2, tau=0.0, use_local=False)
    truth = np.full((500, 1), 29, np.int32)
    places = np.arange(500)
    learn(places, got.tokens, got.survival, got.parents, got.counts, got.ints, got.floats, truth, np.ones(500, np.int64), delta)
    take_in(calibration, delta)
    moved = np.abs(calibration - policy.blank_calibration())[policy.WEIGHTS_AT : policy.DECILES_AT]
    assert 0 < moved.max() <= policy.MOST_STATES * policy.RATE * 8
