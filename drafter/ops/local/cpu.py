"""A row against itself: where its tail occurred before, in one pass that is close to a plain read, and what followed there most often.

Blocks of 64 tokens without the row's last token are skipped after a vectorised comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftd.drafter.ops.kernel import kernel

_BLOCK = 64
_PART = 16
FEW_HITS = 24
"""Occurrences up to which next tokens are counted by comparing all with all."""


@kernel(inline="always")
def block_holds(block: Any, token: int) -> bool:
    """Some of the _BLOCK elements is `token`. The constant size makes it a few vector instructions."""
    equal = np.int32(0)
    for i in range(_BLOCK):
        equal |= np.int32(block[i] == token)
    return equal != 0


@kernel(inline="always")
def part_holds(part: Any, token: int) -> bool:
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
        if end - start == _BLOCK and not block_holds(row[start:end], last):
            start = end
            continue
        # Most of a block with a hit can be skipped too.
        for part in range(start, end, _PART):
            part_end = min(part + _PART, end)
            if part_end - part == _PART and not part_holds(row[part:part_end], last):
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


@kernel
def _majority(row: Any, n: int, ends: Any, size: int) -> tuple[Any, Any]:
    """The token that follows more than half of the occurrences ends[:size], and how many; (-1, 0) if there is none.

    Boyer and Moore's vote: what has a majority is what is left when unlike pairs are struck out.
    """
    token, votes = np.int64(-1), 0
    for i in range(size):
        at = ends[i] + 1
        if at < n:
            if votes == 0:
                token, votes = np.int64(row[at]), 1
            elif row[at] == token:
                votes += 1
            else:
                votes -= 1
    count = 0
    for i in range(size):
        at = ends[i] + 1
        if at < n and row[at] == token:
            count += 1
    return (token, count) if 2 * count > size else (np.int64(-1), 0)


@kernel
def local_chain(
    row: Any, n: int, ends: Any, size: int, cap: int, min_prob: Any, current: Any, table: Any, tokens: Any, probs: Any
) -> tuple[int, Any]:
    """Follows the most frequent continuation of the occurrences ends[:size]; the row's tail counts as one more that has none."""
    prob = np.float32(1.0)
    score = np.float32(0.0)
    total = size + 1
    drafted = 0
    for i in range(size):
        current[i] = ends[i]
    while drafted < cap and size > 0:
        if size == 1:
            # One continuation is left: its shares are 1 from the second token on.
            prob = prob * (np.float32(1) / np.float32(total))
            at = current[0] + 1
            while drafted < cap and at < n and prob >= min_prob:
                tokens[drafted] = row[at]
                probs[drafted] = prob
                score += prob
                drafted += 1
                at += 1
            break
        best, best_count, best_end = -1, 0, -1
        if size <= FEW_HITS:
            for i in range(size):
                at = current[i] + 1
                if at >= n:
                    continue
                token = row[at]
                count = 0
                latest = -1
                for q in range(size):
                    other = current[q] + 1
                    if other < n and row[other] == token:
                        count += 1
                        latest = max(latest, current[q])
                if count > best_count or (count == best_count and latest > best_end):
                    best, best_count, best_end = token, count, latest
        else:
            best, best_count = _majority(row, n, current, size)
        if size > FEW_HITS and best_count == 0:
            slots = 64
            while slots < 2 * size:
                slots *= 2
            for i in range(slots):
                table[i, 0] = -1
            for i in range(size):
                at = current[i] + 1
                if at >= n:
                    continue
                token = row[at]
                slot = (token * np.int64(2654435761)) & (slots - 1)
                while table[slot, 0] != -1 and table[slot, 0] != token:
                    slot = (slot + 1) & (slots - 1)
                if table[slot, 0] == -1:
                    table[slot, 0] = token
                    table[slot, 1] = 0
                    table[slot, 2] = -1
                table[slot, 1] += 1
                table[slot, 2] = max(table[slot, 2], current[i])
                count = table[slot, 1]
                if count > best_count or (count == best_count and table[slot, 2] > best_end):
                    best, best_count = token, count
                    best_end = table[slot, 2]
            for i in range(slots):
                if table[i, 0] != -1 and table[i, 1] == best_count and table[i, 2] > best_end:
                    best, best_end = table[i, 0], table[i, 2]
        if best_count == 0:
            break
        prob = prob * (np.float32(best_count) / np.float32(total))
        if prob < min_prob:
            break
        tokens[drafted] = best
        probs[drafted] = prob
        score += prob
        drafted += 1
        kept = 0
        for i in range(size):
            at = current[i] + 1
            if at < n and row[at] == best:
                current[kept] = at
                kept += 1
        size = kept
        total = kept
    return drafted, score


@kernel
def count_followers(row: Any, n: int, ends: Any, lengths: Any, found: int, chain: Any, size: int, longest: int, followers: Any) -> None:
    """Fills followers[L, j]: of the occurrences of the last L tokens, how many go on with chain[:j].

    Args:
        ends, lengths: int32 [found]; the occurrences and how far each matches.
        chain: int32 [size].
        followers: int64 [> longest, > size]; out.
    """
    followers[:] = 0
    for i in range(found):
        at, same = ends[i] + 1, 0
        while same < size and at + same < n and row[at + same] == chain[same]:
            same += 1
        followers[lengths[i], same] += 1
    for length in range(longest, 0, -1):
        for j in range(size - 1, -1, -1):
            followers[length, j] += followers[length, j + 1]
    for length in range(longest - 1, 0, -1):
        for j in range(size + 1):
            followers[length, j] += followers[length + 1, j]


@kernel
def known_chain(followers: Any, length: int, cap: int, min_prob: Any, size: int, probs: Any) -> tuple[Any, Any]:
    """What local_chain gives for the last `length` tokens if that is a beginning of a known chain; (-1, 0) if that is not certain.

    It is certain while each token of the chain follows more than half of the occurrences. A request that repeats itself has thousands
    of them for every length: they are counted once.
    """
    prob = np.float32(1.0)
    score = np.float32(0.0)
    for j in range(cap):
        if j == size:
            return -1, np.float32(0.0)
        count = followers[length, j + 1]
        total = followers[length, j]
        if 2 * count <= total:
            return -1, np.float32(0.0)
        prob = prob * (np.float32(count) / np.float32(total + 1 if j == 0 else total))
        if prob < min_prob:
            return j, score
        probs[j] = prob
        score += prob
    return cap, score
