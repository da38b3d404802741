"""Earlier occurrences of a row's tail in the row itself, in one pass that is close to a plain read.

Blocks of 64 tokens without the row's last token are skipped after a vectorised comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftd.drafter.ops.kernel import kernel

_BLOCK = 64
_PART = 16


@kernel(inline="always")
def _block_holds(block: Any, token: int) -> bool:
    """Some of the _BLOCK elements is `token`. The constant size makes it a few vector instructions."""
    equal = np.int32(0)
    for i in range(_BLOCK):
        equal |= np.int32(block[i] == token)
    return equal != 0


@kernel(inline="always")
def _part_holds(part: Any, token: int) -> bool:
    """Some of the _PART elements is `token`."""
    equal = np.int32(0)
    for i in range(_PART):
        equal |= np.int32(part[i] == token)
    return equal != 0


@kernel
def matches(row: Any, n: int, longest: int, ends: Any, lengths: Any) -> int:
    """Finds every earlier occurrence of row[n - 1] and how far it matches backwards.

    Args:
        row: int32 [>= n]; the request's tokens.
        longest: Longest match, in tokens.
        ends: int32 [>= n]; out, end positions in rising order.
        lengths: int32 [>= n]; out, matching tokens from there back, in [1, longest].

    Returns:
        How many there are.
    """
    found = 0
    last = row[n - 1]
    stop = n - 1
    start = 0
    while start < stop:
        end = min(start + _BLOCK, stop)
        if end - start == _BLOCK and not _block_holds(row[start:end], last):
            start = end
            continue
        # Most of a block with a hit can be skipped too.
        for part in range(start, end, _PART):
            part_end = min(part + _PART, end)
            if part_end - part == _PART and not _part_holds(row[part:part_end], last):
                continue
            for i in range(part, part_end):
                if row[i] == last:
                    length = 1
                    limit = min(longest, i + 1)
                    while length < limit and row[i - length] == row[n - 1 - length]:
                        length += 1
                    ends[found] = i
                    lengths[found] = length
                    found += 1
        start = end
    return found
