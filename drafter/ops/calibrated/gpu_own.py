"""Which earlier occurrences of its tail in the row itself, draft included, a draft of the rule `calibrated` follows on the GPU.

One warp a row. The first search takes what match_rows has found; the others look through the row's last tokens, all lengths at once: a
lane has a word of places, and a token more to match is one more set of places, moved and intersected.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import HIT_LENGTH_BITS
from draftd.drafter.ops.calibrated import gpu_levels as levels
from draftd.drafter.ops.calibrated.gpu_levels import first_bit
from draftd.drafter.ops.calibrated.gpu_seed import in_order
from draftd.drafter.ops.warp import LANES, bit_count, highest_bit, lanes_where
from draftd.drafter.policy import REACH

_LENGTH_BITS = tl.constexpr(HIT_LENGTH_BITS)
_LENGTH_MASK = tl.constexpr((1 << HIT_LENGTH_BITS) - 1)
_HELD = tl.constexpr(levels.HELD)
_TAIL_TOKENS = tl.constexpr(levels.TAIL_TOKENS)
_OWN_PLACES = tl.constexpr(levels.OWN_PLACES)
_OWN_MATCHED = tl.constexpr(levels.OWN_MATCHED)
_SCAN = tl.constexpr(levels.SCAN)
_SCANNED_TOKENS = tl.constexpr(levels.SCANNED_TOKENS)
_REACH = tl.constexpr(REACH)
_NEVER = tl.constexpr(0x7FFFFFFF)
_FAR = tl.constexpr(64)
_TOP_BIT = tl.constexpr(-(1 << 31))
assert levels.SCANNED_TOKENS == 32 * LANES
assert levels.TAIL_TOKENS == LANES


@triton.jit
def _where_is(token: tensor, tokens: tensor, latest: tensor) -> tensor:
    """A word a lane: bit i stands for place i * LANES + lane of the tokens that are looked at; int32 [32, 32], the last ones int32 [32]."""
    bit = 1 << tl.arange(0, 32)
    return tl.sum(tl.where(tokens == token, bit[:, None], 0), axis=0) | tl.where(latest == token, _TOP_BIT, 0)


@triton.jit
def _count(words: tensor) -> tensor:
    return tl.sum(bit_count(words), axis=0)


@triton.jit
def _most_recent(words: tensor) -> tensor:
    """The HELD most recent places."""
    lane = tl.arange(0, LANES)
    # The highest bit above which there are fewer.
    bit = tl.full([], 0, tl.int32)
    for i in tl.static_range(5):
        trial = bit + (16 >> i)
        bit = tl.where(_count(words & ((-1) << trial)) >= _HELD, trial, bit)
    above = words & ((-2) << bit)
    here = lanes_where(((words >> bit) & 1) == 1)
    later = bit_count(((here.to(tl.uint32, bitcast=True) >> lane.to(tl.uint32)) >> 1).to(tl.int32, bitcast=True))
    taken = ((here >> lane) & 1 == 1) & (later + _count(above) < _HELD)
    return above | (taken.to(tl.int32) << bit)


@triton.jit
def _scan(row: tensor, n: tensor, end: tensor, drafted: tensor, out: tensor) -> tensor:
    """Finds the longest matches among the last SCANNED_TOKENS tokens, at most HELD, all from some length on; else the most recent.

    Args:
        end: int32 pointer behind the last token of the row and its draft; drafted: tokens of the draft.
        out: int32 pointer [HELD]; workspace.

    Returns:
        That length; int32 [HELD]: where each ends, and how far it matches, 0 if there is none.
    """
    lane = tl.arange(0, LANES)
    i = tl.arange(0, 32)
    text = n + drafted
    # The last token is no match of itself. What is drafted is among the latest places.
    begin = text - 1 - _SCANNED_TOKENS
    place = begin + (i * LANES)[:, None] + lane[None, :]
    tokens = tl.load(row + place, mask=(place >= 0) & (i < 31)[:, None], other=-2)
    place = text - 1 - LANES + lane
    latest = tl.load(tl.where(drafted > 0, end - 1 - LANES, row + (n - 1 - LANES)) + lane, mask=place >= 0, other=-2)
    limit = tl.minimum(text, _REACH)
    # A row may hold anything, also what stands here for tokens that there are not.
    first = tl.maximum(31 - begin - lane, 0) // 32
    there = tl.where(first > 31, 0, (-1) << tl.minimum(first, 31))
    found = _where_is(tl.load(end - 1), tokens, latest) & there
    count = _count(found)
    length = tl.full([], 1, tl.int32)
    going = count > _HELD
    for _ in range(limit - 1):
        if going:
            before = _where_is(tl.load(end - 1 - length), tokens, latest)
            moved = tl.gather(before, (lane - length) & (LANES - 1), axis=0)
            longer = found & tl.where(lane < length, moved << 1, moved)
            longer_count = _count(longer)
            # More than can be held may match as far as any.
            some = longer_count > 0
            found = tl.where(some, longer, found)
            count = tl.where(some, longer_count, count)
            length = tl.where(some, length + 1, length)
            going = some & (count > _HELD)
    if count > _HELD:
        found = _most_recent(found)
        count = tl.minimum(count, _HELD)
    mine = bit_count(found)
    slot = tl.cumsum(mine, axis=0) - mine
    for _ in range(tl.max(mine, axis=0)):
        bit = tl.maximum(highest_bit(found), 0)
        tl.store(out + slot, begin + bit * LANES + lane, mask=found != 0)
        slot += 1
        found = found & ~(1 << bit)
    tl.debug_barrier()
    at = tl.load(out + lane, mask=lane < count, other=0)
    # What stands before a place in the draft is there or among the row's last tokens.
    before = tl.where(at < n, row + at, end - text + at) - 1
    missed = tl.zeros_like(at)
    for back in tl.static_range(_REACH - 1):
        token = tl.load(before - back, mask=(lane < count) & (at > back), other=-2)
        missed |= tl.where(token != tl.load(end - 2 - back), 1 << back, 0)
    matched = 1 + first_bit(missed | ((-1) << (limit - 1)))
    return length, at, tl.where(lane < count, matched, 0)


@triton.jit
def _least_held(histogram: tensor) -> tensor:
    """From which matching length on occurrences are held, and how many match so far: int32 [64] by length."""
    length = tl.arange(0, 64)
    as_long = tl.cumsum(histogram, axis=0, reverse=True)
    fits = (length > 0) & (as_long > 0) & (as_long <= _HELD)
    # More than can be held may match as far as any.
    longest = tl.max(tl.where(histogram > 0, length, 0), axis=0)
    least = tl.minimum(tl.min(tl.where(fits, length, _FAR), axis=0), longest)
    return least, tl.sum(tl.where(length == least, as_long, 0), axis=0)


@triton.jit(noinline=True)
def seed_own(
    row: tensor, n: tensor, end: tensor, drafted: tensor, hits: tensor, hit_room: tensor, hit_counts: tensor, histogram: tensor,
    work: tensor,
) -> tensor:  # fmt: skip
    """Holds the longest matches in the row, at most HELD, all from some length on; of equals that are too many the most recent.

    Args:
        end: int32 pointer behind the last token of the row and its draft; drafted: tokens of the draft.
        hits, hit_counts, histogram: what match_rows found for the row, used where nothing is drafted yet; work: the row's workspace.

    Returns:
        That length; longer than any match if there is none.
    """
    lane = tl.arange(0, LANES)
    scan = work + _SCAN
    least, count = _least_held(tl.load(histogram + tl.arange(0, 64)))
    if (drafted > 0) | (count > _HELD):
        least, at, matched = _scan(row, n, end, drafted, scan)
    else:
        list_ = hits + tl.where(least > 1, hit_room, 0)
        size = tl.load(hit_counts + tl.where(least > 1, 1, 0))
        written = size * 0
        for i in range(0, size, LANES):
            hit = tl.load(list_ + i + lane, mask=i + lane < size, other=0)
            wanted = (i + lane < size) & ((hit & _LENGTH_MASK) >= least)
            here = lanes_where(wanted)
            tl.store(scan + written + bit_count(here & ((1 << lane) - 1)), hit, mask=wanted)
            written += tl.sum(wanted.to(tl.int32), axis=0)
        tl.debug_barrier()
        hit = tl.load(scan + lane, mask=lane < written, other=0)
        at = hit >> _LENGTH_BITS
        matched = tl.minimum(hit & _LENGTH_MASK, _REACH)
    # Places are all different: what there is not comes behind them.
    rank = in_order(tl.where(matched > 0, at, (0 - lane) + _NEVER))
    tl.store(work + _OWN_PLACES + rank, at + 1)
    tl.store(work + _OWN_MATCHED + rank, matched)
    return tl.where(tl.max(matched, axis=0) > 0, least, _FAR)
