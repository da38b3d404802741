"""Sorting suffixes on a GPU, first steps: a key of their first tokens; tiles of suffixes whose keys are sorted already."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

_CHUNK = tl.constexpr(4)
"""Tokens of a suffix that a tile takes in at once."""


@triton.jit(do_not_specialize=["size", "depth"])
def pack_keys(
    text: tensor, positions: tensor, keys: tensor, size: tensor, depth: tensor, WHOLE: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """keys[i], int64: the first WHOLE tokens of a suffix, BITS bits each, and in the bits that are left the start of one more.

    What comes after a separator, or after `depth` tokens, is zero; a token t is t + 1.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = i < size
    position = tl.load(positions + i, mask=mine, other=0)
    key = tl.zeros([BLOCK], tl.int64)
    alive = mine
    for j in tl.static_range(WHOLE):
        alive = alive & (j < depth)
        token = tl.load(text + position + j, mask=alive, other=-1)
        alive = alive & (token >= 0)
        key = (key << BITS) | tl.where(alive, token + 1, 0).to(tl.int64)
    rest: tl.constexpr = 63 - WHOLE * BITS
    if rest > 0:
        token = tl.load(text + position + WHOLE, mask=alive & (depth > WHOLE), other=-1)
        key = (key << rest) | ((token + 1) >> (BITS - rest)).to(tl.int64)
    tl.store(keys + i, key, mask=mine)


@triton.jit
def _larger(a: tensor, b: tensor) -> tensor:
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["size", "depth"])
def order_tiles(
    text: tensor, positions: tensor, keys: tensor, order: tensor, out: tensor, size: tensor, depth: tensor, WHOLE: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Writes positions[order] with each tile of TILE suffixes sorted; their keys are in order.

    The suffixes of a tile are told apart by counting: a suffix's class is how many others of the tile are below it, and it is counted
    anew with some more tokens of those that still share a class.

    Args:
        keys: int64 pointer; sorted, as pack_keys makes them. order: int64 pointer; where each key came from. out: int32 pointer.
    """
    lane = tl.arange(0, TILE)
    i = tl.program_id(0) * TILE + lane
    mine = i < size
    key = tl.load(keys + i, mask=mine, other=0x7FFFFFFFFFFFFFFF)
    before = tl.load(keys + i - 1, mask=mine & (lane > 0), other=-1)
    after = tl.load(keys + i + 1, mask=(i + 1 < size) & (lane + 1 < TILE), other=-1)
    position = tl.load(positions + tl.load(order + i, mask=mine, other=0), mask=mine, other=0)
    class_ = tl.associative_scan(tl.where(key != before, lane, 0), 0, _larger)
    rest: tl.constexpr = 63 - WHOLE * BITS
    last = (key >> rest) & ((1 << BITS) - 1)
    # Suffixes that have ended are equal.
    open_ = mine & ((key == before) | (key == after)) & (last > 0)
    taken: tl.constexpr = 4 if 4 * BITS < 58 else 57 // BITS
    token = tl.arange(0, _CHUNK)
    place = tl.where(token < taken, BITS * taken - BITS - BITS * token, 0).to(tl.int64)[None, :]
    start = tl.zeros_like(depth) + WHOLE
    left = tl.max(open_.to(tl.int32), axis=0)
    while (left > 0) & (start < depth):
        offset = start + token[None, :]
        inside = open_[:, None] & (offset < depth) & (token < taken)[None, :]
        value = tl.load(text + position[:, None] + offset, mask=inside, other=-1)
        end = tl.min(tl.where(value < 0, token[None, :], _CHUNK), axis=1)
        part = tl.where(token[None, :] < end[:, None], value + 1, 0).to(tl.int64)
        rank = (class_.to(tl.int64) << (BITS * taken)) | tl.sum(part << place, axis=1)
        below = rank[None, :] < rank[:, None]
        equal = rank[None, :] == rank[:, None]
        class_ = tl.sum(below.to(tl.int32), axis=1)
        open_ = open_ & (end >= taken) & (tl.sum(equal.to(tl.int32), axis=1) > 1)
        start += taken
        left = tl.max(open_.to(tl.int32), axis=0)
    rank = (class_.to(tl.int64) << 32) | position.to(tl.int64)
    at = tl.program_id(0) * TILE + tl.sum((rank[None, :] < rank[:, None]).to(tl.int32), axis=1)
    tl.store(out + at, position, mask=mine)
