"""MAPPED: the engine drafts in its own process from the service's index; no message is on the decode path.

Rows are drafted from where the client keeps them; the slots of the row block only publish them, so drafting goes on when there is no
free slot, and after the service has died.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from draftd.client import wire
from draftd.client.courier import Courier
from draftd.client.failopen import FailOpen
from draftd.client.rows import Request, RowTable
from draftd.client.transports import Link
from draftd.drafter.drafts import Drafts
from draftd.drafter.groups import NO_GROUPS, Groups
from draftd.drafter.layout import LEARNING_NAMESPACES
from draftd.drafter.lessons import Learned
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import IndexReader, TornRead, row_addresses
from draftd.drafter.rows import RowBlock
from draftd.proto.draftd.v1 import draftd_pb2 as pb


class DeviceLink(Protocol):
    """What maps an index in device memory, where a DeviceSession drafts from it."""

    def remap(self, device: pb.DeviceMap) -> None:
        """Maps what the service hands out, in place of what was mapped before; OSError or ValueError if that cannot be."""

    def learn_into(self, learned: dict[str, Learned]) -> None:
        """Says where what drafts teach goes from now on, by namespace; called from the session's thread."""


class MappedTransport:
    """Drafting from a mapped index.

    Args:
        device: Maps the index and drafts from it where that is on a GPU; this then only publishes the rows.

    Attributes:
        block: The row block, mapped.

    Raises:
        OSError, ValueError: The service's blocks cannot be mapped here.
    """

    def __init__(
        self,
        link: Link,
        response: pb.AttachResponse,
        table: RowTable,
        courier: Courier,
        namespaces: tuple[str, ...],
        device: DeviceLink | None = None,
    ) -> None:
        self.link = link
        self.block = RowBlock.open(wire.block_spec(response.rows))
        self._table = table
        self._courier = courier
        self._namespace_index = {name: i for i, name in enumerate(namespaces)}
        self._only_namespace = len(namespaces) == 1
        self._device = device
        self._reader: IndexReader | None = None
        if response.HasField("device") != (device is not None):
            raise ValueError(f"the index is {'in device' if device is None else 'in host'} memory")
        learned = {name: self.block.learned(i, reserve=True) for i, name in enumerate(namespaces[:LEARNING_NAMESPACES])}
        if device is not None:
            device.remap(response.device)
            device.learn_into(learned)
        else:
            self._reader = IndexReader.open(
                wire.block_spec(response.control),
                {index.namespace: wire.block_spec(index.block) for index in response.indexes},
                self.block,
            )
            for name, into in learned.items():
                self._reader.learn_into(name, into)
        if self.block.max_length < table.max_length:
            raise ValueError(f"the row block has rows of {self.block.max_length} tokens; {table.max_length} were asked for")
        self._groups = Groups()
        self._free = list(range(self.block.n_slots))
        self._slots: dict[Request, int] = {}
        self._ended: OrderedDict[int, tuple[Request, bool]] = OrderedDict()
        self._orphaned = False

    @property
    def name(self) -> Literal["mapped"]:
        """Which transport it is."""
        return "mapped"

    def warm_up(self, params: DraftParams) -> None:
        """Compiles what `propose` runs, so that no step waits for a compiler. Called from the session's thread."""
        if self._reader is None:
            return
        row = np.zeros(2, np.int32)
        addresses, lengths = np.array([row.ctypes.data]), np.array([len(row)])
        for name in [*self._namespace_index, ""]:
            self._reader.draft(addresses, lengths, [name], params)

    def start(self, request: Request, tokens: NDArray[np.int32]) -> bool:
        """Publishes a request in a slot; without a free one, the courier sends its tokens."""
        if request.group and self._reader is not None:
            self._groups.start(request, request.namespace, request.group, tokens[request.prompt_length :])
        slot = self._take_slot()
        if slot is None:
            self._courier.note()
            return False
        namespace = self._namespace_index[request.namespace]
        self.block.start(slot, request.kept_as, tokens, request.kept_from, namespace, False)
        self._slots[request] = slot
        request.published = True
        self._courier.knows(request)
        return True

    def append(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """Publishes what the engine committed."""
        self._groups.append(request, tokens)
        slot = self._slots.get(request)
        if slot is None:
            self._courier.note()
        else:
            self.block.append(slot, tokens)

    def append_rows(self, requests: list[Request], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Publishes what the engine committed to several requests: tokens int32 [n, w], of which counts[i] count, int64 [n]."""
        if len(self._groups):
            for i, request in enumerate(requests):
                if request.group:
                    self._groups.append(request, tokens[i, : counts[i]])
        slots = np.array([self._slots.get(request, -1) for request in requests])
        held = slots >= 0
        if not held.all():
            self._courier.note()
        self.block.append_rows(slots[held], tokens[held], counts[held])

    def finish(self, request: Request, tokens: NDArray[np.int32], discard: bool) -> None:
        """Ends a request; its slot is free once the service has taken it."""
        self._groups.finish(request, discard)
        slot = self._slots.pop(request, None)
        if slot is None:
            self._courier.finish(request, tokens, discard)
            return
        self.block.finish(slot, discard)
        self._ended[slot] = (request, discard)

    def propose(self, rows: NDArray[np.int64], params: DraftParams) -> Drafts:
        """Drafts for rows of the table; see Transport."""
        if self._reader is None:
            raise FailOpen("refused", "the index is in device memory: DeviceSession.propose drafts from it")
        table = self._table
        names = None if self._only_namespace else [request.namespace for row in rows if (request := table.requests[row])]
        groups = self._groups.texts([table.requests[row] for row in rows]) if len(self._groups) else NO_GROUPS
        try:
            return self._reader.draft(row_addresses(table.tokens, rows), table.lengths[rows].astype(np.int64), names, params, groups)
        except TornRead as error:
            raise FailOpen("torn", str(error)) from error

    def is_visible(self) -> bool:
        """The service has taken, and made visible, all that is in the slots."""
        block = self.block
        return all(block.visible_length(slot) >= block.length(slot) for slot in self._slots.values()) and all(
            block.is_drained(slot) for slot in self._ended
        )

    def heartbeat(self, response: pb.HeartbeatResponse) -> None:
        """Maps the indexes that are new, and shows that the engine lives."""
        if self._device is not None and response.HasField("device"):
            self._device.remap(response.device)
        if self._reader is not None:
            for index in response.indexes:
                self._reader.add_index(index.namespace, wire.block_spec(index.block))
        self.block.beat()

    def orphaned(self) -> None:
        """Lets ended requests give up their slots to new ones; the courier delivers them to the next service."""
        self._orphaned = True

    def close(self) -> None:
        """Notes how far the service took each request, and hands ended ones that it did not take to the courier."""
        for request, slot in self._slots.items():
            request.document_held = max(request.document_held, self.block.visible_length(slot))
            request.published = False
        self._slots.clear()
        for slot in list(self._ended):
            self._release(slot)
        if self._reader is not None:
            self._reader.close()

    def _take_slot(self) -> int | None:
        if not self._free:
            for slot in [slot for slot in self._ended if self.block.is_drained(slot)]:
                self._release(slot)
        if not self._free and self._orphaned and self._ended:
            self._release(next(iter(self._ended)))
        return self._free.pop() if self._free else None

    def _release(self, slot: int) -> None:
        """Frees an ended request's slot; what the service has not taken goes to the courier."""
        request, discard = self._ended.pop(slot)
        if not self.block.is_drained(slot):
            request.document_held = max(request.document_held, self.block.visible_length(slot))
            request.published = False
            self._courier.finish(request, self.block.tokens[slot, : self.block.length(slot)], discard)
        self._free.append(slot)
