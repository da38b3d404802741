"""A corpus with a full copy of each index on several GPUs: an engine maps the copy of its own.

Every refresh is done on each GPU in turn; what one decides is what all do. The service itself drafts on the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.device_index import DeviceIndex
from draftd.drafter.device_indexes import DeviceIndexes
from draftd.drafter.drafts import Drafts
from draftd.drafter.errors import FailedPrecondition
from draftd.drafter.groups import NO_GROUPS, GroupTexts
from draftd.drafter.index import IndexArrays, IndexImage, MainMerge, Version
from draftd.drafter.layout import BlockSpec
from draftd.drafter.lessons import Learned
from draftd.drafter.params import DraftParams


class FleetIndex:
    """One namespace's index on every GPU, as one. See IndexArrays; what it answers is the first copy's.

    Attributes:
        copies: One a GPU. Their versions have the same content; numbers may differ.
        current: The version in force on the first.
    """

    def __init__(self, copies: Sequence[DeviceIndex]) -> None:
        self.copies = list(copies)
        self._first = copies[0]
        self.depth, self.ring = self._first.depth, self._first.ring
        self.recent_capacity, self.live_capacity = self._first.recent_capacity, self._first.live_capacity
        self.current = self._first.current
        for other in self.copies[1:]:
            # The text on the host is there once.
            other.host_text = self._first.host_text

    @property
    def host_text(self) -> NDArray[np.int32]:
        """See IndexArrays."""
        return self._first.host_text

    def host_copy(self) -> IndexImage:
        """See IndexArrays."""
        return self._first.host_copy()

    def is_whole(self, number: int) -> bool:
        """See IndexArrays."""
        return self._first.is_whole(number)

    def resident_bytes(self) -> int:
        """See IndexArrays; on all GPUs."""
        return sum(copy.resident_bytes() for copy in self.copies)

    def close(self) -> None:
        """See IndexArrays."""
        for copy in self.copies:
            copy.close()

    def write_text(self, start: int, tokens: NDArray[np.int32]) -> None:
        """See IndexArrays."""
        for copy in self.copies:
            copy.write_text(start, tokens)

    def fill_live(self, version: Version, text: NDArray[np.int32], positions: NDArray[np.int32]) -> Version:
        """See IndexArrays."""
        first, *_ = [copy.fill_live(version, text, positions) for copy in self.copies]
        return first

    def add_recent(self, version: Version, positions: NDArray[np.int32]) -> Version:
        """See IndexArrays."""
        first, *_ = [copy.add_recent(version, positions) for copy in self.copies]
        return first

    def drop_recent(self, version: Version, start: int, size: int, dropped: int) -> Version:
        """See IndexArrays."""
        first, *_ = [copy.drop_recent(version, start, size, dropped) for copy in self.copies]
        return first

    def recent_copy(self) -> list[Any]:
        """See IndexArrays; one copy a GPU."""
        return [copy.recent_copy() for copy in self.copies]

    def merge_main(self, merge_in: MainMerge) -> int:
        """See IndexArrays."""
        lengths = [
            copy.merge_main(MainMerge(recent, merge_in.placed, merge_in.evict_start, merge_in.evict_size, merge_in.evicted))
            for copy, recent in zip(self.copies, merge_in.recent, strict=True)
        ]
        return lengths[0]

    def publish(self, version: Version) -> Version:
        """See IndexArrays. The first GPU is last: what the service says is visible is visible on all."""
        for copy in reversed(self.copies):
            self.current = copy.publish(version)
        return self.current

    def publish_calibration(self, calibration: NDArray[np.float32]) -> None:
        """See IndexArrays."""
        for copy in self.copies:
            copy.publish_calibration(calibration)


class DeviceFleet:
    """The indexes of a corpus on several GPUs; see Indexes.

    Args:
        devices: Distinct CUDA devices; each gets memory for all indexes.

    Attributes:
        members: The indexes on each.

    Raises:
        ResourceExhausted, InvalidArgument: See DeviceIndexes.
    """

    def __init__(self, config: CorpusConfig, devices: Sequence[str]) -> None:
        self.members = [DeviceIndexes(config, device) for device in devices]

    def make(self, vocab_size: int, quota_tokens: int) -> FleetIndex:
        """See Indexes."""
        made: list[DeviceIndex] = []
        try:
            for member in self.members:
                made.append(member.make(vocab_size, quota_tokens))
        except Exception:
            for copy in made:
                copy.close()
            raise
        return FleetIndex(made)

    def add(self, name: str, index: IndexArrays, learned: Learned) -> None:
        """See Indexes."""
        assert isinstance(index, FleetIndex)
        for member, copy in zip(self.members, index.copies, strict=True):
            member.add(name, copy, learned)

    def remove(self, name: str) -> None:
        """See Indexes."""
        for member in self.members:
            member.remove(name)

    def spec(self, index: IndexArrays) -> BlockSpec:
        """See Indexes."""
        raise FailedPrecondition("the index is on GPUs: it cannot be mapped by host processes", "transport")

    def handle(self, index: IndexArrays) -> str:
        """See Indexes."""
        assert isinstance(index, FleetIndex)
        return " ".join(copy.handle for copy in index.copies)

    def draft(self, rows: Sequence[NDArray[np.int32]], names: Sequence[str], params: DraftParams, groups: GroupTexts = NO_GROUPS) -> Drafts:
        """See Indexes."""
        return self.members[0].draft(rows, names, params)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """See Indexes. What is read is a copy."""
        yield

    def memory_use(self) -> str:
        """See Indexes."""
        return "; ".join(member.memory_use() for member in self.members)

    def device_bytes(self) -> dict[str, int]:
        """See Indexes; on all GPUs."""
        parts = [member.device_bytes() for member in self.members]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def warm_up(self, name: str, row: NDArray[np.int32]) -> None:
        """See Indexes. Kernels are compiled once for GPUs of one kind, and loaded on each."""
        for member in self.members:
            member.warm_up(name, row)
