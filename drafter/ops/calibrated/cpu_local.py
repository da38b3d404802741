"""What followed the tail of a text before in the text itself: a request's tokens and its draft so far, in one pass.

Blocks of 64 tokens without the text's last token are skipped after a vectorised comparison.
"""

from __future__ import annotations

from typing import Any

from draftd.drafter.ops.calibrated.cpu_tally import LEVEL_OF, add, clear, close
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.ops.local.cpu import block_holds, part_holds
from draftd.drafter.policy import REACH, TOP_LEVELS

_BLOCK = 64
_PART = 16


@kernel
def count_own(row: Any, n: int, tail: Any, end: int, drafted: int, tally: Any, statistics: Any) -> int:
    """Fills the statistics of the request's own tokens, of the longest TOP_LEVELS levels.

    Args:
        row: int32 [>= n]; the request's tokens.
        tail: int32 [>= end]; the last tokens of the row, min(n, REACH) of them, and `drafted` tokens after them, up to `end`.
        tally: A Tally for n + drafted followers.
        statistics: int64 [LEVELS, COLUMNS]; out.

    Returns:
        The longest level that occurred, -1 if none did.
    """
    clear(tally)
    highest = -1
    last = tail[end - 1]
    begin = end - drafted
    # The text's own end is not an occurrence: there is nothing after it.
    stop = n if drafted > 0 else n - 1
    start = 0
    while start < stop:
        upto = min(start + _BLOCK, stop)
        if upto - start == _BLOCK and not block_holds(row[start:upto], last):
            start = upto
            continue
        for part in range(start, upto, _PART):
            part_end = min(part + _PART, upto)
            if part_end - part == _PART and not part_holds(row[part:part_end], last):
                continue
            for i in range(part, part_end):
                if row[i] == last:
                    length = 1
                    limit = min(REACH, i + 1, end)
                    while length < limit and row[i - length] == tail[end - 1 - length]:
                        length += 1
                    level = LEVEL_OF[length]
                    highest = max(highest, level)
                    add(tally, row[i + 1] if i + 1 < n else tail[begin], level, i)
        start = upto
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
