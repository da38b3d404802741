"""Carries rows from the GPU to the service: a ring in pinned host memory that a kernel fills and a thread empties.

The thread tells what it finds to the engine's Drafter, as an engine on the host does. If it falls behind by more than the ring holds, the
documents of the rows concerned are ended where they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.client.drafter import Drafter
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_calibrated import DeviceLessons
from draftd.drafter.drafts import Drafts, RowLessons
from draftd.drafter.lessons import Learned, Lesson
from draftd.drafter.ops.calibrated.cpu_mixer import EVIDENCE_FLOATS, EVIDENCE_INTS
from draftd.drafter.ops.collect.gpu import NEW_TOKENS, RECORD_HEAD, RING, SAMPLES, collect_rows

_PAUSE_S = 0.004
_GENERATIONS = 0x7FFFFFFF
_FINISH_S = 0.25
"""How long a request's last tokens may be under way when it has ended."""


class Carrier:
    """The ring, its kernel and its thread.

    Args:
        drafter: Is told of tokens and drafts, under `lock`.
        tokens, lengths: The engine's; see DeviceSession.
        max_batch: Most rows of a launch. k: tokens of a draft.
        learned_of: Says where what a row's drafts teach goes; None: lessons are not carried.

    Attributes:
        overruns: Launches that were overwritten before they were read.
    """

    def __init__(
        self, drafter: Drafter, lock: threading.RLock, tokens: torch.Tensor, lengths: torch.Tensor, max_batch: int, k: int,
        learned_of: Callable[[int], Learned | None] | None = None,
    ) -> None:  # fmt: skip
        self.overruns = 0
        self._drafter, self._lock = drafter, lock
        self._tokens, self._lengths = tokens, lengths
        self._k, self._width = k, 1 << (k - 1).bit_length()
        rows, device = tokens.shape[0], tokens.device
        self._max_batch = max_batch
        self._carried = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        self._counters = torch.zeros(2, dtype=torch.int64, device=device)
        shape = (RING, max_batch, RECORD_HEAD + NEW_TOKENS + self._width)
        self._records = torch.zeros(shape, dtype=torch.int32, pin_memory=tokens.is_cuda)
        self._done = torch.zeros((RING, 2), dtype=torch.int64, pin_memory=tokens.is_cuda)
        self._learned_of = learned_of
        self._lesson_words = ((k + 1) * EVIDENCE_INTS, (k + 1) * EVIDENCE_FLOATS)
        sample_shape = (RING, SAMPLES, k + sum(self._lesson_words)) if learned_of else (1, 1, 1)
        self._samples = torch.zeros(sample_shape, dtype=torch.int32, pin_memory=tokens.is_cuda)
        self._host_samples: NDArray[np.int32] = self._samples.numpy()
        self._host_records: NDArray[np.int32] = self._records.numpy()
        self._host_done: NDArray[np.int64] = self._done.numpy()
        self._read = 0
        # Of the requests that the drafter knows, and of those that the rows hold.
        self._generations = np.zeros(rows, np.int64)
        self._newest = np.zeros(rows, np.int64)
        self._held = np.full(rows, -1, np.int64)
        self._ending: dict[int, tuple[int | None, bool, float]] = {}
        self._waiting: dict[int, tuple[Callable[[], None], int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, row: int, length: int, start: Callable[[], None]) -> None:
        """A request of `length` tokens has come into a row, in the order of the current stream.

        Args:
            start: Tells the drafter of it; called when the last tokens of the row's request before have come, or now.
        """
        self.settle(row)
        self._newest[row] += 1
        if row in self._ending:
            self._waiting[row] = (start, length)
        else:
            self._start(row, length, start)
        words = torch.tensor([length, int(self._newest[row]) & _GENERATIONS], dtype=torch.int32)
        self._carried[row].copy_(words.pin_memory() if self._tokens.is_cuda else words, non_blocking=True)

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
        if self._thread is None or self._held[row] < 0:
            self._ending[row] = (length, discard, 0.0)
            self._finish(row)
            return
        self._ending[row] = (length, discard, time.monotonic() + _FINISH_S)
        if length is not None and self._held[row] >= length:
            self._finish(row)

    def launch(self, rows: torch.Tensor, drafts: DeviceDrafts, lessons: DeviceLessons | None = None) -> None:
        """Enqueues the kernel on the current stream; may be captured. Lessons are given if there is `learned_of`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="draftd-carrier", daemon=True)
            self._thread.start()
        tokens = self._tokens
        collect_rows[(rows.shape[0],)](
            tokens, tokens.stride(0), tokens.shape[0], tokens.shape[1], self._lengths, rows, self._carried,
            drafts.tokens, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences, self._k,
            self._counters, self._records, self._done, self._max_batch,
            *((drafts.probabilities.view(torch.int32), lessons.ints, self._lesson_words[0], lessons.floats.view(torch.int32))
              if lessons else (self._carried, self._carried, 0, self._carried)), self._lesson_words[1], self._samples,
            K=self._width, TEACHING=lessons is not None, num_warps=1,
        )  # fmt: skip

    def close(self) -> None:
        """Tells what is there, and ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with self._lock:
            for row in list(self._ending):
                self._finish(row)

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while True:
            place = self._read % RING
            number = int(self._host_done[place, 0])
            if number <= self._read:
                break
            batch = int(self._host_done[place, 1])
            records = self._host_records[place, :batch].copy()
            samples = self._host_samples[place, :batch].copy() if self._learned_of else None
            if int(self._host_done[place, 0]) != self._read + 1:
                self._overrun()
                continue
            self._read += 1
            with self._lock:
                self._tell(records, samples)
        now = time.monotonic()
        with self._lock:
            for row in [row for row, (length, _, until) in self._ending.items() if until < now or self._is_whole(row, length)]:
                self._finish(row)

    def _tell(self, records: NDArray[np.int32], samples: NDArray[np.int32] | None) -> None:
        rows, generations, before, new = records[:, :4].T.astype(np.int64)
        if self._waiting:
            for row, generation in zip(rows.tolist(), generations.tolist(), strict=True):
                if row in self._waiting and generation == int(self._newest[row]) & _GENERATIONS:
                    # Whatever came before it has been told.
                    self._finish(row)
        # A row that an engine names twice counts once.
        known = np.unique(rows, return_index=True)[1]
        known = np.sort(known[rows[known] >= 0])
        of = rows[known]
        known = known[(generations[known] == self._generations[of] & _GENERATIONS) & (before[known] == self._held[of])]
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
        assert self._learned_of is not None
        sampled: dict[Learned, list[tuple[int, int]]] = {}
        for nth in range(min(batch, SAMPLES)):
            row = (SAMPLES * (self._read - 1) + nth) % batch
            learned = self._learned_of(int(rows[row])) if row in known else None
            if learned is not None:
                sampled.setdefault(learned, []).append((nth, known.index(row)))
        found = []
        for learned, pairs in sampled.items():
            of, places = np.array(pairs).T
            probabilities, ints, floats = np.split(samples[of], [k, k + self._lesson_words[0]], axis=1)
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
        newest = int(self._host_done[:, 0].max())
        go_on = newest - RING // 2
        self.overruns += go_on - self._read
        self._read = go_on
