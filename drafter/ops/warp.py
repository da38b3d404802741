"""What a warp can do on a GPU and Triton has no name for: sets of lanes as 32-bit words. The interpreter gets the same in plain operations.

All of it is for kernels of one warp, and tensors of 32 elements there are one element a lane.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LANES = tl.constexpr(32)
TOKEN_BITS = tl.constexpr(21)
TOKENS = tl.constexpr(1 << 21)
"""Tokens are below this: see MAX_VOCAB."""
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Triton's interpreter runs the kernels."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def bit_count(words: tensor) -> tensor:
    """How many bits of each int32 are set."""
    if _INTERPRETED:
        words = words - ((words >> 1) & 0x55555555)
        words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
        words = (words + (words >> 4)) & 0x0F0F0F0F
        words = words + (words >> 8)
        return (words + (words >> 16)) & 63
    else:  # noqa: RET505 (decided when compiled)
        return libdevice.popc(words)


@triton.jit
def highest_bit(words: tensor) -> tensor:
    """Index of the highest bit of each int32 that is set; -1 if none is."""
    if _INTERPRETED:
        smeared = words
        for shift in tl.static_range(5):
            # An arithmetic shift would smear the sign too; its bit is the highest anyway.
            smeared = smeared | (smeared >> (1 << shift))
        return bit_count(smeared) - 1
    else:  # noqa: RET505 (decided when compiled)
        return 31 - libdevice.clz(words)


@triton.jit
def lanes_with_same(values: tensor) -> tensor:
    """For each of 32 int32 values, the set of lanes that have the same; of more, among 32 of them at a time."""
    if _INTERPRETED:
        parts = tl.reshape(values, (values.shape[0] // LANES, LANES))
        same = parts[:, :, None] == parts[:, None, :]
        return tl.reshape(tl.sum(tl.where(same, (1 << tl.arange(0, LANES))[None, None, :], 0), axis=2), values.shape)
    else:  # noqa: RET505 (decided when compiled)
        return tl.inline_asm_elementwise("match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", [values], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def lanes_where(condition: tensor) -> tensor:
    """The set of lanes, of 32, for which the condition holds."""
    return tl.sum(tl.where(condition, 1 << tl.arange(0, LANES), 0), axis=0)


@triton.jit
def value_of(values: tensor, lane: tensor) -> tensor:
    """The value of one of 32 lanes."""
    return tl.sum(tl.where(tl.arange(0, LANES) == lane, values, 0), axis=0)


@triton.jit
def _either(a: tensor, b: tensor) -> tensor:
    return a | b


@triton.jit
def union(words: tensor) -> tensor:
    """The lanes that are in any of the sets."""
    return tl.reduce(words, 0, _either)


@triton.jit
def begin_after_previous() -> None:
    """Lets the next kernel of the stream come up early, and waits until the one before has ended: its launch is hidden behind that one."""
    if not _INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()
