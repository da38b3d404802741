"""Steps of rank doubling on a GPU: keys from ranks, and ranks from sorted keys.

A rank is twice the number of its group of equal suffixes, counted from 1 in their order, plus 1 if they have ended; a separator's is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit(do_not_specialize=["size", "covered", "depth"])
def join_ranks(
    ranks: tensor, keys: tensor, size: tensor, covered: tensor, depth: tensor, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """keys[p], int64: the ranks at p and `covered` tokens on from there, COUNT of BITS bits; zero from where the suffix has ended.

    The last of them may overlap the one before it, so that no token beyond `depth` counts.
    """
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks + p, mask=p < size, other=0)
    key = rank.to(tl.int64)
    for k in tl.static_range(1, COUNT):
        goes_on = (p < size) & (rank > 0) & ((rank & 1) == 0)
        rank = tl.load(ranks + p + tl.minimum(k * covered, depth - covered), mask=goes_on, other=0)
        key = (key << BITS) | rank.to(tl.int64)
    tl.store(keys + p, key, mask=p < size)


@triton.jit(do_not_specialize=["size"])
def mark_groups(keys: tensor, firsts: tensor, size: tensor, BLOCK: tl.constexpr) -> None:
    """firsts[i]: 1 if keys[i] differs from the key before it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = i < size
    before = tl.load(keys + i - 1, mask=mine & (i > 0), other=-1)
    tl.store(firsts + i, (tl.load(keys + i, mask=mine) != before).to(tl.int32), mask=mine)


@triton.jit(do_not_specialize=["size"])
def spread_ranks(
    keys: tensor, order: tensor, groups: tensor, ranks: tensor, size: tensor, BITS: tl.constexpr, OF_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """ranks[order[i]]: that of group groups[i]; it has ended if the last BITS bits of its key say so.

    Args:
        keys: int64 pointer; sorted keys of ranks if OF_RANKS, otherwise of tokens.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = i < size
    key = tl.load(keys + i, mask=mine, other=0)
    last = key & ((1 << BITS) - 1)
    ended = last == 0
    if OF_RANKS:
        ended = ended | ((last & 1) == 1)
    rank = tl.where(key == 0, 0, 2 * tl.load(groups + i, mask=mine, other=0) + ended.to(tl.int32))
    tl.store(ranks + tl.load(order + i, mask=mine, other=0), rank, mask=mine)


@triton.jit(do_not_specialize=["size", "start"])
def keep_wanted(suffixes: tensor, is_wanted: tensor, places: tensor, out: tensor, size: tensor, start: tensor, BLOCK: tl.constexpr) -> None:
    """out: start + suffixes[i], as int32, of each i that is wanted; places[i]: how many are up to it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = i < size
    wanted = mine & (tl.load(is_wanted + i, mask=mine, other=0) != 0)
    suffix = tl.load(suffixes + i, mask=wanted, other=0).to(tl.int32)
    tl.store(out + tl.load(places + i, mask=wanted, other=1) - 1, start + suffix, mask=wanted)
