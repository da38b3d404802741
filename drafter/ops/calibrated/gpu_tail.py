"""The loci of the tail of a draft in all segments, by one warp: a lane is a suffix in a segment, its probes are in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import (
    BUCKET_SHIFT_BITS,
    DD_BUCKET_RULE,
    DD_SEGMENT_WORDS,
    DD_SEGMENTS,
    DD_SIGNS,
    DS_BUCKETS,
    DS_LENGTH,
    DS_SUFFIXES,
    DS_TEXT,
    LOCUS_LENGTHS,
    SIGN_BITS,
    SIGN_TOKENS,
)
from draftd.drafter.ops.calibrated import gpu_levels as levels
from draftd.drafter.ops.search.gpu import places_of_signs, rounds_of, sign_range, signs_between

_BUCKET_RULE = tl.constexpr(DD_BUCKET_RULE)
_SHIFT_BITS = tl.constexpr(BUCKET_SHIFT_BITS)
_SHIFT_MASK = tl.constexpr((1 << BUCKET_SHIFT_BITS) - 1)
_SEGMENTS_START = tl.constexpr(DD_SEGMENTS)
_SEGMENT_WORDS = tl.constexpr(DD_SEGMENT_WORDS)
_SIGNS = tl.constexpr(DD_SIGNS)
_SUFFIXES = tl.constexpr(DS_SUFFIXES)
_LENGTH = tl.constexpr(DS_LENGTH)
_BUCKETS = tl.constexpr(DS_BUCKETS)
_TEXT = tl.constexpr(DS_TEXT)
_LOCUS_WORDS = tl.constexpr(LOCUS_LENGTHS * 2)
_SIGN_BITS = tl.constexpr(SIGN_BITS)
_SIGN_TOKENS = tl.constexpr(SIGN_TOKENS)
_SHORT = tl.constexpr(levels.SHORT_LENGTHS)
_SIGN_PROBES = tl.constexpr(4)
"""Signs that a search looks at for each end of its range at once."""


@triton.jit
def _shared(sign: tensor, other: tensor, length: tensor) -> tensor:
    """How many of the first tokens are the same in two signs, at most `length`; 0 if the first one is negative."""
    differ = sign ^ other
    same = (differ == 0).to(tl.int32) + ((differ >> _SIGN_BITS) == 0).to(tl.int32) + ((differ >> (2 * _SIGN_BITS)) == 0).to(tl.int32)
    return tl.minimum(same, length)


@triton.jit
def _narrow(signs: tensor, pattern: tensor, length: tensor, low: tensor, high: tensor) -> tensor:
    """search_signs with the probes of a search in one lane, and signs of its own for each; and how many tokens the suffixes just below and
    above what is left share with the pattern, at least.

    Args:
        signs: int64 pointers [32]; pattern: int32 pointers [32]; length, low, high: int32 [32].
    """
    from_, to, known = sign_range(pattern, length, high > low)
    begin, end = signs_between(low, high)
    first_low, first_high, last_low, last_high = begin, end, begin, end
    rounds = rounds_of(tl.max(end - begin, axis=0), _SIGN_PROBES)
    for _ in range(rounds):
        first_spacing = (first_high - first_low) // (_SIGN_PROBES + 1) + 1
        last_spacing = (last_high - last_low) // (_SIGN_PROBES + 1) + 1
        first_before = tl.zeros_like(low)
        last_before = first_before
        for probe in tl.static_range(_SIGN_PROBES):
            first_at = first_low + (probe + 1) * first_spacing - 1
            last_at = last_low + (probe + 1) * last_spacing - 1
            in_first = first_at < first_high
            in_last = last_at < last_high
            of_first = tl.load(signs + first_at, mask=in_first, other=0)
            of_last = tl.load(signs + last_at, mask=in_last, other=0)
            first_before += (in_first & (of_first < from_)).to(tl.int32)
            last_before += (in_last & (of_last <= to)).to(tl.int32)
        first_high = tl.minimum(first_high, first_low + (first_before + 1) * first_spacing - 1)
        first_low += first_before * first_spacing
        last_high = tl.minimum(last_high, last_low + (last_before + 1) * last_spacing - 1)
        last_low += last_before * last_spacing
    # How many tokens the suffixes just outside what is left share with the pattern.
    below = tl.load(signs + first_low - 1, mask=known & (first_low > begin), other=-1)
    above = tl.load(signs + last_low, mask=known & (last_low < end), other=-1)
    least, first_most, end_least, most = places_of_signs(low, high, begin, end, first_low, last_low, known & (length <= _SIGN_TOKENS))
    return least, first_most, end_least, most, _shared(below, from_, length), _shared(above, from_, length)


@triton.jit
def _look(text: tensor, position: tensor, order: tensor, same: tensor, begun: tensor, wanted: tensor) -> tensor:
    """The order of suffixes and their patterns after one more token, and how many tokens are the same.

    Args:
        order: -1, 0, 1: the suffix is below, begins with, is above the pattern; 2: not known yet.
    """
    # Every lane that loads costs time: only those that need it.
    x = tl.load(text + begun + position, mask=order == 2, other=0)
    order = tl.where(order == 2, tl.where(x == wanted, 2, tl.where(x < wanted, -1, 1)), order)
    return order, same + (order == 2).to(tl.int32)


@triton.jit(noinline=True)
def find_tail(arena: tensor, words: tensor, end: tensor, longest: tensor, since: tensor, loci: tensor) -> None:
    """Writes the loci of the last 1 to SHORT_LENGTHS tokens of a text in all segments, as match_rows does for a row.

    Args:
        words: int64 pointer to the row's record; end: int32 pointer behind the text's last token; longest: tokens of the text.
        since: Tokens by which the text has grown since the loci were written, at least 1.
        loci: int32 pointer [3, LOCUS_LENGTHS, 2]; out.
    """
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
    out = loci + segment * _LOCUS_WORDS + length * 2
    # What began as long ago is among what was found then.
    within = active & (length > since)
    bucket = tl.load(end - length, mask=active, other=-1) >> shift
    known = (within == 0) & (bucket >= 0) & (bucket < (rule >> _SHIFT_BITS).to(tl.int32))
    low = tl.load(buckets + bucket, mask=known, other=0)
    high = tl.load(buckets + bucket + 1, mask=known, other=0)
    low = tl.where(within, tl.load(out - 2 * since, mask=within, other=0), low)
    high = tl.where(within, tl.load(out - 2 * since + 1, mask=within, other=0), high)
    whole = (length == 1) & (shift == 0)
    signs = tl.load(words + _SIGNS + tl.where(there, segment, 0), mask=there, other=0)
    open_ = (high > low) & (whole == 0) & (signs > 0)
    narrowed = _narrow((arena + signs).to(tl.pointer_type(tl.int64)), end - length, length, low, tl.where(open_, high, low))
    first_high = tl.where(whole, low, tl.where(open_, narrowed[1], high))
    end_low = tl.where(whole, high, tl.where(open_, narrowed[2], low))
    low = tl.where(open_, narrowed[0], low)
    high = tl.where(open_, narrowed[3], high)
    shared = tl.where(within, length - since, tl.where(shift == 0, 1, 0))
    low_shared = tl.maximum(shared, tl.where(open_, narrowed[4], 0))
    high_shared = tl.maximum(shared, tl.where(open_, narrowed[5], 0))
    open_places = tl.max(tl.maximum(first_high - low, high - end_low), axis=0)
    rounds = rounds_of(open_places, 2)
    for _ in range(rounds):
        if open_places > 0:
            # Four probes look for both ends of the locus until one is inside, then two for each: see search_group.
            is_split = (end_low > low) | (high > first_high)
            parts = tl.where(is_split, 3, 5)
            upto = tl.where(is_split, first_high, high)
            spacing = (upto - low) // parts + 1
            end_begin = tl.where(is_split, end_low, low)
            end_spacing = (high - end_begin) // parts + 1
            at0 = low + spacing - 1
            at1 = at0 + spacing
            at2 = end_begin + tl.where(is_split, end_spacing, 3 * end_spacing) - 1
            at3 = at2 + end_spacing
            in0 = at0 < upto
            in1 = at1 < upto
            in2 = at2 < high
            in3 = at3 < high
            position0 = tl.load(suffixes + at0, mask=in0, other=0)
            position1 = tl.load(suffixes + at1, mask=in1, other=0)
            position2 = tl.load(suffixes + at2, mask=in2, other=0)
            position3 = tl.load(suffixes + at3, mask=in3, other=0)
            # From here on, where the suffixes and the pattern go on after what all of them share.
            begun = tl.minimum(low_shared, high_shared)
            undecided = begun < length
            order0 = tl.where(in0 & undecided, 2, 0)
            order1 = tl.where(in1 & undecided, 2, 0)
            order2 = tl.where(in2 & undecided, 2, 0)
            order3 = tl.where(in3 & undecided, 2, 0)
            same0, same1, same2, same3 = begun, begun, begun, begun
            looking = tl.max(tl.maximum(tl.maximum(order0, order1), tl.maximum(order2, order3)), axis=0)
            while looking == 2:
                wanted = tl.load(end - length + begun, mask=active & (begun < length), other=0)
                order0, same0 = _look(text, position0, order0, same0, begun, wanted)
                order1, same1 = _look(text, position1, order1, same1, begun, wanted)
                order2, same2 = _look(text, position2, order2, same2, begun, wanted)
                order3, same3 = _look(text, position3, order3, same3, begun, wanted)
                begun += 1
                begins = begun >= length
                order0 = tl.where((order0 == 2) & begins, 0, order0)
                order1 = tl.where((order1 == 2) & begins, 0, order1)
                order2 = tl.where((order2 == 2) & begins, 0, order2)
                order3 = tl.where((order3 == 2) & begins, 0, order3)
                looking = tl.max(tl.maximum(tl.maximum(order0, order1), tl.maximum(order2, order3)), axis=0)
            below0 = in0 & (order0 < 0)
            below1 = in1 & (order1 < 0)
            below2 = in2 & (order2 < 0)
            below3 = in3 & (order3 < 0)
            before_first = below0.to(tl.int32) + below1.to(tl.int32)
            before_first += tl.where(is_split, 0, below2.to(tl.int32) + below3.to(tl.int32))
            up_to = (in0 & (order0 <= 0)).to(tl.int32) + (in1 & (order1 <= 0)).to(tl.int32)
            before_end = tl.where(is_split, 0, up_to) + (in2 & (order2 <= 0)).to(tl.int32) + (in3 & (order3 <= 0)).to(tl.int32)
            of_below = tl.maximum(tl.where(below0, same0, 0), tl.where(below1, same1, 0))
            of_below = tl.maximum(of_below, tl.maximum(tl.where(below2, same2, 0), tl.where(below3, same3, 0)))
            low_shared = tl.maximum(low_shared, of_below)
            of_above = tl.maximum(tl.where(order0 > 0, same0, 0), tl.where(order1 > 0, same1, 0))
            of_above = tl.maximum(of_above, tl.maximum(tl.where(order2 > 0, same2, 0), tl.where(order3 > 0, same3, 0)))
            high_shared = tl.maximum(high_shared, of_above)
            first_high = tl.minimum(upto, low + (before_first + 1) * spacing - 1)
            low = tl.where(before_first > 0, low + before_first * spacing, low)
            high = tl.minimum(high, end_begin + (before_end + 1) * end_spacing - 1)
            end_low = tl.where(before_end > 0, end_begin + before_end * end_spacing, end_begin)
            open_places = tl.max(tl.maximum(first_high - low, high - end_low), axis=0)
    tl.store(out, tl.where(active, low, 0), mask=there)
    tl.store(out + 1, tl.where(active, high, 0), mask=there)
