"""The Drafter service: engines attach, propose, ingest and harvest.

Each method converts, validates, calls the table, the rows or the core, and converts back.
"""

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from draftd.client.wire import parameters_message
from draftd.drafter.corpus import Corpus
from draftd.drafter.device_layout import DEVICE_LAYOUT_VERSION
from draftd.drafter.documents import IngestResult
from draftd.drafter.errors import DraftdError, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from draftd.drafter.layout import LAYOUT_VERSION, MAX_DOCUMENT_ID_BYTES
from draftd.drafter.params import MAX_VOCAB
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1.draftd_pb2_grpc import DrafterServiceServicer
from draftd.server.attachments import HANDLE, INLINE, MAPPED, MAX_EXTRA_NAMESPACES, Attachment, Attachments, Engine, close_tensors
from draftd.server.config import ServerConfig
from draftd.server.fallback import Fallback, of_client
from draftd.server.metrics import Metrics
from draftd.server.names import check_fingerprint, check_name, namespace_or_default
from draftd.server.rpc.convert import block_message, check_vocabulary, lead_of, tokens_of
from draftd.server.rpc.durability import Durability
from draftd.server.rpc.errors import Context, status_of, streaming, unary
from draftd.server.rpc.gate import Gate
from draftd.server.rpc.handle import DeviceHandles
from draftd.server.rpc.propose import Proposer
from draftd.server.rpc.visibility import Visibility
from draftd.server.security.access import ACCESS
from draftd.server.telemetry import Telemetry
from draftd.server.tensors import EngineTensors

if TYPE_CHECKING:
    from draftd.server.device_handle import DeviceTensors

_TRANSPORTS = {MAPPED: pb.TRANSPORT_MAPPED, HANDLE: pb.TRANSPORT_HANDLE, INLINE: pb.TRANSPORT_INLINE}


