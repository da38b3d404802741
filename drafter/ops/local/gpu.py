"""Earlier occurrences of a row's tail in the row itself, on the GPU: a plain read of the row; only hits look further back.

Several programs share a row. They append what they find to one list a row, in any order, and count it by matching length.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import HIT_LENGTH_BITS

_LENGTH_BITS = tl.constexpr(HIT_LENGTH_BITS)
_HITS = tl.constexpr(32)


@triton.jit
def local_matches(
    row: tensor, n: tensor, longest: tensor, part: tensor, hits: tensor, hit_count: tensor, histogram: tensor,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    """Finds the occurrences of row[n - 1] in the blocks part, part + PARTS, ... of row[: n - 1].

    Args:
        row: int32 pointer; longest: longest match, in tokens, at most BACK and below 64.
        hits: int32 pointer, room for n; out: end << HIT_LENGTH_BITS | matching length.
        hit_count: int32 pointer; the list's length. histogram: int32 pointer [64]; hits by matching length. Both start at zero.
    """
    last = tl.load(row + n - 1)
    for base in range(part * BLOCK, n - 1, PARTS * BLOCK):
        at = base + tl.arange(0, BLOCK)
        hit = tl.load(row + at, mask=at < n - 1, other=-1) == last
        found = tl.sum(hit.to(tl.int32), axis=0)
        if found > 0:
            first = tl.atomic_add(hit_count, found)
            slot = first + tl.cumsum(hit.to(tl.int32), axis=0) - 1
            tl.store(hits + slot, at, mask=hit)
            # The list is read again, a few hits at a time, to look back from them only.
            tl.debug_barrier()
            back = tl.arange(0, BACK)
            wanted = tl.load(row + n - 2 - back, mask=back < longest - 1, other=-2)
            for i in range(0, found, _HITS):
                mine = i + tl.arange(0, _HITS)
                end = tl.load(hits + first + mine, mask=mine < found, other=0)
                seen = (mine < found)[:, None] & (end[:, None] > back[None, :]) & (back < longest - 1)[None, :]
                before = tl.load(row + end[:, None] - 1 - back[None, :], mask=seen, other=-1)
                length = 1 + tl.min(tl.where(before == wanted[None, :], BACK, back[None, :]), axis=1)
                length = tl.minimum(length, longest)
                tl.store(hits + first + mine, (end << _LENGTH_BITS) | length, mask=mine < found)
                tl.atomic_add(histogram + length, 1, mask=mine < found)
