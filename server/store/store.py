"""The store of a running service: one thread that writes what the corpus told, in batches, behind the index.

Drafting and ingest never wait for it. What the disk refuses is kept and tried again, and said loudly.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread

import numpy as np
import structlog
from numpy.typing import NDArray

from draftd.drafter.documents import Document
from draftd.server.store.backlog import Backlog, Batch, Waiting
from draftd.server.store.codec import Codec, checksum
from draftd.server.store.database import (
    Database,
    Row,
    delete_documents,
    delete_of_namespace,
    drop_namespaces,
    write_documents,
    write_namespaces,
)
from draftd.server.store.directory import DataDir

log = structlog.get_logger()

_BATCH_DOCUMENTS = 4096
_BATCH_TOKENS = 2**21
_READ_DOCUMENTS = 64
"""Documents that are read from the corpus at a time, which holds its namespace's lock."""
_DELETE_DOCUMENTS = 4096
_RETRY_S = 1.0
_HURRIED_RETRY_S = 0.1
_MAX_COMMIT_TIMES = 10_000
_CLOSE_S = 30.0

ReadCommitted = Callable[[str, int, Sequence[Document]], list[NDArray[np.int32] | None]]
"""draftd.drafter.corpus.Corpus.read_committed."""


@dataclass(slots=True)
class StoreCounts:
    """What the store has done since the service started.

    Attributes:
        errors: Batches that could not be written.
        commit_s: Durations of transactions since somebody took them.
    """

    written_documents: int = 0
    written_tokens: int = 0
    deleted_documents: int = 0
    errors: int = 0
    restored_documents: int = 0
    restored_tokens: int = 0
    restore_s: float = 0.0
    damaged_documents: int = 0
    commit_s: list[float] = field(default_factory=list)


