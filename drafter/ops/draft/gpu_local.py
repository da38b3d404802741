"""The continuations of many occurrences in a row itself, on the GPU: they are not sorted, so all are compared with candidates.

For loops and other repetitive rows; a few occurrences are drafted from in registers (see draftd.drafter.ops.draft.gpu).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import HIT_LENGTH_BITS
from draftd.drafter.ops.warp import LANES

_LENGTH_BITS = tl.constexpr(HIT_LENGTH_BITS)
_BLOCK = tl.constexpr(256)
_LENGTH_MASK = tl.constexpr((1 << HIT_LENGTH_BITS) - 1)


@triton.jit
def _followed(
    hits: tensor, i: tensor, size: tensor, length: tensor, row: tensor, n: tensor, tokens: tensor, drafted: tensor, K: tl.constexpr
) -> tensor:
    """Of the hits i: where they end, whether they match `length` tokens and go on with the drafted ones, and the next token or -1."""
    slot = tl.arange(0, K)
    hit = tl.load(hits + i, mask=i < size, other=0)
    end = hit >> _LENGTH_BITS
    alive = (i < size) & ((hit & _LENGTH_MASK) >= length)
    for j in range(drafted):
        token = tl.sum(tl.where(slot == j, tokens, 0), axis=0)
        at = end + 1 + j
        alive = alive & (at < n)
        alive = alive & (tl.load(row + at, mask=alive, other=-1) == token)
    at = end + 1 + drafted
    following = tl.load(row + at, mask=alive & (at < n), other=-1)
    return end, alive, following


@triton.jit
def best_local_child(
    hits: tensor, size: tensor, length: tensor, row: tensor, n: tensor, tokens: tensor, drafted: tensor, alive_count: tensor,
    total: tensor, prob: tensor, min_prob: tensor,
    K: tl.constexpr,
) -> tensor:  # fmt: skip
    """The most frequent continuation, the most recent of equals, and its count; (-1, 0) if there is none that is frequent enough.

    Args:
        hits: int32 pointer [size]; see draftd.drafter.ops.local.gpu.
        tokens: int32 [K]; the first `drafted` were drafted. alive_count: occurrences that go on with them.
        total: alive_count, or one more before the first token.
    """
    best = tl.full([], -1, tl.int32)
    best_count = total * 0
    best_end = tl.full([], -1, tl.int32)
    covered = total * 0
    going = total * 0 + 1
    for i in range(0, size, LANES):
        if going > 0:
            mine = i + tl.arange(0, LANES)
            candidates = _followed(hits, mine, size, length, row, n, tokens, drafted, K)[2]
            if tl.max(candidates, axis=0) >= 0:
                counts = tl.zeros_like(candidates)
                ends = tl.zeros_like(candidates) - 1
                before = tl.zeros_like(candidates)
                for j in range(0, size, LANES):
                    other = j + tl.arange(0, LANES)
                    end, _, following = _followed(hits, other, size, length, row, n, tokens, drafted, K)
                    same = (following[:, None] == candidates[None, :]) & (following >= 0)[:, None]
                    counts += tl.sum(same.to(tl.int32), axis=0)
                    before += tl.sum((same & (other[:, None] < mine[None, :])).to(tl.int32), axis=0)
                    ends = tl.maximum(ends, tl.max(tl.where(same, end[:, None], -1), axis=0))
                covered += tl.sum(tl.where(before == 0, counts, 0), axis=0)
                most = tl.max(counts, axis=0)
                end_of_most = tl.max(tl.where(counts == most, ends, -1), axis=0)
                if (most > best_count) | ((most == best_count) & (end_of_most > best_end)):
                    best_count = most
                    best_end = end_of_most
                    best = tl.max(tl.where((counts == most) & (ends == end_of_most), candidates, -1), axis=0)
                rest = alive_count - covered
                if (rest < best_count) | (prob * tl.div_rn(rest.to(tl.float32), total.to(tl.float32)) < min_prob):
                    going = going * 0
    return best, best_count


@triton.jit
def gather_hits(
    hits: tensor, size: tensor, length: tensor, row: tensor, n: tensor, tokens: tensor, drafted: tensor, scratch: tensor, K: tl.constexpr
) -> tensor:
    """At most 32 hits that match `length` tokens and go on with the drafted ones: int32 [32], -1 where there is none.

    Args:
        scratch: int32 pointer [32]; this program's own.
    """
    lane = tl.arange(0, LANES)
    found = drafted * 0
    for i in range(0, size, _BLOCK):
        at = i + tl.arange(0, _BLOCK)
        hit = tl.load(hits + at, mask=at < size, other=-1)
        _, alive, _ = _followed(hits, at, size, length, row, n, tokens, drafted, K)
        ones = alive.to(tl.int32)
        tl.store(scratch + found + tl.cumsum(ones, axis=0) - 1, hit, mask=alive)
        found += tl.sum(ones, axis=0)
    tl.debug_barrier()
    return tl.load(scratch + lane, mask=lane < found, other=-1)
