"""One namespace's index driven by hand: no thread, merges run when the test says, and nothing is believed without the test's own copies.

`stretches` is the corpus as the oracle sees it; its text comes from what the test ingested, never from the index.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.documents import Document, Documents, Piece
from draftd.drafter.drafts import Drafts
from draftd.drafter.epochs import Epochs
from draftd.drafter.index import LIVE, MAIN, RECENT, Index, Version
from draftd.drafter.layout import CONTROL_WORDS, ROWS_HEADER_WORDS
from draftd.drafter.ops.draft import oracle
from draftd.drafter.ops.draft.oracle import Stretch
from draftd.drafter.ops.sort.oracle import sort_suffixes, suffix
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import MappedIndex
from draftd.drafter.segments import Segments


def ints(tokens: Sequence[int]) -> NDArray[np.int32]:
    """int32 [n]."""
    return np.array(tokens, np.int32).reshape(-1)


def assert_draft(drafts: Drafts, i: int, row: Sequence[int], corpus: Sequence[Stretch], params: DraftParams) -> None:
    """Row i's draft is the oracle's, to the last bit; what is unused is -1 and 0."""
    expected = oracle.propose(row, corpus, params)
    count = len(expected.chain.tokens)
    got = (drafts.row(i), int(drafts.source[i]), int(drafts.match_length[i]), int(drafts.occurrences[i]))
    assert got == (expected.chain.tokens, expected.source, expected.match_length, expected.occurrences), (row, corpus, params)
    assert drafts.probabilities[i, :count].tolist() == expected.chain.probabilities, (row, corpus, params)
    assert drafts.tokens[i, count:].tolist() == [-1] * (params.k - count)
    assert not drafts.probabilities[i, count:].any()


def addresses(rows: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The address and the length of each row."""
    return np.array([r.ctypes.data for r in rows], np.int64), np.array([len(r) for r in rows], np.int64)


