"""The ranks of new suffixes in a suffix array on a GPU, by binary search; without eviction they give the new ones' places at once."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.sort.gpu_compare import compare_suffixes


@triton.jit(do_not_specialize=["old_size", "new_size", "shift", "rounds", "depth"])
def find_ranks(
    text: tensor, old: tensor, new: tensor, buckets: tensor, ranks: tensor, out: tensor, old_size: tensor, new_size: tensor,
    shift: tensor, rounds: tensor, depth: tensor, NARROW: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """How many old suffixes are at most as large as each new one.

    Args:
        text: int32 pointer; old, new: int32 pointers to sorted positions.
        buckets: int32 pointer; the first-token table of `old`, used if NARROW.
        ranks: int32 pointer; out. rounds: enough for a binary search of `old`.
        out: int32 pointer; if PLACE, where each new suffix is written as if nothing were evicted.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = i < new_size
    position = tl.load(new + i, mask=mine, other=0)
    low = tl.zeros_like(position)
    high = tl.where(mine, old_size, 0)
    if NARROW:
        bucket = tl.load(text + position, mask=mine, other=0) >> shift
        low = tl.load(buckets + bucket, mask=mine, other=0)
        high = tl.load(buckets + bucket + 1, mask=mine, other=0)
    low_shared = tl.zeros_like(position)
    high_shared = tl.zeros_like(position)
    for _ in range(rounds):
        searching = low < high
        if tl.max(searching.to(tl.int32), axis=0) > 0:
            middle = (low + high) >> 1
            other = tl.load(old + middle, mask=searching, other=0)
            order, shared = compare_suffixes(text, position, other, tl.minimum(low_shared, high_shared), searching, depth, CHUNK)
            above = order < 0
            high_shared = tl.where(searching & above, shared, high_shared)
            low_shared = tl.where(searching & ~above, shared, low_shared)
            high = tl.where(searching & above, middle, high)
            low = tl.where(searching & ~above, middle + 1, low)
    tl.store(ranks + i, low, mask=mine)
    if PLACE:
        tl.store(out + low + i, position, mask=mine)


@triton.jit(do_not_specialize=["size", "buckets_size", "shift", "rounds"])
def find_buckets(
    text: tensor, suffixes: tensor, buckets: tensor, size: tensor, buckets_size: tensor, shift: tensor, rounds: tensor, BLOCK: tl.constexpr
) -> None:
    """buckets[b]: the first suffix whose first token is at least b << shift; rounds: enough for a binary search."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros_like(b)
    high = tl.where(b < buckets_size - 1, size, 0)
    low = tl.where(b < buckets_size - 1, low, size)
    for _ in range(rounds):
        searching = low < high
        middle = (low + high) >> 1
        position = tl.load(suffixes + middle, mask=searching, other=0)
        below = (tl.load(text + position, mask=searching, other=0) >> shift) < b
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    tl.store(buckets + b, low, mask=b < buckets_size)
