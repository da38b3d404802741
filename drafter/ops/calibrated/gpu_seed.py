"""Which occurrences a draft of the rule `calibrated` follows on the GPU, found anew where those that are left match too little.

One warp a row. What it finds is left in the row's workspace: see draftd.drafter.ops.calibrated.gpu_levels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import (
    BUCKET_SHIFT_BITS,
    DD_BUCKET_RULE,
    DD_SEGMENT_WORDS,
    DD_SEGMENTS,
    DS_BUCKETS,
    DS_LENGTH,
    DS_SUFFIXES,
    DS_TEXT,
    HIT_LENGTH_BITS,
    LOCUS_LENGTHS,
)
from draftd.drafter.ops.calibrated import gpu_levels as levels
from draftd.drafter.ops.calibrated.gpu_levels import length_of, level_of
from draftd.drafter.ops.draft.gpu_words import locus_of, of_segment, recency, text_at
from draftd.drafter.ops.search.gpu import rounds_of
from draftd.drafter.ops.warp import TOKENS
from draftd.drafter.policy import REACH, TOP_LEVELS

_BUCKET_RULE = tl.constexpr(DD_BUCKET_RULE)
_SHIFT_BITS = tl.constexpr(BUCKET_SHIFT_BITS)
_SHIFT_MASK = tl.constexpr((1 << BUCKET_SHIFT_BITS) - 1)
_SEGMENTS_START = tl.constexpr(DD_SEGMENTS)
_SEGMENT_WORDS = tl.constexpr(DD_SEGMENT_WORDS)
_SUFFIXES = tl.constexpr(DS_SUFFIXES)
_LENGTH = tl.constexpr(DS_LENGTH)
_BUCKETS = tl.constexpr(DS_BUCKETS)
_TEXT = tl.constexpr(DS_TEXT)
_LOCUS_WORDS = tl.constexpr(LOCUS_LENGTHS * 2)
_LENGTH_BITS = tl.constexpr(HIT_LENGTH_BITS)
_LENGTH_MASK = tl.constexpr((1 << HIT_LENGTH_BITS) - 1)
_HELD = tl.constexpr(levels.HELD)
_SHORT = tl.constexpr(levels.SHORT_LENGTHS)
_SCANNED = tl.constexpr(levels.SCANNED_HITS)
_HELD_MATCHED = tl.constexpr(levels.HELD_MATCHED)
_OWN_PLACES = tl.constexpr(levels.OWN_PLACES)
_OWN_MATCHED = tl.constexpr(levels.OWN_MATCHED)
_SAMPLES = tl.constexpr(levels.SAMPLES)
_SAMPLES_ORDER = tl.constexpr(levels.SAMPLES_ORDER)
_SAMPLES_WEIGHT = tl.constexpr(levels.SAMPLES_WEIGHT)
_SCAN = tl.constexpr(levels.SCAN)
_TOP = tl.constexpr(TOP_LEVELS)
_REACH = tl.constexpr(REACH)
_NEVER = tl.constexpr(0x7FFFFFFF)
_FAR = tl.constexpr(64)
_LOOK = tl.constexpr(1024)
_BLOCK = tl.constexpr(128)
_SCANNED_TOKENS = tl.constexpr(2048)
"""A drafted token is looked for in so many of the row's last tokens."""
_LOOKING = tl.constexpr(4)
"""Tokens that a search compares at once."""


