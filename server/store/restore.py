"""From the store into the corpus: every namespace at the start, or one that was asleep."""

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import DraftdError, ResourceExhausted
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.records import NamespaceInfo, StoredDocument, check_document_id, check_tokens
from draftd.server.store.codec import Codec, checksum
from draftd.server.store.database import Database, NamespaceRow, Row, delete_up_to, set_documents_aside, set_namespaces_aside
from draftd.server.store.directory import StoreError
from draftd.server.store.store import Store

log = structlog.get_logger()

_PROGRESS_S = 2.0


def restore_all(store: Store, corpus: Corpus) -> list[tuple[KeptNamespace, int]]:
    """Restores every namespace. Answers those for which there is no room and how many documents they have; they stay in the store.

    Raises:
        StoreError: The store cannot be read.
    """
    try:
        return _restore_all(store, corpus)
    except sqlite3.Error as error:
        raise StoreError(f"data_dir {store.directory.path}: the store cannot be read: {error}") from None


def _restore_all(store: Store, corpus: Corpus) -> list[tuple[KeptNamespace, int]]:
    started = time.perf_counter()
    database = store.database
    corpus.clock.start_after(database.last_us())
    counts = database.counts()
    read = [(row, row.kept()) for row in database.namespaces()]
    namespaces = [kept for _, kept in read if kept is not None]
    damaged = [row for row, kept in read if kept is None]
    held = {kept.key: counts.pop(kept.key, 0) for kept in namespaces}
    if damaged:
        _set_namespaces_aside(store, damaged, counts)
    else:
        for key in counts:
            store.forget_documents_of(key)
    waiting: list[tuple[KeptNamespace, int]] = []
    progress = _Progress(sum(held.values()))
    for kept in namespaces:
        documents = held[kept.key]
        try:
            info = restore_one(store, corpus, kept, progress)
        except (ResourceExhausted, OSError, MemoryError) as error:
            log.warning("namespace_was_not_restored", namespace=kept.name, documents=documents, reason=str(error))
            store.backlog.names[kept.key] = kept.name
            waiting.append((kept, documents))
        else:
            store.counts.restored_documents += info.documents
            store.counts.restored_tokens += info.tokens
    store.counts.restore_s = time.perf_counter() - started
    if read:
        log.info(
            "restored",
            namespaces=len(namespaces) - len(waiting),
            documents=store.counts.restored_documents,
            tokens=store.counts.restored_tokens,
            seconds=round(store.counts.restore_s, 3),
        )
    return waiting


def _set_namespaces_aside(store: Store, damaged: list[NamespaceRow], without: dict[int, int]) -> None:
    """Sets damaged namespaces aside, and all documents `without` a namespace: they may be of one whose key is not what it was.

    Args:
        without: How many documents there are, by the key of their namespace.
    """
    documents = sum(without.values())
    store.counts.damaged_documents += documents
    names = [str(row.name) for row in damaged]
    log.error("namespaces_are_damaged", namespaces=names, documents=documents, set_aside="tables damaged_namespaces, damaged_documents")
    try:
        with store.database.transaction() as db:
            set_namespaces_aside(db, {row.key for row in damaged} | without.keys())
    except sqlite3.Error as error:
        # None of them is used; the next start tries again.
        store.counts.errors += 1
        log.error("store_cannot_be_written", reason=str(error))


@dataclass(slots=True)
class _Progress:
    """Logs how far reading is, every few seconds."""

    of_documents: int
    documents: int = 0
    said: float = field(default_factory=time.monotonic)

    def read(self, namespace: str) -> None:
        self.documents += 1
        if self.documents % 1000 == 0 and time.monotonic() - self.said > _PROGRESS_S:
            self.said = time.monotonic()
            log.info("restoring", namespace=namespace, documents=self.documents, of_documents=self.of_documents)


def restore_one(store: Store, corpus: Corpus, kept: KeptNamespace, progress: _Progress | None = None) -> NamespaceInfo:
    """Restores one namespace. What does not fit its quota leaves the store; what cannot be read is set aside there.

    Raises:
        ResourceExhausted: There are as many namespaces as may be.
        sqlite3.Error: The store cannot be read.
        OSError: There is no shared memory for it.
    """
    store.backlog.names[kept.key] = kept.name
    reading = _Reading(store.database, kept, progress)
    info = corpus.restore(kept, reading.documents())
    try:
        reading.tidy()
    except sqlite3.Error as error:
        # Nothing is wrong with what was restored; the next start finds the rest again.
        store.counts.errors += 1
        log.error("store_cannot_be_written", reason=str(error))
    if reading.damaged:
        store.counts.damaged_documents += len(reading.damaged)
        log.error("documents_are_damaged", namespace=kept.name, documents=len(reading.damaged), set_aside="table damaged_documents")
    return info


class _Reading:
    """Reads the documents of a namespace, and remembers which of them the store need not have any longer."""

    def __init__(self, database: Database, kept: KeptNamespace, progress: _Progress | None) -> None:
        self.damaged: list[int] = []
        self._database = database
        self._kept = kept
        self._progress = progress
        self._codec = Codec()
        self._last_us = 0

    def documents(self) -> Iterator[StoredDocument]:
        """The namespace's documents, newest first. Whoever stops early has no room for the last one that came, and for all older ones."""
        for row in self._database.newest_first(self._kept.key):
            if self._progress is not None:
                self._progress.read(self._kept.name)
            stored = self._unpacked(row)
            if stored is not None and stored.generation >= self._kept.evict_before:
                self._last_us = row.committed_us
                yield stored
        self._last_us = 0

    def _unpacked(self, row: Row) -> StoredDocument | None:
        try:
            if row.checksum != checksum(row.namespace, row.committed_us, row.document_id, row.generation, row.tokens, row.data):
                raise ValueError("the checksum is not the row's")
            tokens = self._codec.unpack(row.data, row.tokens)
            check_document_id(row.document_id)
            check_tokens(tokens, self._kept.vocab_size)
        except (ValueError, DraftdError):
            self.damaged.append(row.committed_us)
            return None
        return StoredDocument(row.document_id, tokens, row.generation, row.committed_us)

    def tidy(self) -> None:
        """Sets damaged documents aside, and removes those that were given up or had no room."""
        with self._database.transaction() as db:
            set_documents_aside(db, self.damaged)
            delete_up_to(db, self._kept.key, self._last_us, self._kept.evict_before)