class LaterExecutor(Executor):
    """Runs what was submitted when `run` is called, or at once if it is `eager`."""

    def __init__(self) -> None:
        self.eager = False
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keeps the job."""
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        if self.eager:
            self.run()
        return future

    def run(self) -> None:
        """Runs all jobs."""
        jobs, self._jobs = self._jobs, []
        for future, job in jobs:
            try:
                future.set_result(job())
            except OSError as error:
                future.set_exception(error)


class Bench:
    """A namespace and the test's own account of it.

    Attributes:
        copies: Tokens of every document ever, by identity of the document.
        log: All pieces ever reserved, oldest first.
    """

    def __init__(self, *, vocab: int = 4, depth: int = 8, quota: int = 64, recent: int = 16, live: int = 16) -> None:
        self.index = self._make_index(vocab, depth, quota, recent, live)
        self.documents = Documents()
        self.lock = Lock()
        self.executor = LaterExecutor()
        self.segments = Segments("bench", self.index, self.documents, self.lock, self.executor)
        self.copies: dict[int, list[int]] = {}
        self.known: list[Document] = []
        self.discarded: set[int] = set()
        self.log: list[Piece] = []
        self._logged: set[int] = set()
        self._visible: dict[int, int] = {}
        self._snapshots: dict[int, tuple[Version, list[object]]] = {}

    def _make_index(self, vocab: int, depth: int, quota: int, recent: int, live: int) -> Index:
        self._directory = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.epochs = Epochs(np.zeros(CONTROL_WORDS, np.int64))
        self.pins = np.zeros(ROWS_HEADER_WORDS, np.int64)
        self.epochs.add_reader("bench", self.pins)
        index = Index(
            str(Path(self._directory.name) / "index"),
            vocab_size=vocab,
            quota_tokens=quota,
            recent_tokens=recent,
            live_tokens=live,
            depth=depth,
            epochs=self.epochs,
        )
        self._reclaim = index.reclaim
        index.reclaim = self._checked_reclaim  # type: ignore[method-assign]
        self.mapped = MappedIndex(index.spec)
        return index

    def close(self) -> None:
        """Removes the index's file."""
        self._directory.cleanup()

    def ingest(self, document_id: str, tokens: Sequence[int], complete: bool = False) -> None:
        """Appends to a document that is not committed."""
        assert document_id not in self.documents.committed
        there = self.documents.open.get(document_id)
        self.documents.ingest(document_id, there.length if there else 0, ints(tokens), complete, "")
        document = there or self.documents.open.get(document_id) or self.documents.committed.get(document_id)
        if document is not None:
            if document is not there:
                self.known.append(document)
            self.copies.setdefault(id(document), []).extend(tokens)

    def discard(self, document_id: str) -> None:
        """Discards an open document."""
        self.discarded.add(id(self.documents.open[document_id]))
        self.documents.discard(document_id, "")

    def refresh(self) -> None:
        """One refresh; notes what became visible."""
        self.segments.refresh()
        self._visible = {key: len(copy) for key, copy in self.copies.items()}
        for piece in self.documents.pieces:
            if id(piece) not in self._logged:
                self._logged.add(id(piece))
                self.log.append(piece)
        self._snapshots[self.index.current.number] = (self.index.current, self._contents(self.index.current))

    def settle(self) -> None:
        """Refreshes and merges until nothing is left to do."""
        for _ in range(20_000):
            self.refresh()
            self.executor.run()
            if self.segments.settled:
                return
        raise AssertionError("the index does not settle")

    def placed(self) -> list[Piece]:
        """Pieces whose suffixes are in force, oldest first."""
        return [p for p in self.documents.pieces if p.offset + p.indexed <= p.document.placed]

    def stretches(self) -> list[Stretch]:
        """The corpus of the version in force."""
        out = [Stretch(self.copies[id(p.document)][p.offset : p.offset + p.size - 1], p.indexed) for p in self.placed()]
        for span in self.segments.live_spans.get(self.index.current.number, []):
            text = self.copies[id(span.document)][span.offset : self._visible[id(span.document)]]
            out.append(Stretch(text, len(text)))
        return out

    def draft(self, rows: Sequence[Sequence[int]], params: DraftParams) -> Drafts:
        """Drafts from the version in force, as a reader would."""
        arrays = [ints(r) for r in rows]
        return self.mapped.draft(self.epochs.control, self.pins, *addresses(arrays), params)

    def is_closed(self) -> bool:
        """Every suffix of indexed text is indexed too.

        Not where a piece goes on in text that was discarded, is of an old generation, or overflowed `live`: there a long pattern may
        occur where a shorter one does not, and what is the longest match is not defined.
        """
        in_live = {id(s.document) for s in self.segments.live_spans.get(self.index.current.number, [])}
        return all(p.document.placed == p.document.length or id(p.document) in in_live for p in self.placed())

    def assert_drafts(self, rows: Sequence[Sequence[int]], params: DraftParams) -> None:
        """The drafts of the rows are the oracle's."""
        drafts, corpus = self.draft(rows, params), self.stretches()
        for row, version in zip(rows, drafts.version.tolist(), strict=True):
            # There is nothing to read for a row of one token.
            assert version == self.index.current.number or (version == 0 and len(row) < 2)
        for i, row in enumerate(rows if self.is_closed() else ()):
            assert_draft(drafts, i, row, corpus, params)

    # -- what must hold after every refresh ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold of an index after a refresh."""
        self._check_ring()
        self._check_eviction()
        self._check_order()
        self._check_buckets()
        self._check_contents()
        self.check_older_versions()

    def check_older_versions(self) -> None:
        """A version of which anything was overwritten no longer counts as whole: its readers know, or were waited for."""
        self._snapshots = {n: s for n, s in self._snapshots.items() if self.index.is_whole(n)}
        for version, contents in self._snapshots.values():
            assert self._contents(version) == contents, "text or suffixes of a version were overwritten under its readers"

    def _checked_reclaim(self, segment: str, copy: int) -> None:
        """Each reclamation must come before what it allows: so until it comes, nothing has been overwritten."""
        self.check_older_versions()
        self._reclaim(segment, copy)

    def _contents(self, version: Version) -> list[object]:
        """All that a reader of the version may look at."""
        index, depth = self.index, self.index.depth
        main = index.main[version.copies[MAIN], : version.lengths[MAIN]].tolist()
        recent = index.recent[version.copies[RECENT], : version.lengths[RECENT]].tolist()
        live = index.live[version.copies[LIVE], : version.lengths[LIVE]].tolist()
        text, live_text = index.text.tolist(), index.live_text[version.copies[LIVE]].tolist()
        suffixes = [suffix(text, p, depth) for p in main + recent] + [suffix(live_text, p, depth) for p in live]
        return [main, recent, live, suffixes, self._buckets(version) if main else []]

    def _buckets(self, version: Version) -> list[int]:
        """The first-token table of `main`."""
        return self.index.buckets[version.copies[MAIN]].tolist()

    def _age(self, position: int) -> int:
        return (position - self.index.current.ring_start) % self.index.ring

    def _check_ring(self) -> None:
        end = 0
        for piece in self.documents.pieces:
            assert self._age(piece.start - piece.lead) >= end, "pieces overlap"
            assert self.index.text[piece.start - 1] == -1
            assert piece.start + piece.size <= self.index.ring, "a piece crosses the ring's end"
            assert self.index.text[piece.start + piece.size - 1] == -1
            end = self._age(piece.start) + piece.size
        assert end <= self.segments._used <= self.index.ring, "more than the quota is in use"
        if self.documents.pieces:
            assert end == self.segments._used

    def _check_eviction(self) -> None:
        there = [id(p) for p in self.documents.pieces]
        evicted = len(self.log) - len(there)
        assert [id(p) for p in self.log[evicted:]] == there, "something else than the oldest was evicted"
        given_up = sum(d.length - d.placed for d in self.known if id(d) not in self.discarded and self._is_given_up(d))
        assert self.documents.evicted_tokens == sum(p.indexed for p in self.log[:evicted]) + given_up
        assert self.documents.indexed_tokens == sum(p.indexed for p in self.placed())

    def _is_given_up(self, document: Document) -> bool:
        """Its rest never enters the ring: it ended in a generation that is not kept, or as much waited behind it as the ring holds."""
        if not document.committed or document.placed == document.length or self.documents.pending.get(document.id) is document:
            return False
        # Who waits where depends on when its tokens came and were placed: that others were enough is what can be said here.
        others = sum(d.length for d in self.known if d.committed and d is not document)
        return document.generation < self.segments._evict_before or others >= self.index.ring

    def _check_order(self) -> None:
        index, depth = self.index, self.index.depth
        for array in (index.suffixes(MAIN), index.suffixes(RECENT)):
            keys = [suffix(index.text.tolist(), p, depth) for p in array.tolist()]
            assert keys == sorted(keys)
        live_text = index.live_text[index.current.copies[LIVE]].tolist()
        live = index.suffixes(LIVE).tolist()
        assert live == sort_suffixes(live_text, sorted(live), depth)
        main, recent = ([self._age(p) for p in a.tolist()] for a in (index.suffixes(MAIN), index.suffixes(RECENT)))
        assert max(main, default=-1) < min(recent, default=index.ring), "main holds something newer than recent"

    def _check_buckets(self) -> None:
        index = self.index
        main = index.suffixes(MAIN).tolist()
        if not main:
            return
        firsts = [int(index.text[p]) for p in main]
        for bucket, at in enumerate(self._buckets(index.current)):
            assert at == sum(f < bucket << index.shift for f in firsts)

    def _check_contents(self) -> None:
        """Every token that was not evicted is indexed once, with the text that was ingested; only an overflow may leave some out."""
        index, depth = self.index, self.index.depth
        text = index.text.tolist()
        indexed: Counter[tuple[int, int]] = Counter()
        placed = self.placed()
        for position in [*index.suffixes(MAIN).tolist(), *index.suffixes(RECENT).tolist()]:
            (piece,) = (p for p in placed if p.start <= position < p.start + p.indexed)
            at = piece.offset + position - piece.start
            indexed[id(piece.document), at] += 1
            assert suffix(text, position, depth) == self.copies[id(piece.document)][at : at + depth]
        live_text = index.live_text[index.current.copies[LIVE]].tolist()
        spans = self.segments.live_spans.get(index.current.number, [])
        for position in index.suffixes(LIVE).tolist():
            span = [s for s in spans if s.start <= position][-1]
            at = span.offset + position - span.start
            indexed[id(span.document), at] += 1
            visible = self.copies[id(span.document)][: self._visible[id(span.document)]]
            assert suffix(live_text, position, depth) == visible[at : at + depth]
        assert set(indexed.values()) <= {1}, "a suffix is in two segments"
        in_live = {id(s.document) for s in spans}
        expected = {(id(p.document), at) for p in placed for at in range(p.offset, p.offset + p.indexed)}
        for document in self.known:
            if id(document) in self.discarded or self._is_given_up(document):
                continue
            if id(document) in in_live:
                expected |= {(id(document), at) for at in range(document.placed, self._visible[id(document)])}
            elif document.placed < document.length:
                assert self.segments.live_overflows > 0, "text is missing though nothing overflowed"
        assert set(indexed) == expected