@triton.jit(noinline=True)
def find_tail(arena: tensor, words: tensor, end: tensor, longest: tensor, loci: tensor, PROBES: tl.constexpr) -> None:
    """Writes the loci of the last 1 to SHORT_LENGTHS tokens of a text in all segments, as match_rows does for a row.

    Args:
        words: int64 pointer to the row's record; end: int32 pointer behind the text's last token; longest: tokens of the text.
        loci: int32 pointer [3, LOCUS_LENGTHS, 2]; out.
    """
    half: tl.constexpr = PROBES // 2
    # A lane is a suffix length in a segment, and holds all probes of its search.
    task = tl.arange(0, 4 * _SHORT)
    segment = task // _SHORT
    length = task % _SHORT + 1
    there = segment < 3
    part = words + _SEGMENTS_START + tl.where(there, segment, 0) * _SEGMENT_WORDS
    rule = tl.load(words + _BUCKET_RULE)
    shift = rule.to(tl.int32) & _SHIFT_MASK
    active = there & (length <= longest) & (tl.load(part + _LENGTH) > 0)
    suffixes = arena + tl.load(part + _SUFFIXES)
    text = arena + tl.load(part + _TEXT)
    buckets = arena + tl.load(part + _BUCKETS)
    bucket = tl.load(end - length, mask=active, other=-1) >> shift
    known = (bucket >= 0) & (bucket < (rule >> _SHIFT_BITS).to(tl.int32))
    low = tl.load(buckets + bucket, mask=known, other=0)
    high = tl.load(buckets + bucket + 1, mask=known, other=0)
    whole = (length == 1) & (shift == 0)
    first_high = tl.where(whole, low, high)
    end_low = tl.where(whole, high, low)
    low_shared = tl.zeros_like(low) + tl.where(shift == 0, 1, 0)
    high_shared = low_shared
    probe = tl.arange(0, PROBES)[:, None]
    open_places = tl.max(first_high - low, axis=0)
    rounds = rounds_of(open_places, half)
    for _ in range(rounds):
        if open_places > 0:
            # All probes look for both ends of the locus until one is inside: see search_group.
            is_split = (end_low > low) | (high > first_high)
            parts = tl.where(is_split, half + 1, PROBES + 1)
            upto = tl.where(is_split, first_high, high)
            spacing = (upto - low) // parts + 1
            end_begin = tl.where(is_split, end_low, low)
            end_spacing = (high - end_begin) // parts + 1
            split = is_split[None, :]
            for_end = split & (probe >= half)
            nth = tl.where(for_end, probe - half, probe) + 1
            at = tl.where(for_end, end_begin[None, :] + nth * end_spacing[None, :], low[None, :] + nth * spacing[None, :]) - 1
            inside = (at < tl.where(for_end, high[None, :], upto[None, :])) & (for_end | (probe < half) | (split == 0))
            position = tl.load(suffixes[None, :] + at, mask=inside, other=0)
            # From here on, where the suffixes and the pattern go on after what all of them share.
            begun = tl.minimum(low_shared, high_shared)
            same = tl.zeros_like(at) + begun[None, :]
            # -1, 0, 1: the suffix is below, begins with, is above the pattern; 2: not known yet.
            order = tl.where(inside & (begun < length)[None, :], 2, 0)
            undecided = tl.max(tl.max(order, axis=0), axis=0)
            while undecided == 2:
                for ahead in tl.static_range(_LOOKING):
                    more = begun + ahead < length
                    # Not masked with what the tokens before decided: these loads need not wait for one another.
                    x = tl.load((text + begun + ahead)[None, :] + position, mask=inside & more[None, :], other=0)
                    y = tl.load(end - length + begun + ahead, mask=active & more, other=0)[None, :]
                    compared = tl.where(more[None, :], tl.where(x == y, 2, tl.where(x < y, -1, 1)), 0)
                    order = tl.where(order == 2, compared, order)
                    same += (order == 2).to(tl.int32)
                begun += _LOOKING
                order = tl.where((order == 2) & (begun >= length)[None, :], 0, order)
                undecided = tl.max(tl.max(order, axis=0), axis=0)
            below = inside & (order < 0)
            up_to = inside & (order <= 0)
            counts = tl.where(below & (for_end == 0), 1, 0) + tl.where(up_to & ((split == 0) | for_end), 1 << 16, 0)
            counts = tl.sum(counts, axis=0)
            before_first = counts & 0xFFFF
            before_end = counts >> 16
            low_shared = tl.maximum(low_shared, tl.max(tl.where(below, same, 0), axis=0))
            high_shared = tl.maximum(high_shared, tl.max(tl.where(inside & (order > 0), same, 0), axis=0))
            first_high = tl.minimum(upto, low + (before_first + 1) * spacing - 1)
            low = tl.where(before_first > 0, low + before_first * spacing, low)
            high = tl.minimum(high, end_begin + (before_end + 1) * end_spacing - 1)
            end_low = tl.where(before_end > 0, end_begin + before_end * end_spacing, end_begin)
            open_places = tl.max(tl.maximum(first_high - low, high - end_low), axis=0)
    out = loci + segment * _LOCUS_WORDS + length * 2
    tl.store(out, tl.where(active, low, 0), mask=there)
    tl.store(out + 1, tl.where(active, high, 0), mask=there)


