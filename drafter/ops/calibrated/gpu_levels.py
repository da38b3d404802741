"""What the GPU kernels of the rule `calibrated` share: levels and lengths, and the words of a row's workspace."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.warp import INTERPRETED, LANES, highest_bit, lanes_with_same
from draftd.drafter.policy import LENGTHS, REACH, TOP_LEVELS

HELD = 32
"""Occurrences that are followed in each source; one a lane."""
SHORT_LENGTHS = 8
"""Suffixes of up to so many tokens are searched for in the corpus; occurrences say by looking back how far they match."""
SCANNED_HITS = 128
"""Occurrences of a drafted token in the row that are looked at, the most recent ones."""

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
SAMPLES_ORDER = SAMPLES + TOP_LEVELS * HELD
"""31 for the latest of those, 0 for the others."""
SAMPLES_WEIGHT = SAMPLES_ORDER + TOP_LEVELS * HELD
"""Of each level, float32: occurrences that a sample stands for."""
SCAN = SAMPLES_WEIGHT + 32
WORK_WORDS = SCAN + SCANNED_HITS

_INTERPRETED = tl.constexpr(INTERPRETED)

# A table in memory would be one more load to wait for: five bits a level, and a formula.
_LENGTHS_PACKED = tl.constexpr(sum(length << 5 * level for level, length in enumerate(LENGTHS)))
assert max(LENGTHS) == REACH < 32
assert all(length in (1 << i, 3 << i >> 1) for length, i in zip(LENGTHS, (0, 1, 1, 2, 2, 3, 3, 4, 4), strict=True))


@triton.jit
def length_of(level: tensor) -> tensor:
    """Tokens of a level; of level 0 for what is below."""
    packed = tl.full([], _LENGTHS_PACKED, tl.int64)
    return ((packed >> (tl.maximum(level, 0) * 5).to(tl.int64)) & 31).to(tl.int32)


@triton.jit
def level_of(matched: tensor) -> tensor:
    """The highest level whose length is not above `matched`; -1 for 0."""
    exponent = highest_bit(tl.maximum(matched, 1))
    half = (matched >> tl.maximum(exponent - 1, 0)) & 1
    return tl.where(matched < 2, matched - 1, 2 * exponent - 1 + half)


@triton.jit
def same_in_rows(values: tensor) -> tensor:
    """For each element of int32 [rows, 32] the set of lanes of its row with the same value."""
    if _INTERPRETED:
        same = values[:, :, None] == values[:, None, :]
        return tl.sum(tl.where(same, (1 << tl.arange(0, LANES))[None, None, :], 0), axis=2)
    else:  # noqa: RET505 (decided when compiled)
        # A row is one register of the warp.
        return lanes_with_same(values)
