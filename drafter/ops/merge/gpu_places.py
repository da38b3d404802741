"""Writing a merged suffix array on a GPU: each old suffix moves by the new ones before it and the evicted ones before it.

Blocks of BLOCK old suffixes; what a block needs of those before it is two numbers, so that the pass is close to a copy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def is_kept(position: tensor, evict_start: tensor, evict_length: tensor, ring: tensor) -> tensor:
    """Whether a position is outside the evicted stretch of the ring."""
    distance = position - evict_start
    return tl.where(distance < 0, distance + ring, distance) >= evict_length


@triton.jit(do_not_specialize=["size", "evict_start", "evict_length", "ring"])
def count_kept(
    old: tensor, counts: tensor, size: tensor, evict_start: tensor, evict_length: tensor, ring: tensor, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """counts[g + 1]: how many of the GROUP old suffixes from g * GROUP on are kept; counts[0] is zero."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    kept = (i < size) & is_kept(tl.load(old + i, mask=i < size, other=0), evict_start, evict_length, ring)
    tl.store(counts + group + 1, tl.sum(kept.to(tl.int32), axis=1), mask=group * GROUP < size)
    tl.store(counts + group, 0, mask=group == 0)


@triton.jit(do_not_specialize=["old_size", "new_size", "evict_start", "evict_length", "ring"])
def place_new(
    old: tensor, new: tensor, ranks: tensor, kept_before: tensor, out: tensor, old_size: tensor, new_size: tensor, evict_start: tensor,
    evict_length: tensor, ring: tensor, GROUP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Writes each new suffix after the old ones that are kept and not above it.

    Args:
        kept_before: int32 pointer; how many old suffixes before g * GROUP are kept, for each g.
    """
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = j < new_size
    rank = tl.load(ranks + j, mask=mine, other=0)
    group = rank // GROUP
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    before = mine[:, None] & (i < rank[:, None])
    kept = before & is_kept(tl.load(old + i, mask=before, other=0), evict_start, evict_length, ring)
    at = j + tl.load(kept_before + group, mask=mine, other=0) + tl.sum(kept.to(tl.int32), axis=1)
    tl.store(out + at, tl.load(new + j, mask=mine, other=0), mask=mine)


@triton.jit(do_not_specialize=["size", "evict_start", "evict_length", "ring"])
def place_old(
    old: tensor, ranks: tensor, new_before: tensor, kept_before: tensor, out: tensor, size: tensor, evict_start: tensor,
    evict_length: tensor, ring: tensor, EVICT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Writes each old suffix that is kept after the new ones whose rank is not above its index.

    Args:
        ranks: int32 pointer; of the new suffixes, in order.
        new_before: int32 pointer; how many ranks are below b * BLOCK, for each b.
        kept_before: as in place_new, if EVICT.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    i = block * BLOCK + lane
    mine = i < size
    position = tl.load(old + i, mask=mine, other=0)
    first = tl.load(new_before + block)
    last = tl.load(new_before + block + 1)
    at = i + first
    if EVICT:
        mine = mine & is_kept(position, evict_start, evict_length, ring)
        at = tl.load(kept_before + block * (BLOCK // GROUP)) + tl.cumsum(mine.to(tl.int32), axis=0) - 1 + first
    # How many ranks from `first` on are not above i: a binary search that all lanes do in step.
    low = tl.zeros_like(lane)
    count = last - first
    while count > 0:
        half = (count + 1) // 2
        probe = low + half - 1
        rank = tl.load(ranks + first + probe, mask=first + probe < last, other=0x7FFFFFFF)
        low = tl.where(rank <= i, low + half, low)
        count = count - half
    tl.store(out + at + low, position, mask=mine)
