"""Keeping one namespace's index fresh: `live` anew at each refresh, `recent` by merging, `main` by a merge in the background.

Text enters the ring in pieces, once the suffixes in it can no longer change; what is not placed yet is sorted anew into `live`. A suffix
is in exactly one segment. One thread calls `refresh`; a merge into `main` runs on another, over copies that nobody else writes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.bulk import load
from draftd.drafter.documents import LEAD_TOKENS, Document, Documents, Piece
from draftd.drafter.index import MAIN, RECENT, IndexArrays, MainMerge, Version
from draftd.drafter.records import StoredDocument

SEPARATOR = -1
_MAX_STATS = 10_000
"""Refreshes that are remembered until somebody asks."""
_SEPARATOR_TEXT: NDArray[np.int32] = np.array([SEPARATOR], np.int32)
PLACE_OPEN_TOKENS = 512
"""An open document enters the ring in pieces of at least this many tokens: each costs `depth` tokens of overlap."""
PLACE_BATCH_TOKENS = 4096
"""Finished documents wait in `live` until there are this many tokens of them: each placement rewrites `recent`."""


class RefreshStat(NamedTuple):
    """One refresh: what kind, of which namespace, how long it took and how many tokens it sorted or merged."""

    kind: str
    namespace: str
    seconds: float
    tokens: int


class Span(NamedTuple):
    """A stretch of live text: where it starts, whose it is, and its position in the document."""

    start: int
    document: Document
    offset: int


@dataclass(slots=True)
class _Slice:
    """Text to place: tokens of a document from `offset` on, of which the first `indexed` positions become suffixes.

    `lead` is what stands before them: context of suffixes in the text, in which no suffix starts itself.
    """

    document: Document
    offset: int
    tokens: NDArray[np.int32]
    indexed: int
    lead: NDArray[np.int32]

    @property
    def size(self) -> int:
        """Elements of the ring that it takes: lead, separator, tokens, separator."""
        return len(self.lead) + len(self.tokens) + 2


@dataclass(slots=True)
class _Merge:
    """A merge into `main` that is running.

    Attributes:
        work: What the index merges; recent_start, recent_size: the stretch of the ring whose suffixes it takes from `recent`.
        recent_suffixes: How many those are.
        evicted: How many of the oldest pieces go.
        placed: Pieces that enter `main` directly.
    """

    work: MainMerge
    recent_start: int
    recent_size: int
    recent_suffixes: int
    evicted: int
    placed: list[Piece]
    length: int = 0
    seconds: float = 0.0


class Segments:
    """Refreshes one namespace's index.

    Args:
        name: The namespace.
        index: Its arrays; nobody else writes them.
        documents: Its documents; touched under `lock` only.
        lock: Held while documents are read or changed.
        executor: Where merges into `main` run.
    """

    def __init__(self, name: str, index: IndexArrays, documents: Documents, lock: Lock, executor: Executor) -> None:
        self.name = name
        self.index = index
        self.documents = documents
        self.stats: deque[RefreshStat] = deque(maxlen=_MAX_STATS)
        self.live_overflows = 0
        self.live_spans: dict[int, list[Span]] = {}
        self._lock = lock
        self._executor = executor
        self._merge: Future[_Merge] | None = None
        self._job: _Merge
        # The ring holds `_used` elements from the current version's ring_start on; what is in `recent` starts at `_recent_start`.
        self._unpublished: Version | None = None
        self._merging: set[str] = set()
        self._used = 0
        self._recent_start = 0
        self._evict_before = 0
        self._refreshed = 0
        self._max_piece = max(index.depth + 1, min(65_536, index.ring // 8))

    def load(self, newest_first: Iterable[StoredDocument], evict_before: int) -> None:
        """Fills an empty namespace with the newest documents that fit; see draftd.drafter.bulk.load."""
        self._used = load(self.index, self.documents, newest_first, self._max_piece)
        self._recent_start = self._head
        self._evict_before = evict_before

    @property
    def evict_before(self) -> int:
        """Documents of generations below this have been given up."""
        return self._evict_before

    # -- the refresh thread ------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Makes what was ingested so far visible if it fits, and answers whether anything changed."""
        if self._unpublished is not None:
            self._publish(self._unpublished)
        merged = self._finish_merge()
        with self._lock:
            if self.documents.changed == self._refreshed and not merged and not self._wants_eviction():
                return False
            self._give_up_old()
            self._give_up_surplus()
            slices = self._choose_slices()
        if slices and self._fits(slices):
            self._publish(*self._place(slices))
        else:
            if self._merge is None and (slices or self._wants_eviction()):
                self._start_merge(slices)
            self._publish(self.index.current)
        if slices and self._merge is None:
            # There may be more to place.
            self._refreshed = -1
        return True

    def _publish(self, version: Version, placed: Sequence[Piece] = (), evicted: int = 0) -> None:
        """Publishes `version` with `live` sorted anew: what was placed leaves it, what came since is taken along."""
        started = time.perf_counter()
        index = self.index
        with self._lock:
            for piece in placed:
                self.documents.place(piece)
            for _ in range(evicted):
                self.documents.evict(self.documents.pieces.popleft())
            self._refreshed = self.documents.changed
            # What was placed is in this version only: if it cannot be published now, it is the first thing to do next.
            self._unpublished = version
            text, positions, spans = self._live_text()
        published = index.publish(index.fill_live(version, text, positions))
        self._unpublished = None
        self.live_spans = {published.number: spans, **{n: s for n, s in self.live_spans.items() if n > published.number - 4}}
        self.stats.append(RefreshStat("live", self.name, time.perf_counter() - started, len(positions)))

    @property
    def settled(self) -> bool:
        """Everything ingested is in its place: no merge into `main` is running or due, and nothing waits for one."""
        return self._merge is None and not self._wants_eviction() and self._refreshed == self.documents.changed

    def evict_generations(self, before: int) -> int:
        """Has what is of a generation below `before` evicted, as far as it is oldest or not placed, and answers how many tokens that is.

        Call it under the lock; a later refresh does it. Documents that are still open go when they are committed.
        """
        self._evict_before = max(self._evict_before, before)
        return sum(p.indexed for p in self._oldest_pieces()) + sum(d.length - d.placed for d in self._old_waiting())

    def _waiting(self) -> Iterator[Document]:
        """Committed documents whose rest is not placed yet, in the order of placing."""
        return (d for d in self.documents.pending.values() if d.committed and d.id not in self._merging)

    def _old_waiting(self) -> Iterator[Document]:
        """Those of a generation that has gone."""
        return (d for d in self._waiting() if d.generation < self._evict_before)

    def _give_up_old(self) -> None:
        for document in list(self._old_waiting()):
            self.documents.give_up(document)

    def _give_up_surplus(self) -> None:
        """Gives up committed documents behind which a whole ring of others waits: placed now, they would be evicted for those.

        So what waits is bounded by the quota, however fast documents come.
        """
        behind = 0
        surplus: list[Document] = []
        for document in reversed(list(self._waiting())):
            if behind >= self.index.ring:
                surplus.append(document)
            behind += document.length - document.placed
        for document in reversed(surplus):
            self.documents.give_up(document)

    def _oldest_pieces(self) -> Iterator[Piece]:
        """The oldest pieces, as far as their generation has gone."""
        return takewhile(lambda p: p.document.generation < self._evict_before, self.documents.pieces)

    def _wants_eviction(self) -> bool:
        return next(self._oldest_pieces(), None) is not None

    def wait_merged(self) -> None:
        """Waits for a running merge."""
        if self._merge is not None:
            self._merge.exception()

    # -- what goes where -----------------------------------------------------------------------------------------------------

    def _choose_slices(self) -> list[_Slice]:
        """Slices whose suffixes can no longer change, when there are enough of them."""
        depth = self.index.depth
        finished = grown = waiting = 0
        for document in self.documents.pending.values():
            rest = document.length - document.placed
            waiting += len(document.lead) + rest + 2
            if document.committed:
                finished += rest
            elif rest - depth >= PLACE_OPEN_TOKENS:
                grown += rest - depth
        crowded = waiting > self.index.live_capacity // 2
        if not crowded and finished + grown < min(PLACE_BATCH_TOKENS, self.index.live_capacity // 4, self.index.ring // 8):
            return []
        slices: list[_Slice] = []
        budget = max(self.index.ring // 4, 2 * self._max_piece, self._max_piece + LEAD_TOKENS + 2)
        if self._merge is not None:
            budget = min(budget, self.index.recent_capacity // 2)
        for document in self.documents.pending.values():
            rest = document.length - document.placed
            if document.id in self._merging or (not document.committed and rest - depth < (1 if crowded else PLACE_OPEN_TOKENS)):
                continue
            offset = document.placed
            while offset < document.length:
                size = min(document.length - offset, self._max_piece)
                whole = document.committed and offset + size == document.length
                indexed = size if whole else size - depth
                if indexed <= 0:
                    break
                lead = document.lead_of(offset).copy()
                budget -= len(lead) + size + 2
                if budget < 0:
                    return slices
                slices.append(_Slice(document, offset, document.tokens(offset, offset + size).copy(), indexed, lead))
                offset += indexed
        return slices

    def _live_text(self) -> tuple[NDArray[np.int32], NDArray[np.int32], list[Span]]:
        """The text that is not placed, as _Slice lays it out; where its suffixes start; whose it is."""
        parts: list[NDArray[np.int32]] = []
        positions: list[NDArray[np.int32]] = []
        spans: list[Span] = []
        at = 0
        for document in self.documents.pending.values():
            rest = document.length - document.placed
            if rest == 0:
                continue
            start = at + len(document.lead) + 1
            if start + rest + 1 > self.index.live_capacity:
                self.live_overflows += 1
                continue
            parts += [document.lead, _SEPARATOR_TEXT, document.tokens(document.placed, document.length), _SEPARATOR_TEXT]
            positions.append(np.arange(start, start + rest, dtype=np.int32))
            spans.append(Span(start, document, document.placed))
            at = start + rest + 1
        if not parts:
            return _SEPARATOR_TEXT, np.empty(0, np.int32), spans
        return np.concatenate(parts), np.concatenate(positions), spans

    # -- the ring ------------------------------------------------------------------------------------------------------------

    @property
    def _head(self) -> int:
        return (self.index.current.ring_start + self._used) % self.index.ring

    def _ring_needed(self, slices: list[_Slice]) -> int:
        """Elements of the ring that the slices take from its head on, what is skipped at its end included."""
        head, taken = self._head, 0
        for piece in slices:
            size = piece.size
            skipped = self.index.ring - head if head + size > self.index.ring else 0
            taken += skipped + size
            head = (head + skipped + size) % self.index.ring
        return taken

    def _write(self, slices: list[_Slice]) -> list[Piece]:
        """Writes the slices at the ring's head. Nothing reads them before a version with their suffixes is published."""
        ring, used = self.index.ring, self._used
        starts: list[int] = []
        # Text of neighbours goes there in one piece.
        runs: list[tuple[int, list[NDArray[np.int32]]]] = []
        for piece in slices:
            size = piece.size
            head = (self.index.current.ring_start + used) % ring
            if head + size > ring:
                used += ring - head
                head = 0
            if not runs or head == 0:
                runs.append((head, []))
            runs[-1][1].extend((piece.lead, _SEPARATOR_TEXT, piece.tokens, _SEPARATOR_TEXT))
            starts.append(head + len(piece.lead) + 1)
            used += size
        for start, parts in runs:
            self.index.write_text(start, np.concatenate(parts))
        self._used = used
        with self._lock:
            placed = zip(slices, starts, strict=True)
            return [
                self.documents.reserve(s.document, s.offset, start, len(s.tokens) + 1, s.indexed, len(s.lead) + 1) for s, start in placed
            ]

    def _fits(self, slices: list[_Slice]) -> bool:
        """The slices fit the ring, and `recent` without a merge."""
        recent = self.index.recent_capacity if self._merge is not None else self.index.recent_capacity // 2
        indexed = sum(s.indexed for s in slices)
        return self.index.current.lengths[RECENT] + indexed <= recent and self._used + self._ring_needed(slices) <= self.index.ring

    def _place(self, slices: list[_Slice]) -> tuple[Version, list[Piece]]:
        """Merges the slices into the copy of `recent` that is not in force; the version that has them is not published yet."""
        started = time.perf_counter()
        used = self._used
        pieces = self._write(slices)
        new = _positions(pieces)
        try:
            version = self.index.add_recent(self.index.current, new)
        except BaseException:
            self._used = used
            with self._lock:
                self.documents.take_back(pieces)
            raise
        self.stats.append(RefreshStat("recent", self.name, time.perf_counter() - started, len(new)))
        return version, pieces

    # -- merging into main ---------------------------------------------------------------------------------------------------

    def _start_merge(self, slices: list[_Slice]) -> None:
        """Starts a merge that takes in `recent` and the slices, or makes room in the ring for them."""
        index = self.index
        evicted = sum(1 for _ in self._oldest_pieces())
        needed = self._ring_needed(slices)
        pieces = self.documents.pieces
        if self._used + needed > index.ring:
            # Make room first; the slices are placed once the old text is out of every version.
            slices = []
            wanted = min(index.ring, needed + index.ring // 8)
            while evicted < len(pieces) and index.ring - self._used + self._ring_distance(evicted) < wanted:
                evicted += 1
        current = index.current
        start = self._recent_start
        job = _Merge(
            MainMerge(
                recent=index.recent_copy(),
                placed=_positions([]),
                evict_start=current.ring_start,
                evict_size=self._ring_distance(evicted),
                evicted=sum(p.indexed for p in islice(pieces, evicted)),
            ),
            recent_start=start,
            recent_size=self._used - (start - current.ring_start) % index.ring if current.lengths[RECENT] else 0,
            recent_suffixes=current.lengths[RECENT],
            evicted=evicted,
            placed=[],
        )
        if slices:
            job.placed = self._write(slices)
            job.work.placed = _positions(job.placed)
            self._merging = {p.document.id for p in job.placed}
        self._recent_start = self._head
        self._job = job
        self._merge = self._executor.submit(self._run_merge, job)

    def _ring_distance(self, pieces: int) -> int:
        """Elements of the ring that the oldest pieces take."""
        if pieces == 0:
            return 0
        if pieces == len(self.documents.pieces):
            return self._used
        first = self.documents.pieces[pieces]
        return (first.start - first.lead - self.index.current.ring_start) % self.index.ring

    def _run_merge(self, job: _Merge) -> _Merge:
        started = time.perf_counter()
        job.length = self.index.merge_main(job.work)
        job.seconds = time.perf_counter() - started
        return job

    def _finish_merge(self) -> bool:
        """Publishes a merge that has ended, without what it took in from `recent`, and answers whether there was one."""
        if self._merge is None or not self._merge.done():
            return False
        try:
            job = self._merge.result()
        except BaseException:
            # What it takes in is in the ring already; it is tried again until it can be done.
            self._merge = self._executor.submit(self._run_merge, self._job)
            raise
        index, version = self.index, self.index.current
        kind = "full" if version.lengths[MAIN] == 0 else "merge"
        version = index.drop_recent(version, job.recent_start, job.recent_size, job.recent_suffixes)
        self._merge = None
        version = replace(
            version.with_segment(MAIN, job.length),
            ring_start=(version.ring_start + job.work.evict_size) % index.ring,
            evicted=version.evicted + job.work.evict_size,
        )
        self._used -= job.work.evict_size
        self._merging = set()
        self._publish(version, job.placed, job.evicted)
        self.stats.append(RefreshStat(kind, self.name, job.seconds, job.length))
        return True


def _positions(pieces: list[Piece]) -> NDArray[np.int32]:
    """int32 [m]; where the suffixes of the pieces start."""
    if not pieces:
        return np.empty(0, np.int32)
    return np.concatenate([np.arange(p.start, p.start + p.indexed, dtype=np.int32) for p in pieces])
