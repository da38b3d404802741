"""What the corpus has told and the stream has not got yet. Documents are named, not copied: the corpus holds their tokens.

So the outbox is bounded by the corpus. What is evicted before it was sent is never sent, and counted.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Lock, get_ident

from draftd.drafter.documents import Document
from draftd.drafter.keeper import KeptNamespace


@dataclass(slots=True)
class Waiting:
    """A document to send: its namespace's key, and when it came (time.monotonic)."""

    namespace: int
    document: Document
    since: float


@dataclass(slots=True)
class Batch:
    """What is sent together: documents by committed_us, oldest first, and namespaces whose generation has risen."""

    documents: dict[int, Waiting] = field(default_factory=dict)
    generations: dict[int, KeptNamespace] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.documents or self.generations)


class Outbox:
    """A Keeper that remembers what is to be sent. Its calls never wait. One sender takes batches and says what became of them.

    Args:
        wanted: Whether a namespace of that name is replicated.

    Attributes:
        never_sent: Documents that were evicted, or whose namespace was dropped, before they could be sent.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self.never_sent = 0
        self._wanted = wanted
        self._unwanted: set[int] = set()
        self._known: dict[int, tuple[int, int]] = {}
        self._lock = Lock()
        self._next = Batch()
        self._taken = Batch()
        self._receiving: int | None = None

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """What this thread does to the corpus came from the stream, and is not sent back."""
        self._receiving = get_ident()
        try:
            yield
        finally:
            self._receiving = None

    # -- what the corpus tells -----------------------------------------------------------------------------------------------

    def namespace_changed(self, kept: KeptNamespace) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            if not self._wanted(kept.name):
                self._unwanted.add(kept.key)
                return
            state = (kept.generation, kept.evict_before)
            risen = state != self._known.get(kept.key, (0, 0))
            self._known[kept.key] = state
            if risen and self._receiving != get_ident():
                self._next.generations[kept.key] = kept

    def namespace_dropped(self, key: int) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            self._known.pop(key, None)
            self._next.generations.pop(key, None)
            self._unwanted.discard(key)

    def committed(self, key: int, document: Document) -> None:
        """See draftd.drafter.keeper.Keeper."""
        if self._receiving == get_ident():
            return
        self.add([(key, document)])

    def evicted(self, key: int, document: Document) -> None:
        """See draftd.drafter.keeper.Keeper."""
        with self._lock:
            self.never_sent += self._next.documents.pop(document.committed_us, None) is not None

    # -- what is sent --------------------------------------------------------------------------------------------------------

    def add(self, documents: Iterable[tuple[int, Document]]) -> None:
        """Has documents sent, each with its namespace's key."""
        now = time.monotonic()
        with self._lock:
            for key, document in documents:
                if key not in self._unwanted:
                    self._next.documents[document.committed_us] = Waiting(key, document, now)

    def take(self, most_documents: int) -> Batch:
        """The oldest of what is to be sent."""
        with self._lock:
            waiting = self._next.documents
            numbers = [number for number, _ in zip(waiting, range(most_documents), strict=False)]
            self._taken = Batch({number: waiting.pop(number) for number in numbers}, self._next.generations)
            self._next.generations = {}
            return self._taken

    def sent(self) -> None:
        """The batch taken last is in the stream, or will never be."""
        with self._lock:
            self._taken = Batch()

    def put_back(self) -> None:
        """The batch taken last could not be sent: it is the oldest of what is to be sent again."""
        with self._lock:
            taken, since = self._taken, self._next
            self._next = Batch(taken.documents | since.documents, taken.generations | since.generations)
            self._taken = Batch()

    def __len__(self) -> int:
        return len(self._next.documents) + len(self._taken.documents)

    def __bool__(self) -> bool:
        return bool(self._next) or bool(self._taken)

    def age_s(self) -> float:
        """How long the oldest document has been waiting, in seconds; 0 without one."""
        with self._lock:
            oldest = next((w.since for batch in (self._taken, self._next) for w in batch.documents.values()), None)
        return time.monotonic() - oldest if oldest is not None else 0.0

    def oldest_us(self) -> int | None:
        """About when the oldest document that waits was committed, in microseconds of Unix time; None without one."""
        with self._lock:
            return next((number for batch in (self._taken, self._next) for number in batch.documents), None)
