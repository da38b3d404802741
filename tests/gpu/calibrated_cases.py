"""The rule `calibrated` on a GPU against its oracle: small corpora in device memory, and what every state of a draft must be.

A draft on a GPU may leave out votes of levels below the longest: those that it has must be the oracle's, and so what it makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftd.drafter import policy
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_calibrated import DeviceCalibrated, DeviceLessons
from draftd.drafter.device_index import DeviceIndex, DeviceShape
from draftd.drafter.device_matching import Launch
from draftd.drafter.index import Version
from draftd.drafter.lessons import Lesson
from draftd.drafter.ops.calibrated import oracle
from draftd.drafter.ops.calibrated.cpu_mixer import (
    CANDIDATE_COUNT,
    CANDIDATE_TOKENS,
    EVIDENCE_FLOATS,
    FEATURE_VALUES,
    PROBABILITIES,
    VOTE_CELLS,
    VOTE_COUNT,
    VOTE_TOKENS,
    WEIGHTS,
)
from draftd.drafter.ops.calibrated.oracle import Corpus, Document, Followers, Vote
from draftd.drafter.ops.merge.cpu import fill_buckets
from draftd.drafter.params import DraftParams
from draftd.drafter.policy import FEATURES
from tests.drafter.calibrated import DEPTH, lay_out

TOLERANCE = 1e-4
COMPLETE_LEVELS = 3
"""The longest levels that the source with the longest match votes with, if they occur."""


def on_device(documents: Sequence[Document], recent_from: int, live_from: int, vocab: int, device: str) -> DeviceIndex:
    """An index in device memory; see tests.drafter.calibrated.lay_out."""
    text, main, _, _, _, recent, _, live_text, live, *_ = lay_out(documents, recent_from, live_from, vocab).arguments
    guard = DEPTH + 1
    index = DeviceIndex(DeviceShape(len(text) - guard, len(text), len(live_text), vocab, DEPTH), device)  # type: ignore[arg-type]
    index.text.copy_(torch.from_numpy(text))
    index.live_text[1, : len(live_text)].copy_(torch.from_numpy(live_text))  # type: ignore[arg-type]
    lengths = []
    for segment, (array, suffixes) in enumerate(zip((index.main, index.recent, index.live), (main, recent, live), strict=True)):
        array[1, : len(suffixes)].copy_(torch.from_numpy(suffixes))  # type: ignore[arg-type]
        buckets = np.zeros(index.shape.buckets + 1, np.int32)
        fill_buckets(live_text if segment == 2 else text, suffixes, index.shape.shift, buckets)
        index.buckets[segment, 1].copy_(torch.from_numpy(buckets))
        index.sign(segment, 1, array[1, : len(suffixes)])  # type: ignore[arg-type]
        lengths.append(len(suffixes))  # type: ignore[arg-type]
    index.publish(Version(copies=(1, 1, 1), lengths=(lengths[0], lengths[1], lengths[2])))
    return index


@dataclass(frozen=True)
class Rows:
    """Rows in an engine's buffer on the device: in another order, with noise behind their lengths."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    order: torch.Tensor
    namespaces: torch.Tensor

    @staticmethod
    def of(rows: Sequence[Sequence[int]], device: str) -> Rows:
        """The rows, all of the first namespace."""
        n, width = len(rows), max(map(len, rows)) + 3
        buffer = np.random.default_rng(n).integers(0, 5, (n + 1, width)).astype(np.int32)
        lengths = np.zeros(n + 1, np.int64)
        where = np.arange(n, 0, -1, dtype=np.int32)
        for row, slot in zip(rows, where, strict=True):
            buffer[slot, : len(row)] = row
            lengths[slot] = len(row)
        arrays = (buffer, lengths, where, np.zeros(n + 1, np.int32))
        return Rows(*(torch.from_numpy(a).to(device) for a in arrays))


def propose(
    index: DeviceIndex,
    rows: Sequence[Sequence[int]],
    calibration: NDArray[np.float32],
    params: DraftParams,
    launch: Launch | None = None,
    searches: int = 64,
) -> Lesson:
    """Drafts of the GPU kernels, twice: the workspace must be clean again."""
    device = str(index.arena.device)
    buffer = Rows.of(rows, device)
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=len(rows), max_row_tokens=buffer.tokens.shape[1], params=params, launch=launch,
        searches=searches, doubt=1.0, search_tokens=0, prior=torch.from_numpy(calibration.copy()).to(device),
    )  # fmt: skip
    out, lessons = DeviceDrafts.empty(len(rows), params.k, device), DeviceLessons.empty(len(rows), params.k, device)
    answers = []
    for _ in range(2):
        out.tokens.fill_(-7)
        lessons.ints.fill_(77)
        drafter.propose(buffer.tokens, buffer.lengths, buffer.order, buffer.namespaces, out, lessons)
        answers.append(lessons.numpy(out.numpy()))
    assert (answers[0].drafts.tokens == answers[1].drafts.tokens).all()
    return answers[1]


def _levels(text: Sequence[int], corpus: Corpus, params: DraftParams) -> list[list[Followers]]:
    own = oracle.own_followers(text) if params.use_local else []
    return [own, corpus.followers(text) if params.use_corpus else []]


def _blend(token: int, sources: Sequence[Sequence[Followers]]) -> float:
    """oracle.blend over levels of which some may be missing."""
    longest = max(map(len, sources)) - 1
    probability = policy.ESCAPE_FLOOR
    for level in (longest - 1, longest):
        there = [levels[level] for levels in sources if 0 <= level < len(levels) and levels[level].seen]
        if there:
            count, seen = sum(f.counts[token] for f in there), sum(f.seen for f in there)
            distinct = sum(len(f.counts) for f in there)
            probability = (count + distinct * probability) / (seen + distinct)
    return oracle.clip(probability)


