"""What the launches of a draft share: the words of a row's record, segments of a locus laid end to end, and the order of occurrences.

A row's record is the descriptor of the version that it is drafted from, followed by where its tokens are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import DD_RING, DD_RING_START, DD_SEGMENT_WORDS, DD_SEGMENTS, DS_SUFFIXES, DS_TEXT, LOCUS_LENGTHS

_RING_START = tl.constexpr(DD_RING_START)
_RING = tl.constexpr(DD_RING)
_SEGMENTS_START = tl.constexpr(DD_SEGMENTS)
_SEGMENT_WORDS = tl.constexpr(DD_SEGMENT_WORDS)
_SUFFIXES = tl.constexpr(DS_SUFFIXES)
_TEXT = tl.constexpr(DS_TEXT)
_LOCUS_WORDS = tl.constexpr(LOCUS_LENGTHS * 2)
_AGE_BITS = tl.constexpr(29)


@triton.jit
def _segment_of(words: tensor, locus: tensor, segment: tl.constexpr) -> tensor:
    suffixes = tl.load(words + _SEGMENTS_START + segment * _SEGMENT_WORDS + _SUFFIXES)
    low = tl.load(locus + segment * _LOCUS_WORDS)
    return suffixes + low, tl.load(locus + segment * _LOCUS_WORDS + 1) - low


@triton.jit
def locus_of(words: tensor, locus: tensor) -> tensor:
    """Of a locus in each segment: where its suffixes begin in the arena, three values, and how many they are, three more.

    Args:
        words: int64 pointer to the row's record; locus: int32 pointer to the first segment's, see match_rows.
    """
    first0, size0 = _segment_of(words, locus, 0)
    first1, size1 = _segment_of(words, locus, 1)
    first2, size2 = _segment_of(words, locus, 2)
    return first0, first1, first2, size0, size1, size2


@triton.jit
def text_at(words: tensor, segment: tl.constexpr) -> tensor:
    """Offset of a segment's text in the arena."""
    return tl.load(words + _SEGMENTS_START + segment * _SEGMENT_WORDS + _TEXT)


@triton.jit
def of_segment(i: tensor, end0: tensor, end1: tensor, value0: tensor, value1: tensor, value2: tensor) -> tensor:
    """The value of the segment that place i of a locus is in: main up to end0, recent up to end1, then live."""
    return tl.where(i < end0, value0, tl.where(i < end1, value1, value2))


@triton.jit
def recency(words: tensor, segment: tensor, position: tensor) -> tensor:
    """How recent an occurrence is; comparable over the segments of one index."""
    age = position - tl.load(words + _RING_START).to(tl.int32)
    age = tl.where(age < 0, age + tl.load(words + _RING).to(tl.int32), age)
    return (segment << _AGE_BITS) + tl.where(segment == 2, position, age)


@triton.jit
def floor_of(best_key: tensor, score: tensor, left: tensor, min_prob: tensor) -> tensor:
    """The survival probability that the next token must have if a chain with `left` more tokens is still to win; rounded down.

    Args:
        best_key: The row's best key so far, see draftd.drafter.ops.draft.gpu; score: the chain's.
    """
    best_score = (best_key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.maximum(min_prob, (best_score - score) / left.to(tl.float32) * 0.9999)