class Store:
    """Writes behind a corpus, whose Keeper is `backlog`.

    Args:
        directory: The data directory.
        database: The store in it.
        lag_ms: Longest time that a document waits for others to be written with, in milliseconds.

    Attributes:
        backlog: What the corpus tells; its Keeper.
        failure: Why nothing can be written now; empty while all is well.
        told_on_disk: Number of what the corpus told last of all that is on disk; see Backlog.told.
        told_when_it_failed: What had been told when writing failed last.
        listener: Called by the store's thread after each batch, written or not.
    """

    def __init__(self, directory: DataDir, database: Database, lag_ms: float) -> None:
        self.directory = directory
        self.database = database
        self.backlog = Backlog()
        self.counts = StoreCounts()
        self.failure = ""
        self.told_on_disk = 0
        self.told_when_it_failed = 0
        self.listener: Callable[[], object] = lambda: None
        self._lag_s = lag_ms / 1000
        self._read: ReadCommitted
        self._codec = Codec()
        self._garbage: list[int] = []
        self._slack = False
        self._hurry = Event()
        self._stop = False
        self._thread: Thread | None = None

    def start(self, read: ReadCommitted) -> None:
        """Starts to write; `read` gives the tokens of committed documents."""
        self._read = read
        self._thread = Thread(target=self._run, name="draftd-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what is left, unless the disk refuses it, and closes the file."""
        self._stop = True
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self.backlog:
                log.error("store_not_complete", documents=self.backlog.waiting, reason=self.failure or "the disk is too slow")
        if self._thread is None or not self._thread.is_alive():
            self.database.close()
        self.directory.close()

    # -- how far it is -------------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Has what is waiting written at once."""
        self._hurry.set()

    @property
    def settled(self) -> bool:
        """All that the corpus has told is on disk."""
        return self.told_on_disk == self.backlog.told

    def lag_s(self) -> float:
        """Age of the oldest document that is not on disk, in seconds; 0 without one."""
        oldest = self.backlog.oldest()
        return time.monotonic() - oldest if oldest is not None else 0.0

    # -- the thread ----------------------------------------------------------------------------------------------------------

    def forget_documents_of(self, key: int) -> None:
        """Has the documents of a namespace that is gone removed, a few at a time."""
        self._garbage.append(key)

    def _run(self) -> None:
        while True:
            self._hurry.wait(_RETRY_S if self.failure else self._lag_s)
            self._hurry.clear()
            stopping = self._stop
            # What comes meanwhile waits for others: else every document would be a transaction of its own.
            goal = self.backlog.told
            while self._write() and (self._garbage or self._slack or self.told_on_disk < goal):
                pass
            if stopping:
                return
            if self.failure:
                time.sleep(_HURRIED_RETRY_S)

    def _write(self) -> bool:
        """Writes one batch, and removes some of what is to go; False if that failed."""
        batch = self.backlog.take(_BATCH_DOCUMENTS, _BATCH_TOKENS)
        if not batch and not self._garbage and not self._slack:
            self._reached(batch.told)
            return True
        started = time.perf_counter()
        try:
            written = self._transact(batch)
        except Exception as error:  # noqa: BLE001 - counted and logged by _failed; tried again
            self._failed(batch, error)
            return False
        self.backlog.written()
        if len(self.counts.commit_s) < _MAX_COMMIT_TIMES:
            self.counts.commit_s.append(time.perf_counter() - started)
        self.counts.written_documents += len(written)
        self.counts.written_tokens += sum(row.tokens for row in written)
        if self.failure:
            log.info("store_written_again", documents=len(written))
        self._reached(batch.told)
        return True

    def _transact(self, batch: Batch) -> list[Row]:
        rows = list(self._rows(list(batch.documents.values())))
        with self.database.transaction() as db:
            write_namespaces(db, (kept for kept in batch.namespaces.values() if kept is not None))
            gone = [key for key, kept in batch.namespaces.items() if kept is None]
            drop_namespaces(db, gone)
            write_documents(db, rows)
            delete_documents(db, batch.evicted)
        self._garbage += gone
        self.counts.deleted_documents += len(batch.evicted)
        if self._remove_garbage() or batch.evicted or self._slack:
            self._slack = self.database.give_space_back()
        return rows

    def _remove_garbage(self) -> int:
        """Removes some documents of a namespace that is gone, and answers how many."""
        if not self._garbage:
            return 0
        key = self._garbage[0]
        with self.database.transaction() as db:
            removed = delete_of_namespace(db, key, _DELETE_DOCUMENTS)
        self.counts.deleted_documents += removed
        if removed < _DELETE_DOCUMENTS:
            self._garbage.remove(key)
        return removed

    def _rows(self, waiting: Sequence[Waiting]) -> Iterator[Row]:
        """Rows of the documents that are still whole."""
        for first in range(0, len(waiting), _READ_DOCUMENTS):
            # Packing is Python: whoever drafts meanwhile is let through.
            time.sleep(0)
            group = waiting[first : first + _READ_DOCUMENTS]
            for key in {item.namespace for item in group}:
                documents = [item.document for item in group if item.namespace == key]
                for document, tokens in zip(documents, self._read(self.backlog.names.get(key, ""), key, documents), strict=True):
                    if tokens is None:
                        self.backlog.never_written += 1
                        continue
                    data = self._codec.pack(tokens)
                    number, generation = document.committed_us, document.generation
                    sum_ = checksum(key, number, document.id, generation, len(tokens), data)
                    yield Row(number, key, document.id, generation, len(tokens), data, sum_)

    def _reached(self, told: int) -> None:
        if told <= self.told_on_disk and not self.failure:
            return
        self.failure = ""
        self.told_on_disk = max(told, self.told_on_disk)
        self.listener()

    def _failed(self, batch: Batch, error: Exception) -> None:
        self.counts.errors += 1
        self.backlog.put_back()
        of_sqlite = isinstance(error, sqlite3.Error)
        reason = str(error) if of_sqlite else "internal error, see the log"
        if reason != self.failure:
            documents = len(batch.documents)
            log.error("store_cannot_be_written", reason=reason, documents=documents, exc_info=None if of_sqlite else error)
        self.told_when_it_failed = self.backlog.told
        self.failure = reason
        self.listener()
