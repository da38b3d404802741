"""The locus of a pattern, plainly."""

from __future__ import annotations

from collections.abc import Sequence

from draftd.drafter.ops.sort.oracle import suffix


def locus(text: Sequence[int], suffix_array: Sequence[int], pattern: Sequence[int]) -> tuple[int, int]:
    """The interval [low, high) of `suffix_array` whose suffixes begin with `pattern`; empty where it would be inserted."""
    m = len(pattern)
    wanted = [int(t) for t in pattern]
    heads = [suffix(text, int(p), m) for p in suffix_array]
    low = sum(head < wanted for head in heads)
    return low, low + sum(head == wanted for head in heads)


def children(text: Sequence[int], suffix_array: Sequence[int], low: int, high: int, offset: int) -> dict[int, list[int]]:
    """Positions in the interval by the token that follows its first `offset` ones; suffixes that end there are left out."""
    out: dict[int, list[int]] = {}
    for p in suffix_array[low:high]:
        token = int(text[int(p) + offset])
        if token >= 0:
            out.setdefault(token, []).append(int(p))
    return out
