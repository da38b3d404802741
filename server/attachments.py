"""Attachments of engines: who is attached, over which transport, and until when.

The table makes and ends attachments, and ends those whose lease runs out. It knows no protobuf service and no metric.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import AlreadyExists, NotFound, ResourceExhausted
from draftd.drafter.layout import BlockSpec
from draftd.drafter.stats import EngineStats
from draftd.server.rows import ServedRows
from draftd.server.security.access import ACCESS
from draftd.server.security.principal import CALLER, PermissionDenied, Principal
from draftd.server.security.quotas import check_attachments, check_namespaces
from draftd.server.tensors import EngineTensors

if TYPE_CHECKING:
    from draftd.server.device_handle import DeviceTensors, TensorSharing
    from draftd.server.memory_socket import MemorySocket

MAPPED = "mapped"
HANDLE = "handle"
INLINE = "inline"
MAX_EXTRA_NAMESPACES = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine declared when it attached; `namespaces` has the attachment's own first."""

    name: str
    namespaces: tuple[str, ...]
    vocab_size: int
    fingerprint: str
    k: int
    max_rows: int
    max_length: int
    device_uuid: str = ""


@dataclass(slots=True, eq=False)
class Attachment:
    """A live attachment.

    Attributes:
        namespaces: Namespaces that its rows may use, its own first.
        deadline: End of its lease on the clock of time.monotonic, seconds.
        stats: What was counted for it; for MAPPED, a copy of what the engine counted in its block.
        rows: Rows that the service keeps; None for MAPPED.
        tensors: The engine's tensors; for HANDLE only, as are device_tensors, where they are on a GPU.
        row_block: The engine's row block; for MAPPED only.
        sent_indexes: Handle of each index that the engine was told of; for MAPPED only.
        ticket: Names it at the memory socket; for MAPPED on a GPU only.
        caller: The principal that made it, as it was when it last named the attachment; None without tokens.
    """

    id: str
    engine: Engine
    transport: str
    namespaces: list[str]
    deadline: float
    stats: EngineStats
    rows: ServedRows | None = None
    tensors: EngineTensors | None = None
    device_tensors: "DeviceTensors | None" = None
    row_block: BlockSpec | None = None
    sent_indexes: dict[str, str] = field(default_factory=dict)
    ticket: str = ""
    caller: Principal | None = None

    @property
    def namespace(self) -> str:
        """The namespace of rows that name none."""
        return self.namespaces[0]