@triton.jit
def _further(before: tensor, wanted: tensor, wanted_later: tensor, limit: tensor, back: tensor) -> tensor:
    """How many tokens more than those known match, for each row of `before`: int32 [rows].

    Args:
        before: int32 [rows, 32]; what stands before, the nearest first; -1 for a separator, or nothing.
        wanted: int32 [32]; what stands before in the text, -2 beyond `limit`; wanted_later: the same one place later.
    """
    # What stands before a piece of a document is behind a separator, and behind one more is another document.
    cut = tl.min(tl.where(before < 0, back, _FAR), axis=1)
    missed = tl.min(tl.where((back < cut[:, None]) & (before != wanted), back, _FAR), axis=1)
    missed_later = tl.min(tl.where((back > cut[:, None]) & ((before < 0) | (before != wanted_later)), back, _FAR), axis=1)
    return tl.where(missed < _FAR, missed, tl.minimum(missed_later - 1, limit))


@triton.jit
def _sample(arena: tensor, words: tensor, loci: tensor, length: tensor, large: tensor, work: tensor) -> None:
    """Leaves what follows evenly spaced occurrences of suffixes in the workspace; length, large: [TOP_LEVELS], which and whether."""
    lane = tl.arange(0, _HELD)
    row = tl.arange(0, _TOP)
    at = loci + length * 2
    low0 = tl.load(at)
    low1 = tl.load(at + _LOCUS_WORDS)
    low2 = tl.load(at + 2 * _LOCUS_WORDS)
    end0 = tl.load(at + 1) - low0
    end1 = end0 + tl.load(at + _LOCUS_WORDS + 1) - low1
    size = end1 + tl.load(at + 2 * _LOCUS_WORDS + 1) - low2
    nth = ((2 * lane + 1).to(tl.int64)[None, :] * size[:, None] // (2 * _HELD)).to(tl.int32)
    in_main = nth < end0[:, None]
    in_live = nth >= end1[:, None]
    low = tl.where(in_main, low0[:, None], tl.where(in_live, (low2 - end1)[:, None], (low1 - end0)[:, None]))
    suffixes0 = tl.load(words + _SEGMENTS_START + _SUFFIXES)
    suffixes1 = tl.load(words + _SEGMENTS_START + _SEGMENT_WORDS + _SUFFIXES)
    suffixes2 = tl.load(words + _SEGMENTS_START + 2 * _SEGMENT_WORDS + _SUFFIXES)
    suffixes = tl.where(in_main, suffixes0, tl.where(in_live, suffixes2, suffixes1))
    position = tl.load(arena + suffixes + low + nth, mask=large[:, None], other=0)
    text = tl.where(in_main, text_at(words, 0), tl.where(in_live, text_at(words, 2), text_at(words, 1)))
    x = tl.load(arena + text + position + length[:, None], mask=large[:, None], other=-1)
    age = recency(words, tl.where(in_main, 0, tl.where(in_live, 2, 1)), position)
    age = tl.where(x >= 0, age, -1)
    is_latest = age == tl.max(age, axis=1)[:, None]
    at_sample = work + row[:, None] * _HELD + lane[None, :]
    tl.store(at_sample + _SAMPLES, x)
    tl.store(at_sample + _SAMPLES_ORDER, tl.where(is_latest, 31, 0))
    tl.store((work + _SAMPLES_WEIGHT).to(tl.pointer_type(tl.float32)) + row, size.to(tl.float32) / _HELD)


@triton.jit(noinline=True)
def seed_corpus(arena: tensor, words: tensor, loci: tensor, end: tensor, text_tokens: tensor, places: tensor, work: tensor) -> tensor:
    """Holds all occurrences of the shortest suffix that has at most HELD, or as many samples of the longest that was searched for.

    Of the levels that vote and are shorter, samples are taken.

    Args:
        words: int64 pointer to the row's record; loci: int32 pointer [3, LOCUS_LENGTHS, 2]; see match_rows.
        end: int32 pointer behind the text's last token; text_tokens: how many the text has.
        places: int64 pointer [HELD]; out: where in the arena each occurrence goes on, the most recent last; work: the row's workspace.

    Returns:
        The length of that suffix, the highest level that occurs (-1 for none), and how many occurrences a held one stands for.
    """
    lane = tl.arange(0, _HELD)
    back = tl.arange(0, 32)[None, :]
    short = tl.arange(0, _SHORT) + 1
    total = tl.zeros_like(short)
    for segment in tl.static_range(3):
        at = loci + segment * _LOCUS_WORDS + short * 2
        total += tl.load(at + 1) - tl.load(at)
    kept = tl.min(tl.where(total <= _HELD, short, _SHORT), axis=0)
    first0, first1, first2, size0, size1, size2 = locus_of(words, loci + kept * 2)
    end1 = size0 + size1
    count = end1 + size2
    some = lane < count
    nth = tl.where(count <= _HELD, lane, ((2 * lane + 1).to(tl.int64) * count // (2 * _HELD)).to(tl.int32))
    first = of_segment(nth, size0, end1, first0, first1 - size0, first2 - end1)
    position = tl.load(arena + first + nth, mask=some, other=0)
    text = of_segment(nth, size0, end1, text_at(words, 0), text_at(words, 1), text_at(words, 2))
    place = text + position + kept
    age = tl.where(some, recency(words, of_segment(nth, size0, end1, 0, 1, 2), position), _NEVER)
    following = tl.load(arena + place, mask=some, other=-1)
    limit = tl.minimum(text_tokens, _REACH) - kept
    before = tl.load(
        arena + (place - kept - 1)[:, None] - back, mask=some[:, None] & (position[:, None] > back), other=-1
    )  # fmt: skip
    wanted = tl.load(end - kept - 1 - back, mask=back < limit, other=-2)
    wanted_later = tl.load(end - kept - back, mask=(back > 0) & (back <= limit), other=-2)
    matched = tl.where(some, kept + _further(before, wanted, wanted_later, limit, back), 0)
    # In the order of recency.
    earlier = (age[:, None] < age[None, :]) | ((age[:, None] == age[None, :]) & (lane[:, None] < lane[None, :]))
    rank = tl.sum(earlier.to(tl.int32), axis=0)
    tl.store(places + rank, place)
    tl.store(work + _HELD_MATCHED + rank, matched)
    top = level_of(tl.max(tl.where(following >= 0, matched, 0), axis=0))
    top = tl.where((top >= 0) & (length_of(top) >= kept), top, level_of(kept - 1))
    row = tl.arange(0, _TOP)
    length = length_of(top - row)
    large = (top >= row) & (length < kept)
    if tl.max(large.to(tl.int32), axis=0) > 0:
        _sample(arena, words, loci, length, large, work)
    return kept, top, tl.maximum(count.to(tl.float32) / _HELD, 1.0)


@triton.jit
def _least_held(histogram: tensor) -> tensor:
    """From which matching length on occurrences are held, and how many match so far: int32 [64] by length."""
    length = tl.arange(0, 64)
    as_long = tl.cumsum(histogram, axis=0, reverse=True)
    fits = (length > 0) & (as_long > 0) & (as_long <= _HELD)
    # More than can be held may match as far as any: the most recent of them are held.
    longest = tl.max(tl.where(histogram > 0, length, 0), axis=0)
    least = tl.minimum(tl.min(tl.where(fits, length, _FAR), axis=0), longest)
    return least, tl.sum(tl.where(length == least, as_long, 0), axis=0)


@triton.jit
def _scan(row: tensor, n: tensor, end: tensor, drafted: tensor, limit: tensor, out: tensor) -> tensor:
    """Writes the most recent places that hold the text's last token, but for the last, and how far each matches; answers how many.

    Args:
        end: int32 pointer behind the text's last token; drafted: tokens of the draft; limit: longest match.
        out: int32 pointer [SCANNED_HITS]; as match_rows writes hits, the most recent first.
    """
    last = tl.load(end - 1)
    lane = tl.arange(0, _BLOCK)
    in_draft = tl.arange(0, _FAR)
    is_hit = (tl.load(end - 2 - in_draft, mask=in_draft < drafted - 1, other=-1) == last) & (in_draft < drafted - 1)
    tl.store(out + tl.cumsum(is_hit.to(tl.int32), axis=0) - 1, n + drafted - 2 - in_draft, mask=is_hit)
    found = tl.sum(is_hit.to(tl.int32), axis=0)
    upto = tl.where(drafted > 0, n, n - 1)
    stop = tl.maximum(upto - _SCANNED_TOKENS, 0)
    many = tl.arange(0, _LOOK)
    while upto > stop:
        # Most of the row is only looked through.
        place = upto - 1 - many
        holds = (tl.load(row + place, mask=place >= 0, other=-1) == last) & (place >= 0)
        if tl.max(holds.to(tl.int32), axis=0) > 0:
            for part in range(0, _LOOK, _BLOCK):
                at = upto - 1 - part - lane
                is_here = (tl.load(row + at, mask=at >= 0, other=-1) == last) & (at >= 0)
                here = tl.sum(is_here.to(tl.int32), axis=0)
                if here > 0:
                    slot = found + tl.cumsum(is_here.to(tl.int32), axis=0) - 1
                    tl.store(out + slot, at, mask=is_here & (slot < _SCANNED))
                    found = tl.minimum(found + here, _SCANNED)
        upto = tl.where(found < _SCANNED, upto - _LOOK, 0)
    tl.debug_barrier()
    back = tl.arange(0, 32)[None, :]
    wanted = tl.load(end - 2 - back, mask=back < limit - 1, other=-2)
    for i in range(0, found, 32):
        mine = i + tl.arange(0, 32)
        hit = tl.load(out + mine, mask=mine < found, other=0)
        behind = hit[:, None] - 1 - back
        seen = (mine < found)[:, None] & (behind >= 0)
        before = tl.load(tl.where(behind < n, row + behind, end - drafted + behind - n), mask=seen, other=-1)
        matched = tl.minimum(1 + tl.min(tl.where(before == wanted, _FAR, back), axis=1), limit)
        tl.store(out + mine, (hit << _LENGTH_BITS) | matched, mask=mine < found)
    tl.debug_barrier()
    return found


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
    lane = tl.arange(0, _HELD)
    scan = work + _SCAN
    bins = tl.arange(0, 64)
    least, count = _least_held(tl.load(histogram + bins))
    list_ = hits + tl.where(least > 1, hit_room, 0)
    size = tl.load(hit_counts + tl.where(least > 1, 1, 0))
    if (drafted > 0) | (count > _HELD):
        limit = tl.minimum(n + drafted, _REACH)
        size = _scan(row, n, end, drafted, limit, scan)
        all_ = tl.arange(0, _SCANNED)
        hit = tl.load(scan + all_, mask=all_ < size, other=0)
        least, count = _least_held(tl.histogram(hit & _LENGTH_MASK, 64, mask=all_ < size))
        list_ = scan
    written = size * 0
    block = tl.arange(0, _SCANNED)
    for i in range(0, size, _SCANNED):
        hit = tl.load(list_ + i + block, mask=i + block < size, other=0)
        wanted = (i + block < size) & ((hit & _LENGTH_MASK) >= least)
        slot = written + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.debug_barrier()
        tl.store(scan + slot, hit, mask=wanted & (slot < _HELD))
        written += tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()
    some = lane < written
    hit = tl.load(scan + lane, mask=some, other=0)
    at = tl.where(some, hit >> _LENGTH_BITS, _NEVER - 1)
    earlier = (at[:, None] < at[None, :]) | ((at[:, None] == at[None, :]) & (lane[:, None] < lane[None, :]))
    rank = tl.sum(earlier.to(tl.int32), axis=0)
    tl.store(work + _OWN_PLACES + rank, at + 1)
    tl.store(work + _OWN_MATCHED + rank, tl.where(some, tl.minimum(hit & _LENGTH_MASK, _REACH), 0))
    return tl.where(written > 0, least, _FAR)


@triton.jit
def token_or_none(x: tensor) -> tensor:
    """What is no token, separators among them, as -1."""
    return tl.where((x >= 0) & (x < TOKENS), x, -1)
