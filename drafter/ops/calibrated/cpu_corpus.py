"""What followed the tail of a text in the corpus: loci of its shortest suffixes, narrowed token by token, and the occurrences in them.

A lane is the locus of one suffix length, without occurrences that nothing follows. Lanes are kept up to the first with few occurrences;
from there on each occurrence says itself how far it matches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from draftd.drafter.ops.calibrated.cpu_tally import (
    COLUMNS,
    DISTINCT,
    LATEST,
    LATEST_COUNT,
    LEVEL_OF,
    MOST,
    MOST_COUNT,
    SEEN,
    add,
    clear,
    close,
)
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.ops.search.cpu import child, locus, run_end
from draftd.drafter.policy import FEW, LENGTHS, LEVELS, REACH, TOP_LEVELS

_SEGMENTS = 3
_LENGTHS = np.array(LENGTHS, np.int64)
LEAD_SAMPLES = 64
"""Occurrences of the last long lane that are looked at for what stands before their document."""
_CLEAR_LEAD = 3
"""Samples by which a follower must lead to be the most frequent one without counting the next."""


class Segments(NamedTuple):
    """An index's arrays, current copies; see draftd.drafter.layout. `depth`: to which suffixes are sorted, in tokens."""

    text: Any
    main: Any
    main_length: int
    buckets: Any
    shift: int
    recent: Any
    recent_length: int
    live_text: Any
    live: Any
    live_length: int
    ring_start: int
    ring: int
    depth: int


@kernel(inline="always")
def _words(index: Any, segment: int) -> Any:
    return index.live_text if segment == 2 else index.text


@kernel(inline="always")
def _array(index: Any, segment: int) -> Any:
    return index.main if segment == 0 else (index.recent if segment == 1 else index.live)


@kernel(inline="always")
def _recency(index: Any, segment: int, position: int) -> Any:
    """How recent an occurrence is, in numbers that compare over all segments."""
    if segment == 2:
        return position + (np.int64(2) << 40)
    age = position - index.ring_start
    if age < 0:
        age += index.ring
    return age + (np.int64(segment) << 40)


@kernel
def _size(lows: Any, highs: Any) -> int:
    """Occurrences of a lane."""
    return max(0, highs[0] - lows[0]) + max(0, highs[1] - lows[1]) + max(0, highs[2] - lows[2])


@kernel
def _nth(index: Any, lows: Any, highs: Any, at: int) -> tuple[int, Any]:
    """The segment and the position of a lane's occurrence number `at`, below its size."""
    segment = 0
    while at >= max(0, highs[segment] - lows[segment]):
        at -= max(0, highs[segment] - lows[segment])
        segment += 1
    return segment, np.int64(_array(index, segment)[lows[segment] + at])


@kernel
def _narrow(words: Any, array: Any, low: int, high: int, offset: int, token: int) -> tuple[int, int]:
    """The part of [low, high) that goes on with `token` after `offset` tokens."""
    if low >= high:
        return low, low
    first = words[array[low] + offset]
    last = words[array[high - 1] + offset]
    if first > token or last < token:
        return low, low
    if first == token and last == token:
        return low, high
    return child(words, array, low, high, offset, token)


@kernel
def _root(index: Any, segment: int, tail: Any, start: int, length: int) -> tuple[int, int]:
    """The locus of tail[start : start + length] in a segment."""
    if segment == 0:
        bucket = tail[start] >> index.shift
        if bucket < 0 or bucket + 1 >= len(index.buckets):
            return 0, 0
        low, high = index.buckets[bucket], min(index.buckets[bucket + 1], index.main_length)
        if length == 1 and index.shift == 0:
            return low, max(low, high)
        return locus(index.text, index.main, low, high, tail, start, length)
    if segment == 1:
        return locus(index.text, index.recent, 0, index.recent_length, tail, start, length)
    return locus(index.live_text, index.live, 0, index.live_length, tail, start, length)


@kernel
def find_lanes(index: Any, tail: Any, end: int, parent_kept: int, parent_lows: Any, parent_highs: Any, lows: Any, highs: Any) -> int:
    """Fills the lanes of a text's tail.

    Args:
        tail: int32 [>= end]; the last tokens of the text, up to `end`.
        parent_kept: Lanes of the text without its last token; -1 if they are not known.
        parent_lows, parent_highs: int64 [REACH + 1, 3]; those lanes, by length and segment.
        lows, highs: int64 [REACH + 1, 3]; out, from length 1 on.

    Returns:
        How many lanes there are. The last one has at most FEW occurrences, or is as long as lanes can be.
    """
    longest = min(end, REACH, index.depth - 1)
    for length in range(1, longest + 1):
        total = 0
        for segment in range(_SEGMENTS):
            words, array = _words(index, segment), _array(index, segment)
            if length == 1 or parent_kept < 0:
                low, high = _root(index, segment, tail, end - length, length)
            else:
                low, high = _narrow(
                    words, array, parent_lows[length - 1, segment], parent_highs[length - 1, segment], length - 1, tail[end - 1]
                )
            if low < high and words[array[low] + length] < 0:
                low = run_end(words, array, low, high, length, -1)
            lows[length, segment] = low
            highs[length, segment] = high
            total += max(0, high - low)
        if total <= FEW:
            return length
    return longest


@kernel
def count_in_lane(index: Any, lows: Any, highs: Any, length: int, token: int) -> int:
    """How many occurrences of a lane go on with `token`."""
    count = 0
    for segment in range(_SEGMENTS):
        low, high = _narrow(_words(index, segment), _array(index, segment), lows[segment], highs[segment], length, token)
        count += high - low
    return count