def check_draft(lesson: Lesson, r: int, row: Sequence[int], corpus: Corpus, calibration: NDArray[np.float32], params: DraftParams) -> None:
    """Every state of a row's draft is the oracle's, but for votes of levels that a draft on a GPU may leave out.

    Raises:
        AssertionError: One is not.
    """
    drafts = lesson.drafts
    survival = 1.0
    count = int(drafts.counts[r])
    assert drafts.tokens[r, count:].tolist() == [-1] * (params.k - count)
    for state in range(params.k + 1):
        ints = lesson.ints[r, state]
        if state == params.k or state > count or not row:
            assert ints[VOTE_COUNT] == -1, "a state that nobody looked at"
            continue
        text = [*row, *drafts.tokens[r, :state].tolist()]
        sources = _levels(text, corpus, params)
        expected = [v for source, levels in enumerate(sources) for v in oracle.votes_of(source, levels)]
        by_cell = {(v.token, v.fine): v for v in expected}
        size = ints[VOTE_COUNT]
        votes: list[Vote] = []
        for token, cell in zip(ints[VOTE_TOKENS:][:size].tolist(), ints[VOTE_CELLS:][:size].tolist(), strict=True):
            assert (token, cell) in by_cell, f"state {state}: a vote for {token} in cell {cell} that the oracle has not: {expected}"
            votes.append(by_cell[token, cell])
        assert len(set(votes)) == size
        seen = [{_level_of(v) for v in votes if v.source == s} for s in (0, 1)]
        tops = [len(levels) - 1 for levels in sources]
        if state == 0:
            assert len(votes) == len(expected)
        elif max(tops) >= 0:
            longest = [s for s in (0, 1) if tops[s] >= 0 and tops[s] == max(tops)]
            needed = [set(range(max(0, max(tops) + 1 - COMPLETE_LEVELS), max(tops) + 1)) <= seen[s] for s in longest]
            assert any(needed), f"state {state}: of {tops} only {seen} vote"
        voting = [[f if level in seen[s] else Followers() for level, f in enumerate(levels)] for s, levels in enumerate(sources)]
        voting = [levels if seen[s] else [] for s, levels in enumerate(voting)]
        survival = _check_mix(lesson, r, state, votes, voting, calibration, survival)
        if state == count:
            assert survival < params.tau + TOLERANCE, "stopped too early"
            continue
        assert survival >= params.tau - TOLERANCE
        assert drafts.probabilities[r, state] == pytest.approx(survival, abs=TOLERANCE)
        survival = float(drafts.probabilities[r, state])


def _level_of(voted: Vote) -> int:
    cell = voted.fine // (policy.KINDS * policy.SHARE_BUCKETS * policy.COUNT_BUCKETS * policy.GAPS)
    return cell % policy.LEVELS


def _check_mix(
    lesson: Lesson, r: int, state: int, votes: list[Vote], sources: list[list[Followers]], calibration: NDArray[np.float32], survival: float
) -> float:
    """The candidates and their probabilities are those that the votes give; answers the survival of the likeliest, 0 if there is none."""
    ints, floats = lesson.ints[r, state], lesson.floats[r, state]
    ranked = oracle.rank(calibration, votes)
    kept = int(ints[CANDIDATE_COUNT])
    assert kept == min(len(ranked), policy.CANDIDATES)
    if not kept:
        return 0.0
    tokens = ints[CANDIDATE_TOKENS:][:kept].tolist()
    estimates = {e.token: e for e in ranked}
    assert [estimates[t].first for t in tokens] == pytest.approx([e.first for e in ranked[:kept]], abs=TOLERANCE)
    weights = policy.LENGTH_BUCKETS[max(map(len, sources)) - 1]
    assert ints[WEIGHTS] == weights
    mixer = calibration[policy.WEIGHTS_AT : policy.DECILES_AT].reshape(-1, policy.CANDIDATES, policy.WEIGHT_WORDS)[weights]
    probabilities = []
    for place, token in enumerate(tokens):
        _, first, second, total = estimates[token]
        rival = max((estimates[t].first for t in tokens if t != token), default=0.0)
        features = (
            oracle.logit(first),
            oracle.logit(second) + 2 if second > 0 else 0.0,
            oracle.logit(rival) + 2 if rival > 0 else 0.0,
            1.0,
            float(second > 0),
            float(rival > 0),
            oracle.logit(min(max(total / (1 + total), policy.SUM_LEAST), policy.SUM_MOST)),
            oracle.logit(_blend(token, sources)),
        )
        got = floats[FEATURE_VALUES + place * FEATURES :][:FEATURES]
        assert got == pytest.approx(features, abs=5e-3), f"state {state}, candidate {place}"
        score = sum(float(w) * f for w, f in zip(mixer[place], features, strict=False))
        probabilities.append(oracle.clip(1 / (1 + np.exp(-score))))
    assert floats[PROBABILITIES:][:kept] == pytest.approx(probabilities, abs=TOLERANCE)
    assert floats.shape == (EVIDENCE_FLOATS,)
    best = int(np.argmax(floats[PROBABILITIES:][:kept]))
    if state < lesson.drafts.counts[r]:
        assert lesson.drafts.tokens[r, state] == tokens[best]
    return survival * oracle.refine(calibration, float(floats[PROBABILITIES + best]), 0, survival)
