"""The indexes of a corpus in shared memory, and drafting from them on the CPU: what Corpus asks of wherever its indexes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from typing import Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.drafts import Drafts
from draftd.drafter.epochs import Epochs
from draftd.drafter.groups import NO_GROUPS, GroupTexts
from draftd.drafter.index import Index, IndexArrays
from draftd.drafter.layout import ROWS_HEADER_WORDS, BlockSpec, index_block_spec
from draftd.drafter.lessons import Learned
from draftd.drafter.params import DraftParams, Policy
from draftd.drafter.reader import IndexReader, TornRead, draft_local

_SERVICE = "service"


class Indexes(Protocol):
    """The indexes of all namespaces, and drafting from them. Thread-safe."""

    def make(self, vocab_size: int, quota_tokens: int) -> IndexArrays:
        """An empty index.

        Raises:
            OSError, ResourceExhausted: There is no memory for it.
        """

    def add(self, name: str, index: IndexArrays, learned: Learned) -> None:
        """Drafts for the namespace come from this index from now on, and what they teach goes to `learned`."""

    def remove(self, name: str) -> None:
        """Nothing is drafted from the namespace any more."""

    def spec(self, index: IndexArrays) -> BlockSpec:
        """What an engine maps to draft from an index itself.

        Raises:
            FailedPrecondition: It cannot be mapped.
        """

    def handle(self, index: IndexArrays) -> str:
        """What an index that engines map is told apart by from those before it."""

    def draft(self, rows: Sequence[NDArray[np.int32]], names: Sequence[str], params: DraftParams, groups: GroupTexts = NO_GROUPS) -> Drafts:
        """Drafts for rows, each from the index of its namespace, or from its own tokens only where the name is empty or unknown.

        Args:
            rows: int32 [any]; C-contiguous tokens of each row.
            groups: Of the rows; without effect on a GPU.
        """

    def pinned(self) -> AbstractContextManager[None]:
        """What is in force when the context begins can be read in it."""

    def memory_use(self) -> str:
        """What memory the indexes take, for people."""

    def device_bytes(self) -> dict[str, int]:
        """Bytes of GPU memory by part: indexes, free for others, working memory; empty without a GPU."""

    def warm_up(self, name: str, row: NDArray[np.int32]) -> None:
        """Compiles what drafting from an index needs, by drafting for a row."""


class HostIndexes:
    """Indexes as blocks in a directory in shared memory.

    Args:
        directory: Where to make the blocks.
        control: int64; the control block. epochs: Its epochs.
    """

    def __init__(self, directory: Path, config: CorpusConfig, control: NDArray[np.int64], epochs: Epochs) -> None:
        self._directory, self._config, self._epochs = directory, config, epochs
        pins = np.zeros(ROWS_HEADER_WORDS, np.int64)
        epochs.add_reader(_SERVICE, pins)
        self._reader = IndexReader(control, pins)
        self._lock = Lock()
        self._made = 0

    def make(self, vocab_size: int, quota_tokens: int) -> Index:
        """See Indexes."""
        self._made += 1
        config = self._config
        return Index(
            str(self._directory / f"index-{self._made}"),
            vocab_size=vocab_size,
            quota_tokens=quota_tokens,
            recent_tokens=min(config.recent_tokens, quota_tokens),
            live_tokens=config.live_tokens,
            depth=config.depth,
            epochs=self._epochs,
        )

    def add(self, name: str, index: IndexArrays, learned: Learned) -> None:
        """See Indexes."""
        assert isinstance(index, Index)
        with self._lock:
            self._reader.add_index(name, index.spec)
            self._reader.learn_into(name, learned)

    def remove(self, name: str) -> None:
        """See Indexes."""
        with self._lock:
            self._reader.remove_index(name)

    def spec(self, index: IndexArrays) -> BlockSpec:
        """See Indexes."""
        assert isinstance(index, Index)
        return index.spec

    def handle(self, index: IndexArrays) -> str:
        """See Indexes."""
        return self.spec(index).handle

    def draft(self, rows: Sequence[NDArray[np.int32]], names: Sequence[str], params: DraftParams, groups: GroupTexts = NO_GROUPS) -> Drafts:
        """See Indexes."""
        # Not r.ctypes.data, which makes a Python object ten times as slowly.
        addresses = np.array([r.__array_interface__["data"][0] for r in rows], np.int64)
        lengths = np.array([len(r) for r in rows], np.int64)
        with self._lock:
            try:
                return self._reader.draft(addresses, lengths, names, params, groups)
            except TornRead:
                return draft_local(addresses, lengths, params)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """See Indexes."""
        with self._lock, self._reader.pinned():
            yield

    def memory_use(self) -> str:
        """See Indexes. A page of an index costs memory only once it is used."""
        config = self._config
        most = index_block_spec(
            "",
            quota_tokens=config.quota_tokens,
            recent_tokens=min(config.recent_tokens, config.quota_tokens),
            live_tokens=config.live_tokens,
            depth=config.depth,
            buckets=max(64, config.quota_tokens // 8),
        ).byte_size
        return f"up to {most / 2**20:.0f} MiB a namespace ({config.quota_tokens:,} tokens)"

    def device_bytes(self) -> dict[str, int]:
        """See Indexes."""
        return {}

    def warm_up(self, name: str, row: NDArray[np.int32]) -> None:
        """See Indexes. The kernels take all parameters as they come."""
        for policy in get_args(Policy):
            drafts = self.draft([row, row], [name, ""], DraftParams(max_depth=self._config.depth, policy=policy))
            for lessons in drafts.lessons:
                lessons.lesson.learn(lessons.places, row[None, :1], np.ones(1, np.int64))
