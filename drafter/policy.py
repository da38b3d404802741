"""The numbers of the draft rule `calibrated`: what it counts, into which cells, how it mixes and how it learns.

The rule itself is in draftd.drafter.ops.calibrated; its oracle reads like a specification of what these numbers are for.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

LENGTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Suffix lengths at which followers are counted, in tokens. A length's place in this list is its level."""
LEVELS: Final = len(LENGTHS)
REACH: Final = LENGTHS[-1]
"""Longest suffix that counts, in tokens."""
LENGTH_BUCKETS: Final = (0, 1, 2, 3, 4, 4, 5, 6, 7)
"""Of each level: 1, 2, 3, 4-5, 6-8, 9-12, 13-20 or more tokens."""
LENGTH_BUCKET_COUNT: Final = 8

TOP_LEVELS: Final = 4
"""Levels that vote in each source: the longest that occurs there, and those below it."""

SOURCES: Final = 3
"""0: the request's own tokens, 1: the corpus, 2: the request's group. Kernels on a GPU know the first two."""
GROUP_TOKENS: Final = 4096
"""Of what the other requests of a group have generated, so many tokens count: the last."""
GAPS: Final = 3
"""A level's distance from the longest that occurs in its source: 0, 1, more."""
COUNT_BOUNDS: Final = (1, 2, 4, 8, 24)
"""Upper bounds of the buckets of how often a suffix occurs; the last bucket has none."""
COUNT_BUCKETS: Final = len(COUNT_BOUNDS) + 1
SHARE_BOUNDS: Final = (0.3, 0.5, 0.7, 0.9)
"""Lower bounds of the buckets of a follower's share; the last bucket, above them, is a follower that is the only one."""
SHARE_BUCKETS: Final = len(SHARE_BOUNDS) + 2
KINDS: Final = 3
"""0: most frequent and latest follower, 1: most frequent one, 2: latest one that is not the most frequent."""

FINE_CELLS: Final = SOURCES * LEVELS * GAPS * COUNT_BUCKETS * SHARE_BUCKETS * KINDS
COARSE_CELLS: Final = SOURCES * LENGTH_BUCKET_COUNT * GAPS * SHARE_BUCKETS * KINDS
MAX_VOTES: Final = SOURCES * TOP_LEVELS * 2

COARSE_WEIGHT: Final = 8.0
"""Trials that a cell's first guess is worth in its coarse estimate."""
FINE_WEIGHT: Final = 4.0
"""Trials that the coarse estimate is worth in the fine one."""
LATEST_FLOOR: Final = 0.2
"""Least first guess of a vote for the latest follower."""
COARSE_LIMIT: Final = 6000.0
FINE_LIMIT: Final = 1500.0
"""Trials above which a cell's hits and trials are halved, so that it follows what changes."""
LEAST_PROBABLE: Final = 0.0005
MOST_PROBABLE: Final = 0.9995
"""Bounds of every probability."""

CANDIDATES: Final = 3
FEATURES: Final = 8
SUM_LEAST: Final = 0.001
SUM_MOST: Final = 0.999
ESCAPE_FLOOR: Final = 0.0001
"""What the blend of the two longest levels gives to a token that neither has seen."""
RATE: Final = 0.005
"""Step of the gradient descent on log loss, a state and candidate."""

FEW: Final = 16
"""Occurrences up to which all followers of a suffix are read; of more, so many evenly spaced samples."""

MOST_STATES: Final = 64.0
"""States whose steps are added up in full when they are learned at once; of more, the mean counts as so many."""

KNOTS: Final = 33
KNOT_SPACING: Final = 0.5
"""A mixed probability is refined between knots of its logit: so many of them, around 0."""
SURVIVAL_BOUNDS: Final = (0.3, 0.55, 0.8)
"""Bounds of the survival of what was drafted before, by which the likeliest candidate is refined; and by whether anything was."""
SURVIVAL_BUCKETS: Final = len(SURVIVAL_BOUNDS) + 2
REFINED_CONTEXTS: Final = SURVIVAL_BUCKETS + CANDIDATES - 1
"""The likeliest candidate's, then one for each other place."""
REFINED_CELLS: Final = REFINED_CONTEXTS * KNOTS
REFINED_WEIGHT: Final = 10.0
"""Trials that a knot's own probability is worth."""
REFINED_LIMIT: Final = 500.0

