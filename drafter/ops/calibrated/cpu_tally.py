"""Counting followers by level: which tokens followed a suffix of each length, how often, and which came last."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from draftd.drafter.ops.kernel import kernel
from draftd.drafter.policy import LENGTHS, LEVELS, REACH

SEEN, MOST, MOST_COUNT, LATEST, LATEST_COUNT, DISTINCT = range(6)
"""Columns of the statistics of a level: occurrences, the most frequent follower, its count, the latest one, its count, distinct ones."""
COLUMNS = 6
LEVEL_OF = np.array([0, *(sum(at <= length for at in LENGTHS) - 1 for length in range(1, REACH + 1))], np.int64)
"""The level of a match of so many tokens."""


class Tally(NamedTuple):
    """Followers that were seen; what it held before is forgotten by clear().

    Attributes:
        tokens: int32 [m]; distinct followers.
        counts: int32 [m, LEVELS]; how often each followed, by the level of the match; after close() by this level or a longer one.
        latest: int64 [m, LEVELS]; the most recent of those occurrences, comparable numbers from 0 on; -1 if there is none.
        slots: int64 [power of two, 2]; hash table of the time of a slot's filling and the place of its token.
        meta: int64 [2]; distinct followers, time of the last clear().
    """

    tokens: Any
    counts: Any
    latest: Any
    slots: Any
    meta: Any


@kernel
def make_tally(followers: int) -> Any:
    """A Tally for at most that many distinct followers."""
    size = 64
    while size < 2 * followers:
        size *= 2
    return Tally(
        np.empty(followers, np.int32),
        np.empty((followers, LEVELS), np.int32),
        np.empty((followers, LEVELS), np.int64),
        np.zeros((size, 2), np.int64),
        np.zeros(2, np.int64),
    )


@kernel
def clear(tally: Any) -> None:
    """Forgets all followers."""
    tally.meta[0] = 0
    tally.meta[1] += 1


@kernel
def place_of(tally: Any, token: int) -> Any:
    """Where a follower is; -1 - slot of the hash table where it is not yet."""
    mask = len(tally.slots) - 1
    slot = ((token * np.int64(2654435761)) >> 7) & mask
    now = tally.meta[1]
    while tally.slots[slot, 0] == now:
        place = tally.slots[slot, 1]
        if tally.tokens[place] == token:
            return place
        slot = (slot + 1) & mask
    return -1 - slot


@kernel
def add(tally: Any, token: int, level: int, when: int) -> None:
    """Notes that `token` followed an occurrence that matches up to `level`; `when` says how recent that is."""
    place = place_of(tally, token)
    if place < 0:
        slot = -1 - place
        place = tally.meta[0]
        tally.meta[0] = place + 1
        tally.slots[slot, 0] = tally.meta[1]
        tally.slots[slot, 1] = place
        tally.tokens[place] = token
        for other in range(LEVELS):
            tally.counts[place, other] = 0
            tally.latest[place, other] = -1
    tally.counts[place, level] += 1
    if when > tally.latest[place, level]:
        tally.latest[place, level] = when


@kernel
def close(tally: Any, lowest: int, highest: int, statistics: Any) -> None:
    """Sums counts over longer matches, and fills statistics[lowest : highest + 1]; int64 [LEVELS, COLUMNS].

    Of followers of the same count the one that came last is the most frequent one.
    """
    size = tally.meta[0]
    counts, latest = tally.counts, tally.latest
    for level in range(highest, lowest - 1, -1):
        seen, distinct = np.int64(0), np.int64(0)
        most, newest = -1, -1
        for place in range(size):
            if level < highest:
                counts[place, level] += counts[place, level + 1]
                latest[place, level] = max(latest[place, level], latest[place, level + 1])
            count = counts[place, level]
            if count == 0:
                continue
            seen += count
            distinct += 1
            if newest < 0 or latest[place, level] > latest[newest, level]:
                newest = place
            if most < 0 or count > counts[most, level] or (count == counts[most, level] and latest[place, level] > latest[most, level]):
                most = place
        statistics[level, SEEN] = seen
        if seen > 0:
            statistics[level, MOST] = tally.tokens[most]
            statistics[level, MOST_COUNT] = counts[most, level]
            statistics[level, LATEST] = tally.tokens[newest]
            statistics[level, LATEST_COUNT] = counts[newest, level]
            statistics[level, DISTINCT] = distinct


@kernel
def count_at(tally: Any, token: int, level: int) -> Any:
    """How often `token` followed at a level that was closed."""
    place = place_of(tally, token)
    return np.int64(tally.counts[place, level]) if place >= 0 else np.int64(0)
