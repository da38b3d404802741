"""What a corpus tells whoever keeps its committed documents beyond the life of the process, and the clock that numbers them.

It keeps nothing itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from draftd.drafter.documents import Document


@dataclass(frozen=True, slots=True)
class KeptNamespace:
    """What outlives a namespace's index.

    Attributes:
        key: Tells it from every other namespace that there ever was, also from one of the same name.
        evict_before: Documents of generations below this have been given up.
        calibration: What was learned, as draftd.drafter.calibration reads it; empty: nothing yet.
    """

    key: int
    name: str
    vocab_size: int
    fingerprint: str
    generation: int
    evict_before: int
    calibration: bytes = field(default=b"", repr=False)


class Keeper(Protocol):
    """Told of every change, in its order, while the namespace's lock is held: it must not wait, raise or call the corpus."""

    def namespace_changed(self, kept: KeptNamespace) -> None:
        """A namespace was made, or has changed."""

    def namespace_dropped(self, key: int) -> None:
        """A namespace and all it held is gone."""

    def committed(self, key: int, document: Document) -> None:
        """A document is complete; `committed_us` identifies it from now on."""

    def evicted(self, key: int, document: Document) -> None:
        """Nothing is left of a committed document."""


class Keepers:
    """Several keepers as one: each is told of everything, in the order given."""

    def __init__(self, *keepers: Keeper) -> None:
        self._keepers = keepers

    def namespace_changed(self, kept: KeptNamespace) -> None:
        """See Keeper."""
        for keeper in self._keepers:
            keeper.namespace_changed(kept)

    def namespace_dropped(self, key: int) -> None:
        """See Keeper."""
        for keeper in self._keepers:
            keeper.namespace_dropped(key)

    def committed(self, key: int, document: Document) -> None:
        """See Keeper."""
        for keeper in self._keepers:
            keeper.committed(key, document)

    def evicted(self, key: int, document: Document) -> None:
        """See Keeper."""
        for keeper in self._keepers:
            keeper.evicted(key, document)


class UniqueClock:
    """Unix time in microseconds that never repeats: each reading is above the one before. Thread-safe."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = Lock()

    def now_us(self) -> int:
        """The time, or one more than the last reading."""
        with self._lock:
            self._last = max(self._last + 1, time.time_ns() // 1000)
            return self._last

    def start_after(self, last_us: int) -> None:
        """Makes all later readings larger than `last_us`."""
        with self._lock:
            self._last = max(self._last, last_us)
