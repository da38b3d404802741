"""From counts to probabilities: votes, what votes like them were worth, and the mixture of the best three candidates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from draftd.drafter.ops.calibrated.cpu_tally import DISTINCT, LATEST, LATEST_COUNT, MOST, MOST_COUNT, SEEN, count_at
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.policy import (
    CANDIDATES,
    COARSE_AT,
    COARSE_WEIGHT,
    COUNT_BOUNDS,
    COUNT_BUCKETS,
    ESCAPE_FLOOR,
    FEATURES,
    FINE_AT,
    FINE_WEIGHT,
    GAPS,
    KINDS,
    KNOT_SPACING,
    KNOTS,
    LATEST_FLOOR,
    LEAST_PROBABLE,
    LENGTH_BUCKET_COUNT,
    LENGTH_BUCKETS,
    LENGTHS,
    LEVELS,
    MAX_VOTES,
    MOST_PROBABLE,
    REFINED_AT,
    REFINED_WEIGHT,
    SHARE_BOUNDS,
    SHARE_BUCKETS,
    SOURCES,
    SUM_LEAST,
    SUM_MOST,
    SURVIVAL_BOUNDS,
    SURVIVAL_BUCKETS,
    TOP_LEVELS,
    WEIGHT_WORDS,
    WEIGHTS_AT,
)

VOTE_COUNT, WEIGHTS, CANDIDATE_COUNT, CANDIDATE_TOKENS = range(4)
VOTE_TOKENS = CANDIDATE_TOKENS + CANDIDATES
VOTE_CELLS = VOTE_TOKENS + MAX_VOTES
EVIDENCE_INTS = VOTE_CELLS + MAX_VOTES
"""A state's evidence in int32: votes (-1: nobody looked), weight vector, candidates, their tokens, the votes' tokens and fine cells."""
PROBABILITIES = 0
FEATURE_VALUES = PROBABILITIES + CANDIDATES
EVIDENCE_FLOATS = FEATURE_VALUES + CANDIDATES * FEATURES
"""And in float32: the candidates' probabilities, then the features of each."""

_TOTAL, _TOKEN = SOURCES, SOURCES + 1
SCRATCH_COLUMNS = SOURCES + 2
"""Of each voted token: its best estimate in each source, the sum of all, and the token."""

_LENGTHS = np.array(LENGTHS, np.int64)
_LENGTH_BUCKETS = np.array(LENGTH_BUCKETS, np.int64)
_SHARES = np.array(SHARE_BOUNDS, np.float64)
_COUNTS = np.array(COUNT_BOUNDS, np.int64)
_SURVIVALS = np.array(SURVIVAL_BOUNDS, np.float64)


@kernel
def _clip(probability: float) -> float:
    return min(max(probability, LEAST_PROBABLE), MOST_PROBABLE)


