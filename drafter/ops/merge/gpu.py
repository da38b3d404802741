"""Merging sorted suffixes into a suffix array on a GPU: ranks by search, then one streaming pass that leaves evicted ones out.

Nothing waits for the host, so that a merge can run on a side stream; lengths are known beforehand from what is merged and evicted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

_CHUNK = tl.constexpr(4)


@triton.jit
def find_ranks(
    text: tensor, old: tensor, new: tensor, buckets: tensor, ranks: tensor, old_size: tensor, new_size: tensor, shift: tensor,
    rounds: tensor, depth: tensor, NARROW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """How many old suffixes are at most as large as each new one.

    Args:
        text: int32 pointer; old, new: int32 pointers to sorted positions.
        buckets: int32 pointer; the first-token table of `old`, used if NARROW.
        ranks: int32 pointer; out. rounds: enough for a binary search of `old`.
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
    token = tl.arange(0, _CHUNK)
    for _ in range(rounds):
        searching = low < high
        if tl.max(searching.to(tl.int32), axis=0) > 0:
            middle = (low + high) // 2
            other = tl.load(old + middle, mask=searching, other=0)
            # 1: the old suffix is above; 0: it is not; 2: not known yet.
            order = tl.where(searching, 2, 0)
            shared = tl.minimum(low_shared, high_shared)
            same = shared
            for step in range(0, depth, _CHUNK):
                if tl.max(order, axis=0) == 2:
                    offset = (shared + step)[:, None] + token[None, :]
                    wanted = (order == 2)[:, None] & (offset < depth)
                    x = tl.load(text + other[:, None] + offset, mask=wanted, other=0)
                    y = tl.load(text + position[:, None] + offset, mask=wanted, other=0)
                    # The first difference decides, or an end that both have: they are equal then.
                    ends = wanted & ((x != y) | (x < 0))
                    code = tl.min(tl.where(ends, 2 * token[None, :] + (x > y).to(tl.int32), 2 * _CHUNK), axis=1)
                    decided = (order == 2) & (code < 2 * _CHUNK)
                    same += tl.where(decided, code // 2, tl.where(order == 2, _CHUNK, 0))
                    order = tl.where(decided, code % 2, tl.where((order == 2) & (shared + step + _CHUNK >= depth), 0, order))
            above = order == 1
            high_shared = tl.where(searching & above, same, high_shared)
            low_shared = tl.where(searching & ~above, same, low_shared)
            high = tl.where(searching & above, middle, high)
            low = tl.where(searching & ~above, middle + 1, low)
    tl.store(ranks + i, low, mask=mine)


@triton.jit
def write_merged(
    old: tensor, places: tensor, kept: tensor, evict_start: tensor, evict_length: tensor, ring: tensor, out: tensor, size: tensor,
    EVICT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Writes each old suffix that is kept to its place: places[i] new ones and kept[i] - 1 old ones go before it."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = i < size
    position = tl.load(old + i, mask=mine, other=0)
    at = i + tl.load(places + i, mask=mine, other=0)
    if EVICT:
        distance = position - evict_start
        distance = tl.where(distance < 0, distance + ring, distance)
        mine = mine & (distance >= evict_length)
        at = tl.load(kept + i, mask=mine, other=0).to(tl.int64) - 1 + tl.load(places + i, mask=mine, other=0)
    tl.store(out + at, position, mask=mine)


def merge(
    text: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    out: torch.Tensor,
    *,
    depth: int,
    buckets: torch.Tensor | None = None,
    shift: int = 0,
    evict_start: int = 0,
    evict_length: int = 0,
    ring: int = 1,
) -> None:
    """Writes the merge of `old` and `new` to `out`.

    Args:
        text: int32 [t]; tokens and separators (-1).
        old: int32 [n]; sorted positions. Those in the ring segment of `evict_length` tokens from `evict_start` are left out.
        new: int32 [m]; sorted positions, none of them evicted.
        out: int32 [>= what is kept]; must not overlap the inputs.
        depth: Tokens of a suffix that count.
        buckets: int32; the first-token table of `old`, with its shift; makes the search shorter.
        ring: Size of the ring of text, in tokens; positions are in [0, ring).
    """
    n, m = old.shape[0], new.shape[0]
    device = text.device
    ranks = torch.zeros(m, dtype=torch.int32, device=device)
    if m and n:
        block = 64
        find_ranks[(triton.cdiv(m, block),)](
            text, old, new, old if buckets is None else buckets, ranks, n, m, shift, n.bit_length(), depth,
            NARROW=buckets is not None, BLOCK=block, num_warps=2,
        )  # fmt: skip
    before_new: torch.Tensor = ranks
    kept: torch.Tensor = ranks
    if evict_length:
        distance = old - evict_start
        is_kept = torch.where(distance < 0, distance + ring, distance) >= evict_length
        kept = torch.cumsum(is_kept, dim=0, dtype=torch.int32)
        before_new = torch.where(ranks > 0, kept[(ranks - 1).clamp_(min=0).long()], 0) if n else ranks
    if m:
        out[(before_new + torch.arange(m, dtype=torch.int32, device=device)).long()] = new
    if n:
        places = torch.zeros(n + 1, dtype=torch.int32, device=device)
        places.scatter_add_(0, ranks.long(), torch.ones_like(ranks))
        places = torch.cumsum(places, dim=0, dtype=torch.int32)
        block = 1024
        write_merged[(triton.cdiv(n, block),)](
            old, places, kept, evict_start, evict_length, ring, out, n, EVICT=evict_length > 0, BLOCK=block
        )


def fill_buckets(text: torch.Tensor, suffixes: torch.Tensor, shift: int, buckets: torch.Tensor) -> None:
    """Fills buckets[b] with the first suffix whose first token is at least b << shift; the last one is the number of suffixes.

    Args:
        suffixes: int32 [n]; sorted positions.
        buckets: int32 [buckets + 1]; out.
    """
    first = text[suffixes] >> shift
    wanted = torch.arange(buckets.shape[0], dtype=torch.int32, device=text.device)
    buckets.copy_(torch.searchsorted(first, wanted, out_int32=True))
