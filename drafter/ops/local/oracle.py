"""Earlier occurrences of a row's tail in the row itself, plainly."""

from __future__ import annotations

from collections.abc import Sequence


def matches(row: Sequence[int], longest: int) -> dict[int, int]:
    """End position of each earlier occurrence of the row's last token -> tokens that match from there back, at most `longest`."""
    n = len(row)
    out: dict[int, int] = {}
    for end in range(n - 1):
        length = 0
        while length < longest and length <= end and row[end - length] == row[n - 1 - length]:
            length += 1
        if length:
            out[end] = length
    return out
