"""Carries rows from the GPU to the service: reads the ring that kernels fill, and tells the engine's Drafter of what is in it.

It runs in the helper process. If that falls behind by more than the ring holds, the documents of the rows concerned are ended where they
are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from draftd.client.drafter import Drafter
from draftd.drafter.drafts import Drafts, RowLessons
from draftd.drafter.lessons import Learned, Lesson
from draftd.drafter.ops.calibrated.cpu_mixer import EVIDENCE_FLOATS, EVIDENCE_INTS
from draftd.drafter.ops.collect.ring import GENERATIONS, NEW_TOKENS, RECORD_HEAD, RING, SAMPLES, Ring

_FINISH_S = 0.25
"""How long a request's last tokens may be under way when it has ended."""
_AHEAD_S = 1.0
"""How long the ring may be ahead of what was told of a row, which travels another way."""


class Carrier:
    """What reads the ring.

    Args:
        drafter: Is told of tokens and drafts.
        ring: Where launches write.
        overruns: int64 [1]; counts launches that were overwritten before they were read.
        newest: int64 [rows]; the generation of each row's request now. What the ring holds of them already is not read.
        learned_of: Says where what a row's drafts teach goes; used where the ring carries samples.

    Attributes:
        carries: The engine launches at all; else a request has no last tokens to wait for.
    """

    def __init__(
        self, drafter: Drafter, ring: Ring, overruns: NDArray[np.int64], newest: NDArray[np.int64],
        learned_of: Callable[[int], Learned | None],
    ) -> None:  # fmt: skip
        self._drafter, self._ring, self._overruns = drafter, ring, overruns
        self._learned_of = learned_of
        self.carries = False
        self._k = ring.shape.k
        self._read = int(ring.done[:, 0].max())
        rows = len(newest)
        # Of the requests that the drafter knows, and of those that the rows hold.
        self._generations = np.full(rows, -1, np.int64)
        self._newest = newest.astype(np.int64) & GENERATIONS
        self._held = np.full(rows, -1, np.int64)
        self._ending: dict[int, tuple[int | None, bool, float]] = {}
        self._waiting: dict[int, tuple[Callable[[], None], int]] = {}
        self._ahead_since: float | None = None

    @property
    def launches(self) -> int:
        """Launches that were read."""
        return self._read

    @property
    def awaits(self) -> bool:
        """Requests that have ended wait for their last tokens."""
        return bool(self._ending)

    def begin(self, row: int, generation: int, length: int, start: Callable[[], None]) -> None:
        """A request of `length` tokens has come into a row, as the row's `generation`.

        Args:
            start: Tells the drafter of it; called when the last tokens of the row's request before have come, or now.
        """
        self.settle(row)
        self._newest[row] = generation
        if row in self._ending:
            self._waiting[row] = (start, length)
        else:
            self._start(row, length, start)

    def end(self, row: int) -> None:
        """Nothing more of the row's request is told; one before it that waits for its last tokens is ended with those that came."""
        if row in self._ending:
            self._finish(row)
        self._held[row] = -1

    def settle(self, row: int) -> None:
        """The drafter is told of the row's request, if it was not yet; one before it is ended with the tokens that came."""
        if row in self._waiting:
            self._finish(row)

    def finish(self, row: int, length: int | None, discard: bool) -> None:
        """The row's request ends; with `length` tokens, if they are not all there yet, when they are."""
        self.settle(row)
        if not self.carries or self._held[row] < 0:
            self._ending[row] = (length, discard, 0.0)
            self._finish(row)
            return
        self._ending[row] = (length, discard, time.monotonic() + _FINISH_S)
        if length is not None and self._held[row] >= length:
            self._finish(row)

    def close(self) -> None:
        """Tells what is there, and ends what has ended."""
        self.drain()
        for row in list(self._ending):
            self._finish(row)

    def drain(self) -> None:
        """Tells what has come."""
        ring = self._ring
        while True:
            place = self._read % RING
            number = int(ring.done[place, 0])
            if number <= self._read:
                break
            batch = int(ring.done[place, 1])
            records = ring.records[place, :batch].copy()
            samples = ring.samples[place, :batch].copy() if ring.shape.teaching else None
            # The launch that writes this place next may have begun when the one before it was done.
            if int(ring.done[place, 0]) != self._read + 1 or int(ring.done[place - 1, 0]) >= self._read + RING:
                self._overrun()
                continue
            if self._is_ahead(records):
                break
            self._read += 1
            self._tell(records, samples)
        now = time.monotonic()
        for row in [row for row, (length, _, until) in self._ending.items() if until < now or self._is_whole(row, length)]:
            self._finish(row)

    def _is_ahead(self, records: NDArray[np.int32]) -> bool:
        """A row's request is one that was not told of yet. What is never told is waited for a moment only."""
        rows = records[:, 0]
        there = (rows >= 0) & (rows < len(self._newest))
        apart = (records[:, 1] - self._newest[np.where(there, rows, 0)]) & GENERATIONS
        ahead = there & (apart > 0) & (apart <= GENERATIONS // 2)
        if ahead.any():
            now = time.monotonic()
            self._ahead_since = self._ahead_since or now
            if now < self._ahead_since + _AHEAD_S:
                return True
            # Nobody tells of them any more; the next row that is ahead is waited for again.
            self._newest[rows[ahead]] = records[ahead, 1]
        self._ahead_since = None
        return False

    def _tell(self, records: NDArray[np.int32], samples: NDArray[np.int32] | None) -> None:
        rows, generations, before, new = records[:, :4].T.astype(np.int64)
        if self._waiting:
            for row, generation in zip(rows.tolist(), generations.tolist(), strict=True):
                if row in self._waiting and generation == int(self._newest[row]):
                    # Whatever came before it has been told.
                    self._finish(row)
        # A row that an engine names twice counts once.
        known = np.unique(rows, return_index=True)[1]
        known = np.sort(known[rows[known] >= 0])
        of = rows[known]
        known = known[(generations[known] == self._generations[of]) & (before[known] == self._held[of])]
        grown = known[new[known] > 0]
        if len(grown):
            self._drafter.append_rows(rows[grown], records[grown, RECORD_HEAD : RECORD_HEAD + NEW_TOKENS], new[grown])
            self._held[rows[grown]] += new[grown]
        if self._ending:
            known = np.array([i for i in known.tolist() if rows[i] not in self._ending], np.int64)
        if len(known):
            drafts = self._drafts(records[known])
            if samples is not None:
                drafts.lessons = self._lessons(rows, known.tolist(), drafts, samples)
            self._drafter.observe(rows[known], drafts)

    def _drafts(self, records: NDArray[np.int32]) -> Drafts:
        drafts = Drafts.empty(len(records), self._k)
        drafts.tokens[:] = records[:, RECORD_HEAD + NEW_TOKENS :][:, : self._k]
        for column, field in enumerate((drafts.counts, drafts.source, drafts.match_length, drafts.occurrences)):
            field[:] = records[:, 4 + column]
        return drafts

    def _lessons(self, rows: NDArray[np.int64], known: list[int], drafts: Drafts, samples: NDArray[np.int32]) -> list[RowLessons]:
        """Those of the launch that was read last, one of all rows that learn into the same; `known`: which rows the drafts are of."""
        batch, k = len(rows), self._k
        words = self._ring.shape.lesson_words[0]
        sampled: dict[Learned, list[tuple[int, int]]] = {}
        for nth in range(min(batch, SAMPLES)):
            row = (SAMPLES * (self._read - 1) + nth) % batch
            learned = self._learned_of(int(rows[row])) if row in known else None
            if learned is not None:
                sampled.setdefault(learned, []).append((nth, known.index(row)))
        found = []
        for learned, pairs in sampled.items():
            of, places = np.array(pairs).T
            # Contiguous, or the kernel would be compiled anew for how they lie in memory.
            probabilities, ints, floats = map(np.ascontiguousarray, np.split(samples[of], [k, k + words], axis=1))
            drafts.probabilities[places] = probabilities.view(np.float32)
            lesson = Lesson.of_chains(
                drafts.take(places),
                ints.reshape(-1, k + 1, EVIDENCE_INTS),
                floats.view(np.float32).reshape(-1, k + 1, EVIDENCE_FLOATS),
                learned,
            )
            found.append(RowLessons(places, np.arange(len(places)), lesson))
        return found

    def _is_whole(self, row: int, length: int | None) -> bool:
        return length is not None and int(self._held[row]) >= length

    def _finish(self, row: int) -> None:
        length, discard, _ = self._ending.pop(row)
        self._held[row] = -1
        self._drafter.finish(row, discard, length=length)
        if row in self._waiting:
            start, length_of_next = self._waiting.pop(row)
            self._start(row, length_of_next, start)

    def _start(self, row: int, length: int, start: Callable[[], None]) -> None:
        start()
        self._generations[row] = self._newest[row]
        self._held[row] = length

    def _overrun(self) -> None:
        """Goes on with the newer half of the ring; requests that miss tokens are ended with those that came."""
        newest = int(self._ring.done[:, 0].max())
        go_on = newest - RING // 2
        self._overruns[0] += go_on - self._read
        self._read = go_on