@kernel
def _logit(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


@kernel
def _share_bucket(count: int, seen: int) -> int:
    if count == seen:
        return SHARE_BUCKETS - 1
    share = count / seen
    found = 0
    while found < len(_SHARES) and share >= _SHARES[found]:
        found += 1
    return found


@kernel
def _count_bucket(seen: int) -> int:
    found = 0
    while found < len(_COUNTS) and seen > _COUNTS[found]:
        found += 1
    return found


@kernel
def coarse_of(fine: int) -> int:
    """The coarse cell of a fine one."""
    kind = fine % KINDS
    rest = fine // KINDS
    share = rest % SHARE_BUCKETS
    rest = rest // (SHARE_BUCKETS * COUNT_BUCKETS)
    gap = rest % GAPS
    rest = rest // GAPS
    level, source = rest % LEVELS, rest // LEVELS
    return (((source * LENGTH_BUCKET_COUNT + _LENGTH_BUCKETS[level]) * GAPS + gap) * SHARE_BUCKETS + share) * KINDS + kind


@kernel(inline="always")
def _count(statistics: Any, tally: Any, lowest: int, level: int, token: int) -> Any:
    """How often `token` followed at a level of a source; of a level that was sampled, other tokens than the voted ones count as unseen."""
    if token == statistics[level, MOST]:
        return statistics[level, MOST_COUNT]
    if token == statistics[level, LATEST]:
        return statistics[level, LATEST_COUNT]
    return count_at(tally, token, level) if level >= lowest else np.int64(0)


@kernel(inline="always")
def _best(scratch: Any, place: int) -> float:
    """The best estimate of a token over all sources."""
    return max(max(scratch[place, 0], scratch[place, 1]), scratch[place, 2])


@kernel(inline="always")
def _second(scratch: Any, place: int) -> float:
    """The best one of the sources but for that of the best."""
    low, high = min(scratch[place, 0], scratch[place, 1]), max(scratch[place, 0], scratch[place, 1])
    return max(low, min(high, scratch[place, 2]))


@kernel
def mix(
    calibration: Any, statistics: Any, tops: Any, own: Any, corpus: Any, group: Any, lowest: int, scratch: Any, ints: Any, floats: Any,
    sources: Any,
) -> None:  # fmt: skip
    """Fills a state's evidence.

    Args:
        calibration: float32 [CALIBRATION_WORDS].
        statistics: int64 [SOURCES, LEVELS, COLUMNS]; tops: int64 [SOURCES], the longest level of each source, -1 for none.
        own, corpus, group: Their tallies; the corpus's holds levels from `lowest` on.
        scratch: float64 [MAX_VOTES, SCRATCH_COLUMNS].
        ints: int32 [EVIDENCE_INTS]; out. floats: float32 [EVIDENCE_FLOATS]; out.
        sources: int64 [CANDIDATES]; out, the source whose vote for a candidate is the best.
    """
    votes = 0
    voted = 0
    for source in range(SOURCES):
        top = tops[source]
        for level in range(max(0, top + 1 - TOP_LEVELS), top + 1):
            of = statistics[source, level]
            seen = of[SEEN]
            same = of[MOST] == of[LATEST]
            gap = min(top - level, GAPS - 1)
            base = ((source * LEVELS + level) * GAPS + gap) * COUNT_BUCKETS + _count_bucket(seen)
            coarse_base = (source * LENGTH_BUCKET_COUNT + _LENGTH_BUCKETS[level]) * GAPS + gap
            discount = _LENGTHS[level] / (_LENGTHS[level] + 1.0) / (seen + 1.0)
            for which in range(1 if same else 2):
                token = of[MOST] if which == 0 else of[LATEST]
                count = of[MOST_COUNT] if which == 0 else of[LATEST_COUNT]
                guess = count * discount
                if which == 1:
                    kind = 2
                    guess = max(guess, LATEST_FLOOR)
                else:
                    kind = 0 if same else 1
                share = _share_bucket(count, seen)
                fine = (base * SHARE_BUCKETS + share) * KINDS + kind
                at = COARSE_AT + 2 * ((coarse_base * SHARE_BUCKETS + share) * KINDS + kind)
                estimate = (calibration[at] + COARSE_WEIGHT * guess) / (calibration[at + 1] + COARSE_WEIGHT)
                at = FINE_AT + 2 * fine
                estimate = _clip((calibration[at] + FINE_WEIGHT * estimate) / (calibration[at + 1] + FINE_WEIGHT))
                ints[VOTE_TOKENS + votes] = token
                ints[VOTE_CELLS + votes] = fine
                votes += 1
                place = 0
                while place < voted and scratch[place, _TOKEN] != token:
                    place += 1
                if place == voted:
                    for column in range(_TOKEN):
                        scratch[place, column] = 0.0
                    scratch[place, _TOKEN] = token
                    voted += 1
                scratch[place, source] = max(scratch[place, source], estimate)
                scratch[place, _TOTAL] += estimate
    ints[VOTE_COUNT] = votes
    kept = min(voted, CANDIDATES)
    ints[CANDIDATE_COUNT] = kept
    longest = max(max(tops[0], tops[1]), tops[2])
    weights = _LENGTH_BUCKETS[longest] if longest >= 0 else 0
    ints[WEIGHTS] = weights
    for rank in range(kept):
        best = rank
        for place in range(rank + 1, voted):
            q, most = _best(scratch, place), _best(scratch, best)
            if q > most or (q == most and scratch[place, _TOTAL] > scratch[best, _TOTAL]):
                best = place
        for column in range(SCRATCH_COLUMNS):
            scratch[rank, column], scratch[best, column] = scratch[best, column], scratch[rank, column]
    for rank in range(kept):
        token = np.int64(scratch[rank, _TOKEN])
        first = _best(scratch, rank)
        second = _second(scratch, rank)
        other = 1 if rank == 0 else 0
        rival = _best(scratch, other) if kept > 1 else 0.0
        total = scratch[rank, _TOTAL]
        blended = ESCAPE_FLOOR
        for level in range(max(0, longest - 1), longest + 1):
            count, seen, distinct = np.int64(0), np.int64(0), np.int64(0)
            if level <= tops[0]:
                of = statistics[0, level]
                count += _count(statistics[0], own, 0, level, token)
                seen += of[SEEN]
                distinct += of[DISTINCT]
            if level <= tops[1]:
                of = statistics[1, level]
                count += _count(statistics[1], corpus, lowest, level, token)
                seen += of[SEEN]
                distinct += of[DISTINCT]
            if level <= tops[2]:
                of = statistics[2, level]
                count += _count(statistics[2], group, 0, level, token)
                seen += of[SEEN]
                distinct += of[DISTINCT]
            blended = (count + distinct * blended) / (seen + distinct)
        at = FEATURE_VALUES + rank * FEATURES
        floats[at] = _logit(first)
        floats[at + 1] = _logit(second) + 2.0 if second > 0.0 else 0.0
        floats[at + 2] = _logit(rival) + 2.0 if rival > 0.0 else 0.0
        floats[at + 3] = 1.0
        floats[at + 4] = 1.0 if second > 0.0 else 0.0
        floats[at + 5] = 1.0 if rival > 0.0 else 0.0
        floats[at + 6] = _logit(min(max(total / (1.0 + total), SUM_LEAST), SUM_MOST))
        floats[at + 7] = _logit(_clip(blended))
        score = 0.0
        of_weights = WEIGHTS_AT + (weights * CANDIDATES + rank) * WEIGHT_WORDS
        for feature in range(FEATURES):
            score += np.float64(calibration[of_weights + feature]) * floats[at + feature]
        floats[PROBABILITIES + rank] = _clip(1.0 / (1.0 + math.exp(-score)))
        ints[CANDIDATE_TOKENS + rank] = token
        sources[rank] = 0
        for source in range(1, SOURCES):
            if scratch[rank, source] > scratch[rank, sources[rank]]:
                sources[rank] = source


@kernel
def refined_context(place: int, survival: float) -> int:
    """First cell of what refines the candidate at a place (0 is the likeliest) after tokens of that survival (1: none)."""
    if place > 0:
        return (SURVIVAL_BUCKETS + place - 1) * KNOTS
    if survival >= 1.0:
        return 0
    bucket = 1
    for bound in _SURVIVALS:
        if survival >= bound:
            bucket += 1
    return bucket * KNOTS


@kernel
def knot_of(probability: float) -> tuple[int, float]:
    """The knot below a probability, and the weight of the one above."""
    at = min(max(_logit(np.float64(probability)) / KNOT_SPACING + (KNOTS - 1) / 2, 0.0), KNOTS - 1.001)
    knot = int(at)
    return knot, at - knot


@kernel
def refine(calibration: Any, probability: float, place: int, survival: float) -> float:
    """What a mixed probability has turned out to be, given the candidate's place and what was drafted before."""
    knot, weight = knot_of(probability)
    context = refined_context(place, survival)
    refined = 0.0
    for side in range(2):
        at = REFINED_AT + 2 * (context + knot + side)
        own = 1.0 / (1.0 + math.exp(-(knot + side - (KNOTS - 1) / 2) * KNOT_SPACING))
        value = (calibration[at] + REFINED_WEIGHT * own) / (calibration[at + 1] + REFINED_WEIGHT)
        refined += value * (weight if side == 1 else 1.0 - weight)
    return _clip(refined)
