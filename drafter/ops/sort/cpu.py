"""Sorting suffixes to a bounded depth: three tokens make one 63-bit key, runs of equal keys are sorted by the next three.

The keys go through numpy's sort, which is vectorised; only runs of equal keys are touched again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.ops.kernel import kernel


@kernel
def _keys(text: Any, positions: Any, offset: int, depth: int, keys: Any) -> None:
    for i in range(len(positions)):
        p = positions[i] + offset
        key = np.int64(0)
        for j in range(3):
            token = text[p + j] if offset + j < depth else np.int32(-1)
            if token < 0:
                key <<= 21 * (3 - j)
                break
            key = (key << 21) | (np.int64(token) + 1)
        keys[i] = key


@kernel
def _refine(text: Any, order: Any, keys: Any, depth: int) -> None:
    """Sorts each run of equal keys by the rest of the suffix, then by position. `keys` is destroyed."""
    stack = [(0, len(order), 0)]
    while len(stack) > 0:
        first, last, offset = stack.pop()
        i = first
        while i < last:
            j = i + 1
            key = keys[i]
            while j < last and keys[j] == key:
                j += 1
            if j - i > 1:
                run = order[i:j]
                if key & 0x1FFFFF == 0 or offset + 3 >= depth:
                    run.sort()
                else:
                    sub = keys[i:j]
                    _keys(text, run, offset + 3, depth, sub)
                    same = True
                    for q in range(1, len(sub)):
                        if sub[q] != sub[0]:
                            same = False
                            break
                    if not same:
                        permutation = np.argsort(sub)
                        run[:] = run.copy()[permutation]
                        sub[:] = sub.copy()[permutation]
                    stack.append((i, j, offset + 3))
            i = j


def sort_suffixes(text: NDArray[np.int32], positions: NDArray[np.int32], depth: int) -> NDArray[np.int32]:
    """Positions in the order of their suffixes.

    Args:
        text: int32 [t]; tokens and separators (-1), with at least `depth` more elements after the last position.
        positions: int32 [m]; where the suffixes start.
        depth: Tokens of a suffix that count.

    Returns:
        int32 [m]; equal suffixes in the order of their positions.
    """
    keys = np.empty(len(positions), np.int64)
    _keys(text, positions, 0, depth, keys)
    permutation = np.argsort(keys)
    order = np.ascontiguousarray(positions[permutation], np.int32)
    _refine(text, order, keys[permutation], depth)
    return order
