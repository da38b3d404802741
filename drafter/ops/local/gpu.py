"""Earlier occurrences of a row's tail in the row itself, on the GPU: a plain read of the row; only hits look further back.

Several programs share a row. They append what they find to the row's lists, in any order, and count it by matching length.
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
    row: tensor, n: tensor, longest: tensor, part: tensor, hits: tensor, hit_room: tensor, hit_counts: tensor, histogram: tensor,
    parts: tensor, BLOCK: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    """Finds the occurrences of row[n - 1] in the blocks part, part + parts, ... of row[: n - 1].

    Args:
        row: int32 pointer; longest: longest match, in tokens, at most BACK and below 64.
        hits: int32 pointer [2, hit_room]; out: end << HIT_LENGTH_BITS | matching length, of all and of those that match two tokens or more.
        hit_counts: int32 pointer [2]; the lists' lengths. histogram: int32 pointer [64]; hits by matching length. Both start at zero.
    """
    last = tl.load(row + n - 1)
    for base in range(part * BLOCK, n - 1, parts * BLOCK):
        at = base + tl.arange(0, BLOCK)
        is_hit = tl.load(row + at, mask=at < n - 1, other=-1) == last
        found = tl.sum(is_hit.to(tl.int32), axis=0)
        if found > 0:
            first = tl.atomic_add(hit_counts, found, sem="relaxed")
            slot = first + tl.cumsum(is_hit.to(tl.int32), axis=0) - 1
            tl.store(hits + slot, at, mask=is_hit)
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
                hit = (end << _LENGTH_BITS) | length
                tl.store(hits + first + mine, hit, mask=mine < found)
                is_long = (length > 1) & (mine < found)
                rank = tl.cumsum(is_long.to(tl.int32), axis=0)
                long = tl.max(rank, axis=0)
                if long > 0:
                    at_long = tl.atomic_add(hit_counts + 1, long, sem="relaxed")
                    tl.store(hits + hit_room + at_long + rank - 1, hit, mask=is_long)
                tl.atomic_add(histogram + length, 1, mask=mine < found, sem="relaxed")
