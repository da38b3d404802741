"""Binary search in a suffix array. A first-token table narrows the start where a segment has one.

All indices come from arrays that may change under a reader; they stay inside the arrays whatever is read, so that a torn read gives a
wrong answer (which the reader detects) and never a fault.
"""

from __future__ import annotations

from typing import Any

from draftd.drafter.ops.kernel import kernel


@kernel(inline="always")
def _compare(text: Any, position: int, row: Any, start: int, length: int) -> int:
    """-1, 0 or 1 as the suffix at `position` is below, begins with, or is above row[start : start + length]."""
    for j in range(length):
        x, y = text[position + j], row[start + j]
        if x != y:
            return -1 if x < y else 1
    return 0


@kernel
def locus(text: Any, suffix_array: Any, low: int, high: int, row: Any, start: int, length: int) -> tuple[int, int]:
    """The part of [low, high) whose suffixes begin with row[start : start + length]; empty (x, x) if there is none.

    Args:
        text: int32 [t]; tokens and separators.
        suffix_array: int32 [>= high]; sorted positions.
        row: int32 [n]; the request's tokens.
    """
    end = high
    while low < high:
        middle = (low + high) >> 1
        if _compare(text, suffix_array[middle], row, start, length) < 0:
            low = middle + 1
        else:
            high = middle
    first = low
    if first >= end or _compare(text, suffix_array[first], row, start, length) != 0:
        return first, first
    # Most intervals are small: gallop to the end instead of starting from the middle of all that is left.
    step = 1
    while first + step < end and _compare(text, suffix_array[first + step], row, start, length) == 0:
        step *= 2
    low, high = first + step // 2, min(first + step, end)
    while low < high:
        middle = (low + high) >> 1
        if _compare(text, suffix_array[middle], row, start, length) == 0:
            low = middle + 1
        else:
            high = middle
    return first, low


@kernel
def child(text: Any, suffix_array: Any, low: int, high: int, offset: int, token: int) -> tuple[int, int]:
    """The part of a locus whose suffixes continue with `token` after `offset` tokens; empty (x, x) if there is none."""
    if high - low <= 8:
        while low < high and text[suffix_array[low] + offset] < token:
            low += 1
        last = low
        while last < high and text[suffix_array[last] + offset] == token:
            last += 1
        return low, last
    end = high
    while low < high:
        middle = (low + high) >> 1
        if text[suffix_array[middle] + offset] < token:
            low = middle + 1
        else:
            high = middle
    return low, run_end(text, suffix_array, low, end, offset, token)


@kernel
def run_end(text: Any, suffix_array: Any, first: int, end: int, offset: int, token: int) -> int:
    """Where the run of suffixes that continue with `token` after `offset` tokens ends, from `first` on."""
    step = 1
    if first >= end or text[suffix_array[first] + offset] != token:
        return first
    while first + step < end and text[suffix_array[first + step] + offset] == token:
        step *= 2
    low, high = first + step // 2, min(first + step, end)
    while low < high:
        middle = (low + high) >> 1
        if text[suffix_array[middle] + offset] == token:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def run_start(text: Any, suffix_array: Any, begin: int, inside: int, offset: int, token: int) -> int:
    """Where the run that holds index `inside` starts, at `begin` or later."""
    step = 1
    while inside - step >= begin and text[suffix_array[inside - step] + offset] == token:
        step *= 2
    low, high = max(begin, inside - step), inside - step // 2
    while low < high:
        middle = (low + high) >> 1
        if text[suffix_array[middle] + offset] < token:
            low = middle + 1
        else:
            high = middle
    return low
