"""What became of each draft, read from the tokens that the engine committed after it.

A draft is settled when its row is drafted for again, or ends; so an engine may commit a step's tokens in one call or in several. Where
tokens may come that nobody asked for, since the engine did not know yet that the request had ended, a draft counts one draft later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftd.client.rows import RowTable
from draftd.drafter.drafts import SOURCE_CORPUS, SOURCE_GROUP, SOURCE_LOCAL, Drafts, accepted_of, chains
from draftd.drafter.lessons import Lesson
from draftd.drafter.stats import EngineStats

_COUNTED = frozenset((SOURCE_LOCAL, SOURCE_CORPUS, SOURCE_GROUP))


class PendingDrafts:
    """The last draft of every row, until it is settled.

    Args:
        k: Most tokens of a draft.
        late: Count each draft when the next one of its row is settled, or the row ends.
    """

    def __init__(self, table: RowTable, stats: EngineStats, k: int, *, late: bool = False) -> None:
        self._table = table
        self._stats = stats
        self._tokens = np.full((table.max_rows, k), -1, np.int32)
        self._counts = np.zeros(table.max_rows, np.int32)
        self._sources = np.zeros(table.max_rows, np.int32)
        self._at = np.zeros(table.max_rows, np.int64)
        self._parents: NDArray[np.int32] | None = None
        self._lessons: list[tuple[Lesson, int] | None] = [None] * table.max_rows
        self._positions = np.arange(k)
        self._late = late
        # Of each row: source, tokens drafted and accepted, and where the draft began; -1: nothing waits to be counted.
        self._uncounted = np.full((table.max_rows, 4), -1, np.int64)

    def remember(self, rows: NDArray[np.int64], drafts: Drafts) -> None:
        """Notes the drafts of `rows`, int64 [n]."""
        self._tokens[rows] = drafts.tokens
        if drafts.parents is not None or self._parents is not None:
            if self._parents is None:
                self._parents = chains(self._table.max_rows, len(self._positions))
            self._parents[rows] = chains(len(rows), len(self._positions)) if drafts.parents is None else drafts.parents
        self._counts[rows] = drafts.counts
        self._sources[rows] = drafts.source
        self._at[rows] = self._table.lengths[rows]
        for lessons in drafts.lessons:
            for row, place in zip(rows[lessons.rows].tolist(), lessons.places.tolist(), strict=True):
                self._lessons[row] = (lessons.lesson, place)

    def settle(self, rows: NDArray[np.int64]) -> None:
        """Counts the last drafts of `rows`, int64 [n], and forgets them; a draft after which nothing was committed does not count."""
        table = self._table
        self._learn(rows)
        rows = rows[(self._counts[rows] > 0) & (table.lengths[rows] > self._at[rows])]
        if not len(rows):
            return
        at = self._at[rows, None] + self._positions
        committed = table.tokens[rows[:, None], np.minimum(at, table.max_length - 1)]
        counts = self._counts[rows]
        right = (committed == self._tokens[rows]) & (at < table.lengths[rows, None]) & (self._positions < counts[:, None])
        lengths = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        if self._parents is not None:
            for i, row in enumerate(rows.tolist()):
                truth = table.tokens[row, self._at[row] : min(table.lengths[row], self._at[row] + counts[i])]
                drafted = self._tokens[row, : counts[i]].tolist()
                lengths[i] = accepted_of(drafted, self._parents[row, : counts[i]].tolist(), truth.tolist())
        settled = np.stack([self._sources[rows], counts, lengths, self._at[rows]], axis=1)
        if self._late:
            before = self._uncounted[rows]
            self._uncounted[rows] = settled
            settled = before[before[:, 0] >= 0]
        self._count(settled)
        self._counts[rows] = 0

    def _count(self, settled: NDArray[np.int64]) -> None:
        """Counts drafts, int64 [n, 4]; see `_uncounted`."""
        k = len(self._positions)
        for source in _COUNTED.intersection(settled[:, 0].tolist()):
            _, drafted, accepted, _ = settled[settled[:, 0] == source].T
            self._stats.drafted[source, :k] += (self._positions < drafted[:, None]).sum(axis=0)
            self._stats.accepted[source, :k] += (self._positions < accepted[:, None]).sum(axis=0)
            self._stats.acceptance_length[source, : k + 1] += np.bincount(accepted, minlength=k + 1)

    def _learn(self, rows: NDArray[np.int64]) -> None:
        """Learns from what was committed after the last drafts of `rows`, int64 [n], also from those that drafted nothing."""
        table = self._table
        by_lesson: dict[Lesson, tuple[list[int], list[int]]] = {}
        for row in rows.tolist():
            pending = self._lessons[row]
            if pending is not None and table.lengths[row] > self._at[row]:
                self._lessons[row] = None
                of_rows, places = by_lesson.setdefault(pending[0], ([], []))
                of_rows.append(row)
                places.append(pending[1])
        for lesson, (of_rows, places) in by_lesson.items():
            after = np.array(of_rows)
            at = self._at[after]
            most = lesson.ints.shape[1]
            truth = table.tokens[after[:, None], np.minimum(at[:, None] + np.arange(most), table.max_length - 1)]
            lesson.learn(np.array(places), truth, np.minimum(table.lengths[after] - at, most))

    def end(self, row: int, length: int | None = None) -> None:
        """Settles a row's draft and forgets it, as the row ends with `length` tokens, int, or with all that it has.

        A draft that began at its end or past it does not count where that is not known too late.
        """
        rows = np.array([row])
        if length is not None and self._at[row] >= length:
            self._counts[row] = 0
        self.settle(rows)
        if length is None or self._uncounted[row, 3] < length:
            self._count(self._uncounted[rows])
        self._uncounted[row] = -1
        self._counts[row] = 0
        self._lessons[row] = None
