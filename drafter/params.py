"""Parameters of the drafting rules, validated where they are made.

Those of the rule `tree` mean what they mean in suffix decoding (arXiv 2411.04975); `max_depth` bounds match and draft together, as the
depth of a suffix tree does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.policy import CANDIDATES

MAX_K = 64
"""Most tokens a draft may have."""

MAX_DEPTH = 64
"""Depth to which suffixes are sorted: the longest match plus draft, in tokens."""

MAX_VOCAB = 2**21 - 1
"""Largest vocabulary size: three tokens of 21 bits make one sort key."""


Policy = Literal["calibrated", "tree"]
"""A rule of drafting: `calibrated` learns how often it is right, `tree` is the suffix tree's."""


@dataclass(frozen=True, slots=True)
class DraftParams:
    """How to draft.

    Attributes:
        k: Most tokens of a draft, in [1, 64].
        policy: The rule.
        tau: Rule `calibrated`: smallest survival probability that a drafted token may have, in [0, 1]: what one more token to verify
            costs, as a share of a request's part of a step.
        branches: Rule `calibrated`: most tokens that may follow one, in [1, 3]; 1 makes chains, more make trees of k tokens.
        max_depth: Rule `tree`, as are those that follow: most tokens of match and draft together, in [2, 64].
        spec_factor: A match of L tokens gives at most ``spec_factor * L + spec_offset`` tokens; in [0, 1000].
        spec_offset: See `spec_factor`; in [-1000, 1000].
        min_token_prob: Smallest survival probability that a drafted token may have, in [0, 1].
        use_local: Both rules: draft from the request's own tokens.
        use_corpus: Draft from the corpus.

    Raises:
        InvalidArgument: A value is outside its range.
    """

    k: int = 16
    max_depth: int = 64
    spec_factor: float = 2.0
    spec_offset: float = 0.0
    min_token_prob: float = 0.1
    use_local: bool = True
    use_corpus: bool = True
    policy: Policy = "calibrated"
    tau: float = 0.1
    branches: int = 1

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise InvalidArgument(f"parameters.policy is {self.policy!r}; it must be calibrated or tree", "parameters.policy")
        _check("tau", self.tau, 0, 1)
        _check("branches", self.branches, 1, CANDIDATES)
        _check("k", self.k, 1, MAX_K)
        _check("max_depth", self.max_depth, 2, MAX_DEPTH)
        _check("spec_factor", self.spec_factor, 0, 1000)
        _check("spec_offset", self.spec_offset, -1000, 1000)
        _check("min_token_prob", self.min_token_prob, 0, 1)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(f"parameters.{name} is {value}; it must be in [{low}, {high}]", f"parameters.{name}")
