"""What drafts teach, once it is known what the engine committed: hits and trials of cells, steps of weights, and how right they were."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftd.drafter.ops.calibrated.cpu_mixer import (
    CANDIDATE_COUNT,
    CANDIDATE_TOKENS,
    FEATURE_VALUES,
    PROBABILITIES,
    VOTE_CELLS,
    VOTE_COUNT,
    VOTE_TOKENS,
    WEIGHTS,
    coarse_of,
    knot_of,
    refined_context,
)
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.policy import (
    BRIER_AT,
    CANDIDATES,
    COARSE_AT,
    COARSE_LIMIT,
    DECILES,
    DECILES_AT,
    FEATURES,
    FINE_AT,
    FINE_LIMIT,
    MOST_STATES,
    RATE,
    REFINED_AT,
    REFINED_LIMIT,
    WEIGHT_WORDS,
    WEIGHTS_AT,
)


@kernel
def learn(
    places: Any, tokens: Any, survival: Any, parents: Any, counts: Any, ints: Any, floats: Any, truth: Any, truths: Any, delta: Any
) -> None:
    """Adds what some of n drafts teach to `delta`.

    Args:
        places: int64 [m]; which drafts.
        tokens, survival, parents: [n, k]; counts: int32 [n]; the drafts.
        ints: int32 [n, k + 1, EVIDENCE_INTS]; floats: float32 [n, k + 1, EVIDENCE_FLOATS]; what they were decided from.
        truth: int32 [m, any]; what the engine committed after each of those drafts; truths: int64 [m], how many tokens.
        delta: float32 [CALIBRATION_WORDS]; to be added to the calibration by take_in.
    """
    k = tokens.shape[1]
    right = np.zeros(k + 1, np.bool_)
    wrong = np.zeros(k + 1, np.bool_)
    depth = np.zeros(k + 1, np.int64)
    for m in range(len(places)):
        r = places[m]
        state = 0
        for i in range(truths[m]):
            if ints[r, state, VOTE_COUNT] < 0:
                break
            before = survival[r, state - 1] if state > 0 else np.float32(1)
            _learn_state(ints[r, state], floats[r, state], before, truth[m, i], delta)
            following = 0
            for j in range(counts[r]):
                if parents[r, j] == state - 1 and tokens[r, j] == truth[m, i]:
                    following = j + 1
                    break
            if following == 0:
                break
            state = following
        right[0] = True
        for j in range(counts[r]):
            before_it = parents[r, j] + 1
            depth[j + 1] = depth[before_it] + 1
            told = right[before_it] and depth[j + 1] <= truths[m]
            right[j + 1] = told and truth[m, depth[j + 1] - 1] == tokens[r, j]
            # What comes after a token of which nobody knows is not known either.
            wrong[j + 1] = wrong[before_it] or (told and not right[j + 1])
            if right[j + 1] or wrong[j + 1]:
                at = DECILES_AT + 3 * min(int(survival[r, j] * DECILES), DECILES - 1)
                outcome = 1.0 if right[j + 1] else 0.0
                delta[at] += 1.0
                delta[at + 1] += survival[r, j]
                delta[at + 2] += outcome
                delta[BRIER_AT] += (survival[r, j] - outcome) ** 2


@kernel
def _learn_state(ints: Any, floats: Any, survival: Any, token: int, delta: Any) -> None:
    for i in range(ints[VOTE_COUNT]):
        hit = 1.0 if ints[VOTE_TOKENS + i] == token else 0.0
        fine = ints[VOTE_CELLS + i]
        delta[FINE_AT + 2 * fine] += hit
        delta[FINE_AT + 2 * fine + 1] += 1.0
        coarse = coarse_of(fine)
        delta[COARSE_AT + 2 * coarse] += hit
        delta[COARSE_AT + 2 * coarse + 1] += 1.0
    for rank in range(ints[CANDIDATE_COUNT]):
        outcome = 1.0 if ints[CANDIDATE_TOKENS + rank] == token else 0.0
        probability = floats[PROBABILITIES + rank]
        step = RATE * (outcome - probability)
        at = WEIGHTS_AT + (ints[WEIGHTS] * CANDIDATES + rank) * WEIGHT_WORDS
        for feature in range(FEATURES):
            delta[at + feature] += step * floats[FEATURE_VALUES + rank * FEATURES + feature]
        delta[at + FEATURES] += 1.0
        place = 0
        for other in range(ints[CANDIDATE_COUNT]):
            if floats[PROBABILITIES + other] > probability or (floats[PROBABILITIES + other] == probability and other < rank):
                place += 1
        knot, weight = knot_of(probability)
        at = REFINED_AT + 2 * (refined_context(place, survival) + knot)
        delta[at] += (1.0 - weight) * outcome
        delta[at + 1] += 1.0 - weight
        delta[at + 2] += weight * outcome
        delta[at + 3] += weight


@kernel
def take_in(calibration: Any, delta: Any) -> None:
    """Adds what was learned to a calibration, halves cells with many trials, and clears `delta`; float32 [CALIBRATION_WORDS] both."""
    for at in range(WEIGHTS_AT, DECILES_AT, WEIGHT_WORDS):
        # Steps of many states, all from the same weights, would go too far together.
        states = delta[at + FEATURES]
        if states > MOST_STATES:
            for feature in range(FEATURES):
                delta[at + feature] *= MOST_STATES / states
        delta[at + FEATURES] = 0.0
    for i in range(len(calibration)):
        calibration[i] += delta[i]
        delta[i] = 0.0
    for at in range(FINE_AT, WEIGHTS_AT, 2):
        limit = FINE_LIMIT if at < COARSE_AT else (COARSE_LIMIT if at < REFINED_AT else REFINED_LIMIT)
        if calibration[at + 1] > limit:
            calibration[at] *= 0.5
            calibration[at + 1] *= 0.5
