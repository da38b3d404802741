"""Sorting suffixes to a bounded depth, plainly.

A suffix is the text from its position to its separator, at most `depth` tokens; equal suffixes keep the order of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence

SEPARATOR = -1


def suffix(text: Sequence[int], position: int, depth: int) -> list[int]:
    """The suffix at `position`, without its separator."""
    out: list[int] = []
    for token in text[position : position + depth]:
        if token == SEPARATOR:
            break
        out.append(int(token))
    return out


def sort_suffixes(text: Sequence[int], positions: Sequence[int], depth: int) -> list[int]:
    """`positions` in the order of their suffixes."""
    return sorted((int(p) for p in positions), key=lambda p: (suffix(text, p, depth), p))
