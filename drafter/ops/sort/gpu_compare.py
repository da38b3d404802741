"""Comparing suffixes on a GPU, one pair a lane: a few tokens of both at once, until all pairs are decided."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def compare_suffixes(
    text: tensor, a: tensor, b: tensor, shared: tensor, wanted: tensor, depth: tensor, CHUNK: tl.constexpr
) -> tuple[tensor, tensor]:
    """Order of the suffixes at `a` and `b`: -1, 0 or 1 as the one at `a` is below, equal or above; and how many tokens they share.

    Args:
        text: int32 pointer; tokens and separators (-1).
        a, b: int32 [n]; positions. shared: int32 [n]; tokens known to be equal, none of them a separator.
        wanted: bool [n]; what else is answered for a pair is of no use. depth: tokens of a suffix that count.
        CHUNK: tokens that are read at once; neighbouring lanes read neighbouring tokens.
    """
    token = tl.arange(0, CHUNK)
    order = tl.zeros_like(a)
    same = shared
    open_ = wanted & (shared < depth)
    step = 0
    left = tl.max(open_.to(tl.int32), axis=0)
    while left > 0:
        offset = (shared + step)[:, None] + token[None, :]
        inside = open_[:, None] & (offset < depth)
        x = tl.load(text + a[:, None] + offset, mask=inside, other=0)
        y = tl.load(text + b[:, None] + offset, mask=inside, other=0)
        # The first difference decides, or an end that both have: they are equal then.
        ends = inside & ((x != y) | (x < 0))
        code = 4 * token[None, :] + tl.where(x < y, 0, tl.where(x > y, 2, 1))
        first = tl.min(tl.where(ends, code, 4 * CHUNK), axis=1)
        found = open_ & (first < 4 * CHUNK)
        same += tl.where(found, first // 4, tl.where(open_, CHUNK, 0))
        order = tl.where(found, first % 4 - 1, order)
        step += CHUNK
        open_ = open_ & (first == 4 * CHUNK) & (shared + step < depth)
        left = tl.max(open_.to(tl.int32), axis=0)
    return order, same