class Attachments:
    """The table of live attachments. The service's event loop is its only caller.

    Attributes:
        asleep: Names of namespaces that are in the store only.
        memory: Hands device memory to engines that map; None where the indexes are not in any, or it cannot be shared.
        sharing: What engines share with the service on the GPU; None before the first does.
    """

    def __init__(self, corpus: Corpus, lease_ms: int, max_attachments: int, memory: "MemorySocket | None" = None) -> None:
        self.memory = memory
        self.sharing: TensorSharing | None = None
        self.asleep: Callable[[], Iterable[str]] = tuple
        self._corpus = corpus
        self._max_attachments = max_attachments
        self._by_id: dict[str, Attachment] = {}
        self.lease_ms = lease_ms

    def __iter__(self) -> Iterator[Attachment]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists if an engine of that name and of the caller is attached, ResourceExhausted if it has its quota of
        attachments or the table is full."""
        owner = _name(CALLER.get())
        owned = [attachment for attachment in self._by_id.values() if _name(attachment.caller) == owner]
        if any(attachment.engine.name == name for attachment in owned):
            raise AlreadyExists(f"engine {name!r} is attached; detach it, or wait until its lease of {self.lease_ms} ms ends", "engine")
        check_attachments(len(owned))
        if len(self._by_id) >= self._max_attachments:
            raise ResourceExhausted(
                f"engine: {len(self._by_id)} engines are attached; the limit is max_attachments={self._max_attachments}"
            )

    def attach(self, engine: Engine, transport: str, tensors: "EngineTensors | DeviceTensors | None" = None) -> Attachment:
        """Makes an attachment; creates or checks its namespaces.

        Raises:
            AlreadyExists, ResourceExhausted: See check_free.
            FailedPrecondition: A namespace has another vocabulary or tokenizer.
        """
        self.check_free(engine.name)
        self.ensure_namespaces(engine, engine.namespaces)
        attachment = Attachment(
            id=secrets.token_hex(8),
            engine=engine,
            transport=transport,
            namespaces=list(engine.namespaces),
            deadline=0.0,
            stats=EngineStats(),
            tensors=tensors if isinstance(tensors, EngineTensors) else None,
            device_tensors=None if isinstance(tensors, EngineTensors) else tensors,
            caller=CALLER.get(),
        )
        if transport == MAPPED:
            attachment.row_block = self._corpus.rows.attach(attachment.id, engine.max_rows, engine.max_length, attachment.namespaces)
            if self.memory is not None and engine.device_uuid:
                attachment.ticket = self.memory.grant(attachment.id, engine.device_uuid, attachment.namespaces)
        else:
            fits = partial(self._corpus.has_vocabulary, vocab_size=engine.vocab_size)
            grouped = transport == INLINE and self._corpus.config.device == "cpu"
            attachment.rows = ServedRows(self._corpus, fits, attachment.id, attachment.stats, engine.max_rows, engine.max_length, grouped)
        self.touch(attachment)
        self._by_id[attachment.id] = attachment
        return attachment

    def get(self, attachment_id: str) -> Attachment:
        """A live attachment, with its lease extended.

        Raises:
            NotFound: There is none.
            PermissionDenied: It is another principal's, or the caller's scope has shrunk since it attached.
        """
        attachment = self._by_id.get(attachment_id)
        if attachment is None:
            raise NotFound("attachment_id names no live attachment; attach again", "attachment_id")
        caller = CALLER.get()
        if caller is not None and caller is not attachment.caller:
            if caller.name != _name(attachment.caller):
                raise PermissionDenied(f"attachment_id is not an attachment of {caller.name!r}", "attachment_id")
            caller.check(ACCESS["Attach"].rights, attachment.namespaces)
            attachment.caller = caller
        self.touch(attachment)
        return attachment

    def find(self, attachment_id: str) -> Attachment | None:
        """A live attachment whose lease stays as it is; for those who report, not for those who act."""
        return self._by_id.get(attachment_id)

    def touch(self, attachment: Attachment) -> None:
        """Starts the attachment's lease anew."""
        attachment.deadline = time.monotonic() + self.lease_ms / 1000

    def add_namespaces(self, attachment: Attachment, names: list[str]) -> None:
        """Lets an attachment's rows use further namespaces; FailedPrecondition if one has another vocabulary or tokenizer."""
        new = [name for name in dict.fromkeys(names) if name not in attachment.namespaces]
        if len(attachment.namespaces) + len(new) > MAX_EXTRA_NAMESPACES + 1:
            raise ResourceExhausted(f"extra_namespaces: the limit is {MAX_EXTRA_NAMESPACES} an attachment", "extra_namespaces")
        self.ensure_namespaces(attachment.engine, [*new, *(name for name in names if name not in new)])
        if new:
            attachment.namespaces += new
            if attachment.transport == MAPPED:
                self._corpus.rows.set_namespaces(attachment.id, attachment.namespaces)

    def ensure_namespaces(self, engine: Engine, names: list[str] | tuple[str, ...]) -> None:
        """Creates or checks namespaces, those that exist first: one that does not fit is refused before any is created.

        Raises:
            FailedPrecondition: A namespace has another vocabulary or tokenizer.
            ResourceExhausted: See check_room.
        """
        self.check_room(names)
        for name in sorted(names, key=lambda name: not self._corpus.has_namespace(name)):
            self._corpus.ensure_namespace(name, engine.vocab_size, engine.fingerprint)

    def check_room(self, names: Iterable[str]) -> None:
        """Raises ResourceExhausted if the caller may not make those of the namespaces that do not exist."""
        check_namespaces(names, [*self._corpus.names(), *self.asleep()])

    def users(self, namespace: str) -> int:
        """Live attachments that use a namespace."""
        return sum(namespace in attachment.namespaces for attachment in self._by_id.values())

    def changed_indexes(self, attachment: Attachment, wanted: list[str]) -> list[tuple[str, BlockSpec]]:
        """Index blocks that a MAPPED engine has to map: of the namespaces in `wanted`, and those that changed since it was told."""
        return [(name, self._corpus.index_spec(name)) for name in self._changed(attachment, wanted)]

    def has_changed_memory(self, attachment: Attachment, wanted: list[str]) -> bool:
        """A MAPPED engine has to map device memory anew; see changed_indexes."""
        return bool(self._changed(attachment, wanted))

    def _changed(self, attachment: Attachment, wanted: list[str]) -> list[str]:
        changed = []
        for name in attachment.namespaces:
            if self._corpus.has_vocabulary(name, attachment.engine.vocab_size):
                handle = self._corpus.index_handle(name)
                if name in wanted or attachment.sent_indexes.get(name) != handle:
                    attachment.sent_indexes[name] = handle
                    changed.append(name)
        return changed

    def refresh_stats(self, attachment: Attachment) -> None:
        """Copies what a MAPPED engine counted in its block; nothing to do for others."""
        if attachment.transport == MAPPED:
            attachment.stats.words[:] = self._corpus.rows.stats(attachment.id).words

    async def detach(self, attachment: Attachment) -> int:
        """Ends an attachment and commits its open documents; answers their number, 0 if it has ended already."""
        if self._by_id.pop(attachment.id, None) is None:
            return 0
        committed = 0
        if attachment.rows is not None:
            attachment.rows.keep_up()
        if attachment.transport == MAPPED:
            self.refresh_stats(attachment)
            if self.memory is not None and attachment.ticket:
                self.memory.revoke(attachment.ticket, attachment.id)
            committed += await asyncio.get_running_loop().run_in_executor(None, self._corpus.rows.detach, attachment.id)
        tensors = attachment.tensors or attachment.device_tensors
        if tensors is not None:
            await close_tensors(tensors)
        return committed + self._corpus.commit_owned(attachment.id)

    def expired(self) -> list[Attachment]:
        """Attachments whose lease has run out."""
        now = time.monotonic()
        return [attachment for attachment in self._by_id.values() if attachment.deadline < now]

    def forgive(self, seconds: float) -> None:
        """Extends every lease, after the service itself was held up for that long."""
        for attachment in self._by_id.values():
            attachment.deadline += seconds


async def close_tensors(tensors: "EngineTensors | DeviceTensors") -> None:
    """Gives an engine's tensors back."""
    if isinstance(tensors, EngineTensors):
        tensors.close()
    else:
        tensors.stop()
        await asyncio.get_running_loop().run_in_executor(None, tensors.close)


def _name(principal: Principal | None) -> str:
    return principal.name if principal else ""