@kernel
def _latest(index: Any, lows: Any, highs: Any, length: int) -> int:
    """The follower of the most recent occurrence of a lane; of the most recent of FEW samples where a segment has more."""
    segment = 2 if lows[2] < highs[2] else (1 if lows[1] < highs[1] else 0)
    array = _array(index, segment)
    low, size = lows[segment], highs[segment] - lows[segment]
    best, position = np.int64(-1), np.int64(0)
    for i in range(min(size, FEW)):
        p = np.int64(array[low + (i if size <= FEW else (2 * i + 1) * size // (2 * FEW))])
        when = _recency(index, segment, p)
        if when > best:
            best, position = when, p
    return _words(index, segment)[position + length]


@kernel
def _sample(index: Any, lows: Any, highs: Any, length: int, size: int, statistics: Any) -> None:
    """Fills the statistics of a lane with many occurrences.

    Continuations are sorted, so evenly spaced samples show a follower's share to within one sample. Counts of those that matter are exact.
    """
    tokens = np.empty(FEW, np.int32)
    counts = np.zeros(FEW, np.int64)
    distinct = 0
    for i in range(FEW):
        segment, p = _nth(index, lows, highs, (2 * i + 1) * size // (2 * FEW))
        token = _words(index, segment)[p + length]
        j = distinct - 1
        while j >= 0 and tokens[j] != token:
            j -= 1
        if j < 0:
            j = distinct
            tokens[j] = token
            distinct += 1
        counts[j] += 1
    first, second = 0, -1
    for j in range(1, distinct):
        if counts[j] > counts[first]:
            first, second = j, first
        elif second < 0 or counts[j] > counts[second]:
            second = j
    most = tokens[first]
    count = count_in_lane(index, lows, highs, length, most)
    if second >= 0 and counts[first] < counts[second] + _CLEAR_LEAD:
        other = count_in_lane(index, lows, highs, length, tokens[second])
        if other > count:
            most, count = tokens[second], other
    latest = _latest(index, lows, highs, length)
    statistics[SEEN] = size
    statistics[MOST] = most
    statistics[MOST_COUNT] = count
    statistics[LATEST] = latest
    statistics[LATEST_COUNT] = count if latest == most else count_in_lane(index, lows, highs, length, latest)
    statistics[DISTINCT] = distinct


@kernel
def _matched(words: Any, position: int, tail: Any, end: int, length: int) -> int:
    """How many of the last tokens match an occurrence of `length` of them at `position`, those before it in its document included.

    What stands before a piece of a document is behind a separator, and behind one more is another document.
    """
    limit = min(end, REACH)
    at = position - 1
    crossed = False
    while length < limit and at >= 0:
        token = words[at]
        if token < 0 and not crossed:
            crossed = True
        elif token == tail[end - 1 - length]:
            length += 1
        else:
            break
        at -= 1
    return length


@kernel
def count_corpus(index: Any, tail: Any, end: int, kept: int, lows: Any, highs: Any, tally: Any, statistics: Any) -> tuple[int, int]:
    """Fills the statistics of the corpus, of the longest TOP_LEVELS levels.

    Args:
        tail: int32 [>= end]; the last tokens of the text, up to `end`.
        kept, lows, highs: Its lanes; see find_lanes.
        tally: A Tally for 2 * LEAD_SAMPLES followers.
        statistics: int64 [LEVELS, COLUMNS]; out.

    Returns:
        The longest level that occurred, -1 if none did, and the lowest level that the tally holds.
    """
    clear(tally)
    highest = -1
    lowest = LEVELS
    size = _size(lows[kept], highs[kept])
    if size <= FEW:
        # The lowest level whose length is not below the lane's.
        lowest = LEVEL_OF[kept] + (0 if _LENGTHS[LEVEL_OF[kept]] == kept else 1)
        for segment in range(_SEGMENTS):
            words, array = _words(index, segment), _array(index, segment)
            for i in range(lows[kept, segment], highs[kept, segment]):
                p = np.int64(array[i])
                level = LEVEL_OF[_matched(words, p, tail, end, kept)]
                if level < lowest:
                    continue
                highest = max(highest, level)
                add(tally, words[p + kept], level, _recency(index, segment, p))
        if size == 0 and kept > 1:
            # Longer matches can only begin before their document.
            before_lows, before_highs = lows[kept - 1], highs[kept - 1]
            size = _size(before_lows, before_highs)
            step = max(1, size // LEAD_SAMPLES)
            for at in range(step // 2, size, step):
                segment, p = _nth(index, before_lows, before_highs, at)
                words = _words(index, segment)
                if p > 0 and words[p - 1] < 0:
                    level = LEVEL_OF[_matched(words, p, tail, end, kept - 1)]
                    if level >= lowest:
                        highest = max(highest, level)
                        add(tally, words[p + kept - 1], level, _recency(index, segment, p))
        if highest >= 0:
            lowest = max(lowest, highest + 1 - TOP_LEVELS)
            close(tally, lowest, highest, statistics)
    level = min(lowest, LEVELS)
    while level > max(0, highest + 1 - TOP_LEVELS):
        level -= 1
        length = _LENGTHS[level]
        if length > kept:
            continue
        size = _size(lows[length], highs[length])
        if size == 0:
            continue
        highest = max(highest, level)
        if level + 1 <= highest and statistics[level + 1, SEEN] == size:
            for column in range(COLUMNS):
                statistics[level, column] = statistics[level + 1, column]
        else:
            _sample(index, lows[length], highs[length], length, size, statistics[level])
    return highest, lowest
