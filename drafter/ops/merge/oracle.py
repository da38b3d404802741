"""Merging two sorted lists of suffixes, plainly; on equal suffixes the older list goes first."""

from __future__ import annotations

from collections.abc import Sequence

from draftd.drafter.ops.sort.oracle import suffix


def merge(text: Sequence[int], old: Sequence[int], new: Sequence[int], evicted: set[int], depth: int) -> list[int]:
    """The suffixes of `old` that are not in `evicted`, and those of `new`, in one order."""
    tagged = [(suffix(text, int(p), depth), 0, i, int(p)) for i, p in enumerate(old) if int(p) not in evicted]
    tagged += [(suffix(text, int(p), depth), 1, i, int(p)) for i, p in enumerate(new)]
    return [p for *_, p in sorted(tagged)]
