"""Merging sorted suffixes into a suffix array: find the rank of each new one by search, then write everything in one streaming pass.

Documents are separate, so old suffixes keep their order; evicted ones are left out in the same pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.ops.kernel import kernel


@kernel
def compare(text: Any, a: int, b: int, depth: int) -> int:
    """-1, 0 or 1 as the suffix at `a` is below, equal to or above the one at `b`."""
    for j in range(depth):
        x, y = text[a + j], text[b + j]
        if x != y:
            return -1 if x < y else 1
        if x < 0:
            return 0
    return 0


@kernel
def _merge(text: Any, old: Any, new: Any, evict_start: int, evict_length: int, ring: int, depth: int, out: Any) -> int:
    n, m = len(old), len(new)
    written = 0
    at = 0
    for i in range(m + 1):
        rank = n
        if i < m:
            # The first old suffix above this new one; gallop from the last rank, since the new ones are sorted.
            low, step = at, 1
            p = new[i]
            while low + step <= n and compare(text, old[low + step - 1], p, depth) <= 0:
                low += step
                step *= 2
            high = min(n, low + step)
            while low < high:
                middle = (low + high) >> 1
                if compare(text, old[middle], p, depth) <= 0:
                    low = middle + 1
                else:
                    high = middle
            rank = low
        if evict_length == 0:
            out[written : written + rank - at] = old[at:rank]
            written += rank - at
        else:
            for q in range(at, rank):
                distance = old[q] - evict_start
                if distance < 0:
                    distance += ring
                if distance >= evict_length:
                    out[written] = old[q]
                    written += 1
        at = rank
        if i < m:
            out[written] = new[i]
            written += 1
    return written


def merge(
    text: NDArray[np.int32],
    old: NDArray[np.int32],
    new: NDArray[np.int32],
    out: NDArray[np.int32],
    *,
    depth: int,
    evict_start: int = 0,
    evict_length: int = 0,
    ring: int = 1,
) -> int:
    """Writes the merge of `old` and `new` to `out` and answers its length.

    Args:
        text: int32 [t]; tokens and separators (-1).
        old: int32 [n]; sorted positions. Those in the ring segment of `evict_length` tokens from `evict_start` are left out.
        new: int32 [m]; sorted positions, none of them evicted.
        out: int32 [>= what is kept]; must not overlap the inputs.
        depth: Tokens of a suffix that count.
        ring: Size of the ring of text, in tokens; positions are in [0, ring).
    """
    return int(_merge(text, old, new, evict_start, evict_length, ring, depth, out))


@kernel
def fill_buckets(text: Any, suffix_array: Any, shift: int, buckets: Any) -> None:
    """Fills buckets[b] with the first suffix whose first token is at least b << shift; the last one is the number of suffixes.

    Args:
        suffix_array: int32 [n]; sorted positions.
        buckets: int32 [buckets + 1]; out.
    """
    filled = 0
    for i in range(len(suffix_array)):
        bucket = text[suffix_array[i]] >> shift
        while filled <= bucket:
            buckets[filled] = i
            filled += 1
    while filled < len(buckets):
        buckets[filled] = len(suffix_array)
        filled += 1
