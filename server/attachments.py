"""Attachments of engines: who is attached, over which transport, and until when.

The table makes and ends attachments, and ends those whose lease runs out. It knows no protobuf service and no metric.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import AlreadyExists, NotFound, ResourceExhausted
from draftd.drafter.layout import BlockSpec
from draftd.drafter.stats import EngineStats
from draftd.server.rows import ServedRows
from draftd.server.security.access import ACCESS
from draftd.server.security.principal import CALLER, PermissionDenied, Principal
from draftd.server.tensors import EngineTensors

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


@dataclass(slots=True, eq=False)
class Attachment:
    """A live attachment.

    Attributes:
        namespaces: Namespaces that its rows may use, its own first.
        deadline: End of its lease on the clock of time.monotonic, seconds.
        stats: What was counted for it; for MAPPED, a copy of what the engine counted in its block.
        rows: Rows that the service keeps; None for MAPPED.
        tensors: The engine's tensors; for HANDLE only.
        row_block: The engine's row block; for MAPPED only.
        sent_indexes: Handle of each index that the engine was told of; for MAPPED only.
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
    row_block: BlockSpec | None = None
    sent_indexes: dict[str, str] = field(default_factory=dict)
    caller: Principal | None = None

    @property
    def namespace(self) -> str:
        """The namespace of rows that name none."""
        return self.namespaces[0]


class Attachments:
    """The table of live attachments. The service's event loop is its only caller."""

    def __init__(self, corpus: Corpus, lease_ms: int, max_attachments: int) -> None:
        self._corpus = corpus
        self._max_attachments = max_attachments
        self._by_id: dict[str, Attachment] = {}
        self.lease_ms = lease_ms

    def __iter__(self) -> Iterator[Attachment]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def check_free(self, name: str) -> None:
        """Raises AlreadyExists if an engine of that name and of the caller is attached, ResourceExhausted if the table is full."""
        owner = _name(CALLER.get())
        if any(attachment.engine.name == name and _name(attachment.caller) == owner for attachment in self._by_id.values()):
            raise AlreadyExists(f"engine {name!r} is attached; detach it, or wait until its lease of {self.lease_ms} ms ends", "engine")
        if len(self._by_id) >= self._max_attachments:
            raise ResourceExhausted(
                f"engine: {len(self._by_id)} engines are attached; the limit is max_attachments={self._max_attachments}"
            )

    def attach(self, engine: Engine, transport: str, tensors: EngineTensors | None = None) -> Attachment:
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
            tensors=tensors,
            caller=CALLER.get(),
        )
        if transport == MAPPED:
            attachment.row_block = self._corpus.attach_rows(attachment.id, engine.max_rows, engine.max_length, attachment.namespaces)
        else:
            fits = partial(self._corpus.has_vocabulary, vocab_size=engine.vocab_size)
            attachment.rows = ServedRows(self._corpus, fits, attachment.id, attachment.stats, engine.max_rows, engine.max_length)
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
                self._corpus.set_row_namespaces(attachment.id, attachment.namespaces)

    def ensure_namespaces(self, engine: Engine, names: list[str] | tuple[str, ...]) -> None:
        """Creates or checks namespaces, those that exist first: one that does not fit is refused before any is created."""
        for name in sorted(names, key=lambda name: not self._corpus.has_namespace(name)):
            self._corpus.ensure_namespace(name, engine.vocab_size, engine.fingerprint)

    def users(self, namespace: str) -> int:
        """Live attachments that use a namespace."""
        return sum(namespace in attachment.namespaces for attachment in self._by_id.values())

    def changed_indexes(self, attachment: Attachment, wanted: list[str]) -> list[tuple[str, BlockSpec]]:
        """Index blocks that a MAPPED engine has to map: of the namespaces in `wanted`, and those that changed since it was told."""
        changed = []
        for name in attachment.namespaces:
            if self._corpus.has_vocabulary(name, attachment.engine.vocab_size):
                spec = self._corpus.index_spec(name)
                if name in wanted or attachment.sent_indexes.get(name) != spec.handle:
                    attachment.sent_indexes[name] = spec.handle
                    changed.append((name, spec))
        return changed

    def refresh_stats(self, attachment: Attachment) -> None:
        """Copies what a MAPPED engine counted in its block; nothing to do for others."""
        if attachment.transport == MAPPED:
            attachment.stats.words[:] = self._corpus.row_stats(attachment.id).words

    async def detach(self, attachment: Attachment) -> int:
        """Ends an attachment and commits its open documents; answers their number, 0 if it has ended already."""
        if self._by_id.pop(attachment.id, None) is None:
            return 0
        committed = 0
        if attachment.rows is not None:
            attachment.rows.keep_up()
        if attachment.transport == MAPPED:
            self.refresh_stats(attachment)
            committed += await asyncio.get_running_loop().run_in_executor(None, self._corpus.detach_rows, attachment.id)
        if attachment.tensors:
            attachment.tensors.close()
        return committed + self._corpus.commit_owned(attachment.id)

    def expired(self) -> list[Attachment]:
        """Attachments whose lease has run out."""
        now = time.monotonic()
        return [attachment for attachment in self._by_id.values() if attachment.deadline < now]

    def forgive(self, seconds: float) -> None:
        """Extends every lease, after the service itself was held up for that long."""
        for attachment in self._by_id.values():
            attachment.deadline += seconds


def _name(principal: Principal | None) -> str:
    return principal.name if principal else ""
