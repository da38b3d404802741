"""Which occurrences a draft of the rule `calibrated` follows on the GPU, found anew where those that are left match too little.

One warp a row. What it finds is left in the row's workspace: see draftd.drafter.ops.calibrated.gpu_levels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import LOCUS_LENGTHS
from draftd.drafter.ops.calibrated import gpu_levels as levels
from draftd.drafter.ops.calibrated.gpu_levels import first_bit, length_of, level_of
from draftd.drafter.ops.draft.gpu_words import locus_of, of_segment, recency, text_at
from draftd.drafter.ops.warp import TOKENS, bit_count, lanes_with_same
from draftd.drafter.policy import REACH, TOP_LEVELS

_LOCUS_WORDS = tl.constexpr(LOCUS_LENGTHS * 2)
_HELD = tl.constexpr(levels.HELD)
_SHORT = tl.constexpr(levels.SHORT_LENGTHS)
_HELD_MATCHED = tl.constexpr(levels.HELD_MATCHED)
_SAMPLES = tl.constexpr(levels.SAMPLES)
_SAMPLED_TOKENS = tl.constexpr(levels.SAMPLED_TOKENS)
_SAMPLED_COUNTS = tl.constexpr(levels.SAMPLED_COUNTS)
_SAMPLES_WEIGHT = tl.constexpr(levels.SAMPLES_WEIGHT)
_TOP = tl.constexpr(TOP_LEVELS)
_REACH = tl.constexpr(REACH)
_NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def token_or_none(x: tensor) -> tensor:
    """What is no token, separators among them, as -1."""
    return tl.where((x >= 0) & (x < TOKENS), x, -1)


@triton.jit
def in_order(key: tensor) -> tensor:
    """The place of each of 32 different keys in their order."""
    return tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)


@triton.jit
def _samples(arena: tensor, words: tensor, loci: tensor, length: tensor, large: tensor) -> tensor:
    """What follows evenly spaced occurrences of a suffix, if it is large, how recent each is, and how many occurrences there are."""
    first0, first1, first2, size0, size1, size2 = locus_of(words, loci + length * 2)
    end1 = size0 + size1
    size = end1 + size2
    nth = ((2 * tl.arange(0, _HELD) + 1).to(tl.int64) * size // (2 * _HELD)).to(tl.int32)
    first = of_segment(nth, size0, end1, first0, first1 - size0, first2 - end1)
    position = tl.load(arena + first + nth, mask=large & (nth < size), other=0)
    text = of_segment(nth, size0, end1, text_at(words, 0), text_at(words, 1), text_at(words, 2))
    x = token_or_none(tl.load(arena + text + position + length, mask=large & (nth < size), other=-1))
    return x, recency(words, of_segment(nth, size0, end1, 0, 1, 2), position), size


@triton.jit
def _leave_samples(work: tensor, level: tl.constexpr, x: tensor, age: tensor, size: tensor) -> None:
    """Counts what follows samples, see SAMPLED_COUNTS."""
    lane = tl.arange(0, _HELD)
    there = x >= 0
    same = lanes_with_same(x)
    count = bit_count(same)
    most = tl.max(tl.where(there, (count << 5) | lane, 0), axis=0) & 31
    newest = tl.max(tl.where(there, age, -1), axis=0)
    latest = tl.max(tl.where(there & (age == newest), lane, 0), axis=0)
    seen = tl.sum(there.to(tl.int32), axis=0)
    is_last = (same.to(tl.uint32, bitcast=True) >> lane.to(tl.uint32)) == 1
    different = tl.sum((there & is_last).to(tl.int32), axis=0)
    in_both = (same >> latest) & 1
    others = (seen << 8) | (different << 16) | tl.where(seen > 0, tl.sum(tl.where(lane == most, in_both, 0), axis=0) << 24, 0)
    tl.store(work + _SAMPLES + level * _HELD + lane, x)
    # The lane of either writes what it has.
    tl.store(work + _SAMPLED_TOKENS + 2 * level + lane * 0, x, mask=lane == most)
    tl.store(work + _SAMPLED_COUNTS + 2 * level + lane * 0, count | others, mask=lane == most)
    tl.store(work + _SAMPLED_TOKENS + 2 * level + 1 + lane * 0, x, mask=lane == latest)
    tl.store(work + _SAMPLED_COUNTS + 2 * level + 1 + lane * 0, count | others, mask=lane == latest)
    tl.store((work + _SAMPLES_WEIGHT).to(tl.pointer_type(tl.float32)) + level, size.to(tl.float32) / _HELD)


@triton.jit
def _further(before: tensor, position: tensor, some: tensor, wanted: tensor, text_tokens: tensor, kept: tensor) -> tensor:
    """How many tokens more than the `kept` ones that are known each occurrence matches: int32 [32].

    Args:
        before: int32 pointers [32] to what stands before each; position: how much of its text that is; some: which there are.
        wanted: int32 pointer; what stands before in the row; text_tokens: how many tokens that has, `kept` included.
    """
    # Of each occurrence a set of places, the nearest in the lowest bit: separators, and others than wanted there or one place later.
    ends = tl.zeros_like(position)
    missed = ends
    missed_later = ends
    later = tl.full([], -2, tl.int32)
    for back in tl.static_range(_REACH):
        token = tl.load(before - back, mask=some & (position > back), other=-1)
        here = tl.load(wanted - back)
        ends |= tl.where(token < 0, 1 << back, 0)
        missed |= tl.where(token != here, 1 << back, 0)
        missed_later |= tl.where(token != later, 1 << back, 0)
        later = here
    limit = tl.maximum(tl.minimum(text_tokens, _REACH) - kept, 0)
    beyond = (-1) << limit
    # What stands before a piece of a document is behind a separator, and behind one more is another document.
    end = ends & -ends
    missed = (missed | beyond) & -(missed | beyond)
    # All places behind the first separator.
    missed_later = (missed_later | ends | (beyond << 1)) & -(end << 1)
    goes_on = (end != 0) & ((end.to(tl.uint32, bitcast=True) < missed.to(tl.uint32, bitcast=True)) | (end == missed))
    return tl.where(goes_on, tl.minimum(first_bit(missed_later) - 1, limit), first_bit(missed))


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
    age = tl.where(some, recency(words, of_segment(nth, size0, end1, 0, 1, 2), position), (0 - lane) + _NEVER)
    following = tl.load(arena + place, mask=some, other=-1)
    matched = tl.where(some, kept + _further(arena + place - kept - 1, position, some, end - kept - 1, text_tokens, kept), 0)
    rank = in_order(age)
    tl.store(places + rank, place)
    tl.store(work + _HELD_MATCHED + rank, matched)
    top = level_of(tl.max(tl.where(following >= 0, matched, 0), axis=0))
    top = tl.where((top >= 0) & (length_of(top) >= kept), top, level_of(kept - 1))
    if (top >= 0) & (length_of(top - _TOP + 1) < kept):
        # All loads, before what counts them.
        x0, age0, size0 = _samples(arena, words, loci, length_of(top), length_of(top) < kept)
        x1, age1, size1 = _samples(arena, words, loci, length_of(top - 1), (top >= 1) & (length_of(top - 1) < kept))
        x2, age2, size2 = _samples(arena, words, loci, length_of(top - 2), (top >= 2) & (length_of(top - 2) < kept))
        x3, age3, size3 = _samples(arena, words, loci, length_of(top - 3), (top >= 3) & (length_of(top - 3) < kept))
        _leave_samples(work, 0, x0, age0, size0)
        _leave_samples(work, 1, x1, age1, size1)
        _leave_samples(work, 2, x2, age2, size2)
        _leave_samples(work, 3, x3, age3, size3)
    return kept, top, tl.maximum(count.to(tl.float32) / _HELD, 1.0)
