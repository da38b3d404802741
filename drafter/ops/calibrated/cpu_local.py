"""What followed the tail of a text before in texts that nothing indexes: the request's own tokens, and the outputs of its group.

One pass; blocks of 64 tokens without the text's last token are skipped after a vectorised comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from draftd.drafter.ops.calibrated.cpu_tally import LEVEL_OF, add, clear, close
from draftd.drafter.ops.intrinsics import int32_pointer
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.ops.local.cpu import block_holds, part_holds
from draftd.drafter.policy import GROUP_TOKENS, REACH, TOP_LEVELS

_BLOCK = 64
_PART = 16


@kernel(inline="always")
def _follow(text: Any, stop: int, after: int, tail: Any, end: int, when: int, tally: Any) -> int:
    """Notes what followed the tail in text[:stop], and answers the longest level that matches; -1 if none does.

    Args:
        text: int32 [n], n >= stop; `after` is what follows its last token.
        tail: int32 [>= end]; what is matched, up to `end`.
        when: How recent text[0] is; later ones are more so.
    """
    highest = -1
    last = tail[end - 1]
    start = 0
    while start < stop:
        upto = min(start + _BLOCK, stop)
        if upto - start == _BLOCK and not block_holds(text[start:upto], last):
            start = upto
            continue
        for part in range(start, upto, _PART):
            part_end = min(part + _PART, upto)
            if part_end - part == _PART and not part_holds(text[part:part_end], last):
                continue
            for i in range(part, part_end):
                if text[i] == last:
                    length = 1
                    limit = min(REACH, i + 1, end)
                    while length < limit and text[i - length] == tail[end - 1 - length]:
                        length += 1
                    level = LEVEL_OF[length]
                    highest = max(highest, level)
                    add(tally, text[i + 1] if i + 1 < len(text) else after, level, when + i)
        start = upto
    return highest


@kernel
def count_own(row: Any, n: int, tail: Any, end: int, drafted: int, tally: Any, statistics: Any) -> int:
    """Fills the statistics of the request's own tokens, of the longest TOP_LEVELS levels.

    Args:
        row: int32 [n]; the request's tokens.
        tail: int32 [>= end]; the last tokens of the row, min(n, REACH) of them, and `drafted` tokens after them, up to `end`.
        tally: A Tally for n + drafted followers.
        statistics: int64 [LEVELS, COLUMNS]; out.

    Returns:
        The longest level that occurred, -1 if none did.
    """
    clear(tally)
    last = tail[end - 1]
    begin = end - drafted
    # The text's own end is not an occurrence: there is nothing after it.
    highest = _follow(row, n if drafted > 0 else n - 1, tail[min(begin, end - 1)], tail, end, 0, tally)
    for i in range(begin, end - 1):
        if tail[i] == last:
            length = 1
            limit = min(REACH, i + 1)
            while length < limit and tail[i - length] == tail[end - 1 - length]:
                length += 1
            level = LEVEL_OF[length]
            highest = max(highest, level)
            add(tally, tail[i + 1], level, n + i - begin)
    close(tally, max(0, highest + 1 - TOP_LEVELS), highest, statistics)
    return highest


@kernel
def count_group(members: Any, place: Any, tail: Any, end: int, tally: Any, statistics: Any) -> int:
    """Fills the statistics of what the others of a row's group have generated, of the longest TOP_LEVELS levels.

    Args:
        members, place: As draft_calibrated has them; place: int64 [3], the row's.
        tail: int32 [>= end]; the last tokens of the text, up to `end`.
        tally: A Tally for group_tokens followers.
        statistics: int64 [LEVELS, COLUMNS]; out.

    Returns:
        The longest level that occurred, -1 if none did.
    """
    clear(tally)
    highest = -1
    left = GROUP_TOKENS
    member = place[1] - 1
    while member >= place[0] and left > 0:
        length = min(members[member, 1], left)
        if member != place[2] and length > 0:
            left -= length
            first = members[member, 0] + 4 * (members[member, 1] - length)
            output = carray(int32_pointer(first), (length,))
            highest = max(highest, _follow(output, length - 1, -1, tail, end, left, tally))
        member -= 1
    close(tally, max(0, highest + 1 - TOP_LEVELS), highest, statistics)
    return highest


@kernel
def group_tokens(members: Any, place: Any) -> Any:
    """Tokens that count_group reads for a row, at most; see there."""
    tokens = np.int64(0)
    for member in range(place[0], place[1]):
        if member != place[2]:
            tokens += members[member, 1]
    return min(tokens, np.int64(GROUP_TOKENS))
