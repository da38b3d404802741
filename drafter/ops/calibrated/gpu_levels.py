"""What the GPU kernels of the rule `calibrated` share: levels and lengths, and the words of a row's workspace."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.warp import highest_bit
from draftd.drafter.policy import LENGTHS, REACH, TOP_LEVELS

HELD = 32
"""Occurrences that are followed in each source; one a lane."""
SHORT_LENGTHS = 8
"""Suffixes of up to so many tokens are searched for in the corpus; occurrences say by looking back how far they match."""
SCANNED_TOKENS = 1024
"""A drafted token is looked for in so many of the row's last tokens."""

# Words of a row's workspace (int32).
TAIL = 0
"""The row's last 32 tokens (-2 where there are none), then the draft."""
TAIL_TOKENS = 32
HELD_MATCHED = TAIL + TAIL_TOKENS + 64
"""Tokens that each held occurrence in the corpus matches; 0 for none."""
OWN_PLACES = HELD_MATCHED + HELD
"""Place in the row, draft included, of the token after each held occurrence there."""
OWN_MATCHED = OWN_PLACES + HELD
SAMPLES = OWN_MATCHED + HELD
"""Of each level that votes: tokens that follow samples of a suffix that occurs more often than can be held."""
SAMPLED_TOKENS = SAMPLES + TOP_LEVELS * HELD
"""Of each of these levels: the token that follows most samples, and the one that follows the latest."""
SAMPLED_COUNTS = SAMPLED_TOKENS + 2 * TOP_LEVELS
"""How many samples each of those follows, and above that how many samples the level has, how many different tokens follow them, and
whether the two are the same; eight bits each."""
SAMPLES_WEIGHT = SAMPLED_COUNTS + 2 * TOP_LEVELS
"""Of each level, float32: occurrences that a sample stands for."""
SCAN = SAMPLES_WEIGHT + 32
"""Occurrences in the row, before they are in order."""
WORK_WORDS = SCAN + HELD

# A table in memory would be one more load to wait for: a formula.
assert max(LENGTHS) == REACH < 32
assert all(length in (1 << i, 3 << i >> 1) for length, i in zip(LENGTHS, (0, 1, 1, 2, 2, 3, 3, 4, 4), strict=True))


@triton.jit
def length_of(level: tensor) -> tensor:
    """Tokens of a level; of level 0 for what is below."""
    above = tl.maximum(level, 0) + 1
    return ((2 | (above & 1)) << (above >> 1)) >> 1


@triton.jit
def level_of(matched: tensor) -> tensor:
    """The highest level whose length is not above `matched`; -1 for 0."""
    exponent = highest_bit(tl.maximum(matched, 1))
    half = (matched >> tl.maximum(exponent - 1, 0)) & 1
    return tl.where(matched < 2, matched - 1, 2 * exponent - 1 + half)


@triton.jit
def first_bit(words: tensor) -> tensor:
    """Index of the lowest bit of each int32 that is set; -1 if none is."""
    return highest_bit(words & -words)