class Drafter(DrafterServiceServicer):
    """draftd.v1.DrafterService."""

    def __init__(
        self,
        config: ServerConfig,
        corpus: Corpus,
        attachments: Attachments,
        metrics: Metrics,
        telemetry: Telemetry,
        visibility: Visibility,
        durability: Durability,
        gate: Gate,
    ) -> None:
        self.metrics = metrics
        self.gate = gate
        self._config = config
        self._corpus = corpus
        self._attachments = attachments
        self._telemetry = telemetry
        self._visibility = visibility
        self._durability = durability
        self._handles = DeviceHandles(config, corpus, attachments, metrics)
        self._proposer = Proposer(config, corpus, attachments, metrics, telemetry, self._handles)
        self._shm_root = config.shm_directory()
        self._own_blocks = corpus.directory

    @unary
    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        engine = self._engine(request)
        same_host = context.peer().startswith("unix:")
        transport, fallback = _choose_transport(request, same_host, self._unmapped(request))
        self._attachments.check_free(engine.name)
        tensors: EngineTensors | DeviceTensors | None = None
        if transport == HANDLE and request.tensors.device_uuid:
            tensors = await self._handles.open(request, engine)
        elif transport == HANDLE:
            tensors = EngineTensors.open(request.tensors, self._shm_root, self._own_blocks, engine.max_rows, engine.max_length, engine.k)
        try:
            attachment = self._attachments.attach(engine, transport, tensors)
        except (DraftdError, OSError):
            if tensors:
                await close_tensors(tensors)
            raise
        self._telemetry.attached(attachment, fallback)
        response = pb.AttachResponse(
            attachment_id=attachment.id,
            lease_ms=self._attachments.lease_ms,
            transport=_TRANSPORTS[transport],
            fallback_reason=fallback.text if fallback else "",
            instance=self._corpus.instance,
            defaults=parameters_message(self._config.draft_params()),
        )
        if attachment.device_tensors is not None:
            response.sequence_words = attachment.device_tensors.words.path
        if attachment.row_block:
            response.rows.CopyFrom(block_message(attachment.row_block))
            device = self._device_map(attachment, [])
            if device is not None:
                response.device.CopyFrom(device)
            else:
                response.control.CopyFrom(block_message(self._corpus.control_spec()))
                response.indexes.extend(self._index_maps(attachment, []))
        return response

    @unary
    async def Detach(self, request: pb.DetachRequest, context: Context) -> pb.DetachResponse:
        attachment = self._attachments.get(request.attachment_id)
        committed = await self._attachments.detach(attachment)
        self._telemetry.detached(attachment)
        return pb.DetachResponse(committed_documents=committed)

    @unary
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        attachment = self._attachments.get(request.attachment_id)
        extra = _extra_namespaces(request.extra_namespaces)
        self._attachments.add_namespaces(attachment, extra)
        response = pb.HeartbeatResponse(lease_ms=self._attachments.lease_ms)
        if attachment.ticket:
            device = self._device_map(attachment, extra)
            if device is not None:
                response.device.CopyFrom(device)
        else:
            response.indexes.extend(self._index_maps(attachment, extra))
        return response

    @unary
    async def Propose(self, request: pb.ProposeRequest, context: Context) -> pb.ProposeResponse:
        return self._proposer.propose(request)

    @streaming
    async def ProposeStream(
        self, request_iterator: AsyncIterator[pb.ProposeStreamRequest], context: Context
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        async for item in request_iterator:
            try:
                if not self.gate.is_open:
                    await self.gate.enter("ProposeStream", ACCESS["ProposeStream"].namespaces, item)
                yield pb.ProposeStreamResponse(sequence=item.sequence, response=self._proposer.propose(item.request))
            except Exception as error:  # noqa: BLE001 - answered on the stream, counted and logged by status_of
                code, message = status_of(error, "ProposeStream", self.metrics)
                number: int = code.value[0]
                yield pb.ProposeStreamResponse(sequence=item.sequence, code=number, message=message)

    @unary
    async def Ingest(self, request: pb.IngestRequest, context: Context) -> pb.IngestResponse:
        documents = request.documents
        if not 1 <= len(documents) <= self._config.max_batch:
            raise InvalidArgument(f"documents: {len(documents)} documents; a request has 1 to {self._config.max_batch}", "documents")
        self._durability.check(request.wait_durable)
        attachment = self._attachments.get(request.attachment_id) if request.attachment_id else None
        namespace = self._ingest_namespace(request, attachment)
        exists = self._corpus.has_namespace(namespace)
        if not exists and not request.vocab_size:
            raise NotFound(f"namespace {namespace!r} does not exist; give vocab_size to create it", "namespace")
        if request.vocab_size:
            _check_vocab_size(request.vocab_size)
        vocab_size = self._corpus.vocab_size(namespace) if exists else request.vocab_size
        if request.vocab_size not in (0, vocab_size):
            raise FailedPrecondition(f"vocab_size is {request.vocab_size}; namespace {namespace!r} has {vocab_size}", "vocab_size")
        checked, leads = [], []
        for i, document in enumerate(documents):
            name = f"documents[{i}]"
            _check_document_id(document.document_id, name)
            tokens = tokens_of(document, name)
            check_vocabulary(tokens, vocab_size, name)
            lead = lead_of(document, name)
            if len(lead) > self._config.max_length:
                raise InvalidArgument(
                    f"{name}.packed_lead has {len(lead)} tokens; at most max_length={self._config.max_length}", f"{name}.packed_lead"
                )
            check_vocabulary(lead, vocab_size, f"{name}.packed_lead")
            leads.append(lead)
            if document.offset < 0 or document.offset + len(tokens) > self._config.max_length:
                raise InvalidArgument(
                    f"{name}.offset is {document.offset}, with {len(tokens)} tokens; a document has at most max_length="
                    f"{self._config.max_length}",
                    f"{name}.offset",
                )
            checked.append(tokens)
        if not exists:
            self._attachments.check_room([namespace])
            self._corpus.ensure_namespace(namespace, vocab_size)
        owner = attachment.id if attachment else ""
        results = []
        for i, (document, tokens, lead) in enumerate(zip(documents, checked, leads, strict=True)):
            try:
                result = self._corpus.ingest(namespace, document.document_id, document.offset, tokens, document.complete, owner, lead)
            except DraftdError as error:
                raise type(error)(f"documents[{i}]: {error}", f"documents[{i}].{error.field}") from None
            results.append(_result(document.document_id, result))
        self._count_kept(namespace, "ingest", results)
        if request.wait_visible:
            await self._visibility.wait(context)
        if request.wait_durable:
            await self._durability.wait(context)
        return pb.IngestResponse(results=results)

    @unary
    async def Harvest(self, request: pb.HarvestRequest, context: Context) -> pb.HarvestResponse:
        attachment = self._attachments.get(request.attachment_id)
        engine = attachment.engine
        if attachment.rows is None:
            raise FailedPrecondition("attachment_id: a mapped attachment finishes rows in its row block", "attachment_id")
        if not 1 <= len(request.rows) <= engine.max_rows:
            raise InvalidArgument(f"rows: {len(request.rows)} rows; a request has 1 to {engine.max_rows}, max_rows", "rows")
        self._durability.check(request.wait_durable)
        checked = []
        for i, row in enumerate(request.rows):
            _check_document_id(row.document_id, f"rows[{i}]")
        on_device = attachment.device_tensors
        if on_device is not None:
            for done in await self._handles.finished_rows(request, attachment, on_device):
                start = done.sent.prompt_length
                checked.append((done.sent, start, done.tokens[start:], done.name))
        elif request.sequence:
            raise InvalidArgument("sequence is for HANDLE on a GPU", "sequence")
        for i, row in enumerate(request.rows if on_device is None else ()):
            name = f"rows[{i}]"
            offset = row.offset
            if row.HasField("row_index"):
                if attachment.tensors is None:
                    raise InvalidArgument(f"{name}.row_index is for HANDLE; this attachment is inline", f"{name}.row_index")
                offset = offset or attachment.rows.held(row.document_id)
                tokens = attachment.tensors.row(row.row_index, offset, name)
            else:
                tokens = tokens_of(row, name)
            check_vocabulary(tokens, engine.vocab_size, name)
            attachment.rows.check_harvest(row.document_id, offset, tokens, name)
            checked.append((row, offset, tokens, name))
        results = []
        for row, offset, tokens, name in checked:
            result = attachment.rows.harvest(
                row.document_id, offset, tokens, row.discard, name, partial(self._end_any, attachment, row.discard)
            )
            results.append(_result(row.document_id, result))
        self._count_kept(attachment.namespace, "harvest", results)
        if request.wait_visible:
            await self._visibility.wait(context)
        if request.wait_durable:
            await self._durability.wait(context)
        return pb.HarvestResponse(results=results)

    def _end_any(self, attachment: Attachment, discard: bool, document_id: str) -> IngestResult | None:
        """Commits or discards a document that the attachment opened by Ingest; None if no namespace of the attachment has it."""
        end = self._corpus.discard if discard else self._corpus.commit
        for namespace in attachment.namespaces:
            try:
                return end(namespace, document_id, attachment.id)
            except NotFound:
                continue
        return None

    def _engine(self, request: pb.AttachRequest) -> Engine:
        """Checks what an engine declares against the service's limits."""
        check_name(request.engine, "engine")
        namespaces = [namespace_or_default(request.namespace), *_extra_namespaces(request.extra_namespaces)]
        check_fingerprint(request.tokenizer_fingerprint)
        _check_vocab_size(request.vocab_size)
        for field, limit in (("k", self._config.max_k), ("max_rows", self._config.max_rows), ("max_length", self._config.max_length)):
            value: int = getattr(request, field)
            if not 1 <= value <= limit:
                raise InvalidArgument(f"{field} is {value}; it must be in [1, {limit}], the service's limit", field)
        return Engine(
            name=request.engine,
            namespaces=tuple(dict.fromkeys(namespaces)),
            vocab_size=request.vocab_size,
            fingerprint=request.tokenizer_fingerprint,
            k=request.k,
            max_rows=request.max_rows,
            max_length=request.max_length,
            device_uuid=request.device_uuid,
        )

    def _ingest_namespace(self, request: pb.IngestRequest, attachment: Attachment | None) -> str:
        if attachment is None:
            return namespace_or_default(request.namespace)
        if not request.namespace:
            return attachment.namespace
        if check_name(request.namespace, "namespace") not in attachment.namespaces:
            raise FailedPrecondition(f"namespace {request.namespace!r} is not one of the attachment's namespaces", "namespace")
        return request.namespace

    def _index_maps(self, attachment: Attachment, wanted: list[str]) -> list[pb.IndexMap]:
        if attachment.transport != MAPPED:
            return []
        return [
            pb.IndexMap(namespace=name, block=block_message(spec)) for name, spec in self._attachments.changed_indexes(attachment, wanted)
        ]

    def _unmapped(self, request: pb.AttachRequest) -> str:
        """Why an engine on that device cannot map the index; empty if it can."""
        gpus, device = self._corpus.device_indexes, self._corpus.config.device
        if not gpus:
            return "the index is in host memory, not on the engine's GPU" if request.device_uuid else ""
        own = next((part for part in gpus if part.uuid == request.device_uuid), None)
        if own is None:
            return f"the index is on {device}, the engine {'on another GPU' if request.device_uuid else 'on none'}"
        if own.memory.sharing_failure:
            return f"the index is on {own.memory.device}, which other processes cannot map: {own.memory.sharing_failure}"
        return ""

    def _device_map(self, attachment: Attachment, wanted: list[str]) -> pb.DeviceMap | None:
        """What a MAPPED engine on a GPU has to map, if anything has changed since it was told."""
        memory, uuid = self._attachments.memory, attachment.engine.device_uuid
        if memory is None or not attachment.ticket or not self._attachments.has_changed_memory(attachment, wanted):
            return None
        return pb.DeviceMap(device_uuid=uuid, layout_version=DEVICE_LAYOUT_VERSION, socket=str(memory.path), ticket=attachment.ticket)

    def _count_kept(self, namespace: str, via: str, results: list[pb.DocumentResult]) -> None:
        kept = sum(result.kept_tokens for result in results)
        self.metrics.count("draftd_ingest_tokens_total", self.metrics.namespace_label(namespace), via, amount=kept)


def _choose_transport(request: pb.AttachRequest, same_host: bool, unmapped: str) -> tuple[str, Fallback | None]:
    """The transport of an attachment, and why it is not the wanted one, if it is not.

    Args:
        unmapped: Why an engine on that device cannot map the index; empty if it can.

    Raises:
        FailedPrecondition: The engine asks for what this service or its place cannot do, with the reason.
    """
    if request.transport == pb.TRANSPORT_HANDLE:
        if not same_host:
            raise FailedPrecondition("transport HANDLE needs the Unix socket: tensors are files of the service's host", "transport")
        return HANDLE, None
    if request.HasField("tensors"):
        raise InvalidArgument("tensors are for HANDLE only", "tensors")
    if request.transport == pb.TRANSPORT_INLINE:
        return INLINE, of_client(request.unmapped_reason)
    if request.transport not in (pb.TRANSPORT_UNSPECIFIED, pb.TRANSPORT_MAPPED):
        raise InvalidArgument(f"transport {request.transport} is not known", "transport")
    if unmapped:
        if request.transport == pb.TRANSPORT_MAPPED:
            raise FailedPrecondition(f"transport MAPPED: {unmapped}", "transport")
        return INLINE, Fallback("device", unmapped)
    if not same_host:
        return INLINE, Fallback("host", "MAPPED needs the Unix socket: the index is in the memory of the service's host")
    if request.layout_version != LAYOUT_VERSION:
        reason = f"layout_version is {request.layout_version}; the service's is {LAYOUT_VERSION}"
        if request.transport == pb.TRANSPORT_MAPPED:
            raise FailedPrecondition(reason, "layout_version")
        return INLINE, Fallback("layout", reason)
    return MAPPED, None


def _extra_namespaces(names: object) -> list[str]:
    extra = list(names)  # type: ignore[call-overload]
    if len(extra) > MAX_EXTRA_NAMESPACES:
        raise ResourceExhausted(f"extra_namespaces: {len(extra)} names; the limit is {MAX_EXTRA_NAMESPACES}", "extra_namespaces")
    return [check_name(name, f"extra_namespaces[{i}]") for i, name in enumerate(extra)]


def _check_vocab_size(vocab_size: int) -> None:
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise InvalidArgument(f"vocab_size is {vocab_size}; it must be in [1, {MAX_VOCAB}]", "vocab_size")


def _check_document_id(document_id: str, name: str) -> None:
    if not 1 <= len(document_id.encode()) <= MAX_DOCUMENT_ID_BYTES:
        raise InvalidArgument(f"{name}.document_id must have 1 to {MAX_DOCUMENT_ID_BYTES} bytes", f"{name}.document_id")


def _result(document_id: str, result: IngestResult) -> pb.DocumentResult:
    return pb.DocumentResult(
        document_id=document_id, kept_tokens=result.kept_tokens, total_tokens=result.total_tokens, committed=result.committed
    )
