"""What the corpus has told the store and is not on disk yet. Documents are named, not copied: the corpus holds their tokens.

So the backlog is bounded by the corpus. What is evicted before it was written is never written.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock

from draftd.drafter.documents import Document
from draftd.drafter.keeper import KeptNamespace


@dataclass(slots=True)
class Waiting:
    """A document to write: its number among all that was told, its namespace's key, and when it came (time.monotonic)."""

    told: int
    namespace: int
    document: Document
    since: float


@dataclass(slots=True)
class Batch:
    """What one transaction writes.

    Attributes:
        told: All that was told up to this number is on disk once the batch is.
        namespaces: State of namespaces that are new or have changed; None for one that is gone.
        documents: By committed_us, oldest first.
        evicted: committed_us of documents to remove.
    """

    told: int = 0
    namespaces: dict[int, KeptNamespace | None] = field(default_factory=dict)
    documents: dict[int, Waiting] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.namespaces or self.documents or self.evicted)


class Backlog:
    """A Keeper that remembers. Its calls never wait for the disk. One thread takes batches and says what became of them.

    Attributes:
        told: Counts what was told.
        never_written: Documents that were evicted before they could be written.
        names: Name of every namespace that there is, by key.
    """

    def __init__(self) -> None:
        self.told = 0
        self.never_written = 0
        self.names: dict[int, str] = {}
        self._lock = Lock()
        self._next = Batch()
        self._taken = Batch()

    # -- what the corpus tells -----------------------------------------------------------------------------------------------

    def namespace_changed(self, kept: KeptNamespace) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            self.told += 1
            self.names[kept.key] = kept.name
            self._next.namespaces[kept.key] = kept

    def namespace_dropped(self, key: int) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            self.told += 1
            self.names.pop(key, None)
            self._next.namespaces[key] = None

    def committed(self, key: int, document: Document) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            self.told += 1
            self._next.documents[document.committed_us] = Waiting(self.told, key, document, time.monotonic())

    def evicted(self, key: int, document: Document) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            self.told += 1
            self._evict(self._next, document.committed_us)

    def _evict(self, batch: Batch, committed_us: int) -> None:
        if batch.documents.pop(committed_us, None) is None:
            batch.evicted.append(committed_us)
        else:
            self.never_written += 1

    # -- what is written -----------------------------------------------------------------------------------------------------

    def take(self, most_documents: int, most_tokens: int) -> Batch:
        """The oldest of what is to be written: all but the documents that are too many, of which it has at least one."""
        with self._lock:
            batch, self._next = self._next, Batch()
            batch.told = self.told
            tokens = 0
            for fits, waiting in enumerate(batch.documents.values()):
                tokens += waiting.document.length
                if fits and (fits == most_documents or tokens > most_tokens):
                    items = list(batch.documents.items())
                    batch.documents, self._next.documents = dict(items[:fits]), dict(items[fits:])
                    batch.told = waiting.told - 1
                    break
            self._taken = batch
            return batch

    def written(self) -> None:
        """The batch taken last is on disk."""
        with self._lock:
            self._taken = Batch()

    def put_back(self) -> None:
        """The batch taken last could not be written: it is the oldest of what is to be written again."""
        with self._lock:
            batch, since = self._taken, self._next
            batch.namespaces.update(since.namespaces)
            batch.documents.update(since.documents)
            for number in since.evicted:
                self._evict(batch, number)
            self._next, self._taken = batch, Batch()

    @property
    def waiting(self) -> int:
        """Documents that are not on disk."""
        return len(self._next.documents) + len(self._taken.documents)

    def __bool__(self) -> bool:
        return bool(self._next) or bool(self._taken)

    def oldest(self) -> float | None:
        """When the oldest of the documents that are not on disk came (time.monotonic); None without any."""
        with self._lock:
            return next((waiting.since for waiting in self._all()), None)

    def _all(self) -> Iterator[Waiting]:
        yield from self._taken.documents.values()
        yield from self._next.documents.values()