DECILES: Final = 10
FINE_AT: Final = 0
COARSE_AT: Final = FINE_AT + 2 * FINE_CELLS
REFINED_AT: Final = COARSE_AT + 2 * COARSE_CELLS
WEIGHTS_AT: Final = REFINED_AT + 2 * REFINED_CELLS
WEIGHT_WORDS: Final = FEATURES + 1
"""Of each weight vector: its weights, and, in what was learned, how many states that was."""
DECILES_AT: Final = WEIGHTS_AT + LENGTH_BUCKET_COUNT * CANDIDATES * WEIGHT_WORDS
"""Of each decile of predicted survival: drafted tokens, the sum of their predictions, how many were accepted."""
BRIER_AT: Final = DECILES_AT + 3 * DECILES
"""Sum of the squared differences of prediction and outcome."""
CALIBRATION_WORDS: Final = BRIER_AT + 1
"""A calibration is one float32 array: hits and trials of each fine, coarse and refined cell, the weights, and how right it was."""

_UNGROUPED_WORDS: Final = CALIBRATION_WORDS - 2 * (FINE_CELLS + COARSE_CELLS) // SOURCES
"""Words of a calibration from before there were groups: it has no cells of the third source."""

PRIOR_TRIALS: Final = 2.0
"""Trials that a cell learned on other traffic is worth at most."""
PRIOR_WEIGHTS: Final = 0.5
"""Share of what the weights learned on other traffic that is kept."""


def blank_calibration() -> NDArray[np.float32]:
    """float32 [CALIBRATION_WORDS]; a calibration that has seen nothing."""
    calibration = np.zeros(CALIBRATION_WORDS, np.float32)
    weights = calibration[WEIGHTS_AT:DECILES_AT].reshape(-1, WEIGHT_WORDS)
    weights[:, 0] = 1.0
    weights[:, 1] = 0.2
    return calibration


def adopted(words: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """A calibration of this layout, float32 [CALIBRATION_WORDS], from one of this or of the layout before it; None if it is neither."""
    if len(words) == CALIBRATION_WORDS:
        return words.astype(np.float32)
    if len(words) != _UNGROUPED_WORDS:
        return None
    fine, coarse = (2 * cells // SOURCES for cells in (FINE_CELLS, COARSE_CELLS))
    blank = np.zeros(max(fine, coarse), np.float32)
    tables = np.split(words, [2 * FINE_CELLS - fine, 2 * (FINE_CELLS + COARSE_CELLS) - fine - coarse])
    return np.concatenate([tables[0], blank[:fine], tables[1], blank[:coarse], tables[2]]).astype(np.float32)


def as_prior(calibration: NDArray[np.float32]) -> NDArray[np.float32]:
    """What of a calibration is worth starting other traffic with, float32 [CALIBRATION_WORDS]."""
    prior = blank_calibration()
    cells = calibration[:WEIGHTS_AT].reshape(-1, 2)
    prior[:WEIGHTS_AT] = (cells * np.minimum(1.0, PRIOR_TRIALS / np.maximum(cells[:, 1:], PRIOR_TRIALS))).ravel()
    prior[WEIGHTS_AT:DECILES_AT] += PRIOR_WEIGHTS * (calibration[WEIGHTS_AT:DECILES_AT] - prior[WEIGHTS_AT:DECILES_AT])
    return prior


@lru_cache(maxsize=1)
def shipped_prior() -> NDArray[np.float32]:
    """float32 [CALIBRATION_WORDS], read-only; what new namespaces start with. PRIOR.md beside it says where it comes from."""
    with np.load(Path(__file__).with_name("prior.npz")) as file:
        prior = adopted(np.asarray(file["calibration"], np.float32))
    assert prior is not None, "prior.npz is of another layout"
    prior.setflags(write=False)
    return prior
