"""The row blocks of all engines that map, as the corpus reads them at each refresh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import rowpoll
from draftd.drafter.epochs import Epochs
from draftd.drafter.layout import BlockSpec
from draftd.drafter.stats import EngineStats


class AttachedRows:
    """Row blocks by attachment. Thread-safe, but for `poll`, `take_learned` and `mark_visible`, which one thread calls.

    Args:
        directory: Where the blocks are made.
        epochs: Waits for the engines' pins.
        ingest: Takes what a block holds.
        commit_owned: Commits an attachment's open documents and answers how many they were.
    """

    def __init__(self, directory: Path, epochs: Epochs, ingest: rowpoll.Ingest, commit_owned: Callable[[str], int]) -> None:
        self._directory, self._epochs, self._ingest, self._commit_owned = directory, epochs, ingest, commit_owned
        self._lock = Lock()
        self._blocks: dict[str, rowpoll.PolledRows] = {}
        # Of engines that have left: what they learned last is still to be taken, which only a refresh may do.
        self._leaving: list[rowpoll.PolledRows] = []

    def attach(self, attachment_id: str, max_rows: int, max_length: int, namespaces: Sequence[str]) -> BlockSpec:
        """Makes a row block for an engine that maps; it is read at each refresh from now on.

        Args:
            namespaces: The namespaces that its rows may name by position.

        Raises:
            OSError: There is no room for it.
        """
        path = str(self._directory / f"rows-{attachment_id}")
        block = rowpoll.PolledRows(path, attachment_id, max_rows, max_length, list(namespaces))
        self._epochs.add_reader(attachment_id, block.rows.header)
        with self._lock:
            self._blocks[attachment_id] = block
        return block.spec

    def set_namespaces(self, attachment_id: str, namespaces: Sequence[str]) -> None:
        """Replaces the namespaces that an attachment's rows may name by position; known ones keep their position."""
        self._blocks[attachment_id].namespaces = list(namespaces)

    def detach(self, attachment_id: str) -> int:
        """Takes what an engine's row block still holds, commits its open documents, and answers how many they were."""
        with self._lock:
            block = self._blocks.pop(attachment_id)
            self._leaving.append(block)
        block.poll(self._ingest)
        self._epochs.remove_reader(attachment_id)
        block.unlink()
        return self._commit_owned(attachment_id)

    def stats(self, attachment_id: str) -> EngineStats:
        """The counters that an engine keeps in its row block: a copy."""
        return self._blocks[attachment_id].rows.stats.snapshot()

    def in_use(self, attachment_id: str) -> int:
        """Rows of an attachment that hold a request that goes on."""
        return self._blocks[attachment_id].rows_in_use

    def errors(self, attachment_id: str) -> int:
        """Rows of an attachment that could not be taken."""
        return self._blocks[attachment_id].errors

    # -- what a refresh does -------------------------------------------------------------------------------------------------

    def poll(self) -> list[tuple[rowpoll.PolledRows, list[rowpoll.Seen]]]:
        """Takes what is new in every block, and answers how far each was read."""
        with self._lock:
            blocks = list(self._blocks.values())
        return [(block, block.poll(self._ingest)) for block in blocks]

    def take_learned(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """What engines have learned since the last call, those that have left included, by namespace."""
        with self._lock:
            blocks = [*self._blocks.values(), *self._leaving]
            self._leaving = []
        for block in blocks:
            yield from block.take_learned()

    @staticmethod
    def mark_visible(polled: Iterable[tuple[rowpoll.PolledRows, list[rowpoll.Seen]]]) -> None:
        """Tells the engines that what `poll` took is visible."""
        for block, seen in polled:
            block.mark_visible(seen)
