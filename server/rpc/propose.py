"""Propose, for every kind of caller: attached over INLINE or HANDLE, and without an attachment.

A request is checked completely before any of it is taken; then its rows go to the core as one batch, on the event loop, since drafting
takes microseconds a row.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.corpus import Corpus
from draftd.drafter.drafts import Drafts
from draftd.drafter.errors import FailedPrecondition, InvalidArgument, NotFound
from draftd.drafter.groups import NO_GROUPS, GroupTexts, check_group
from draftd.drafter.params import MAX_VOCAB, DraftParams
from draftd.drafter.records import RowContext
from draftd.drafter.stats import EngineStats
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.attachments import HANDLE, INLINE, MAPPED, Attachment, Attachments, Engine
from draftd.server.config import ServerConfig
from draftd.server.metrics import Metrics
from draftd.server.names import DEFAULT_NAMESPACE, check_name
from draftd.server.rows import RowUpdate
from draftd.server.rpc.convert import add_drafts, check_batch_vocabulary, check_vocabulary, params_of, tokens_of
from draftd.server.rpc.handle import DeviceHandles
from draftd.server.telemetry import Telemetry


class Proposer:
    """Answers ProposeRequests."""

    def __init__(
        self,
        config: ServerConfig,
        corpus: Corpus,
        attachments: Attachments,
        metrics: Metrics,
        telemetry: Telemetry,
        handles: DeviceHandles,
    ) -> None:
        self._handles = handles
        self._config = config
        self._corpus = corpus
        self._attachments = attachments
        self._metrics = metrics
        self._telemetry = telemetry
        self._defaults = config.draft_params()

    def propose(self, request: pb.ProposeRequest) -> pb.ProposeResponse:
        """Drafts for a request's rows; raises DraftdError with the field and the limit."""
        attachment = self._attachments.get(request.attachment_id) if request.attachment_id else None
        if attachment is not None and attachment.device_tensors is not None:
            return self._handles.propose(request, attachment, attachment.device_tensors)
        rows = request.rows
        if not 1 <= len(rows) <= self._config.max_batch:
            raise InvalidArgument(f"rows: {len(rows)} rows; a batch has 1 to {self._config.max_batch}", "rows")
        if request.sequence or request.batch:
            field = "sequence" if request.sequence else "batch"
            raise InvalidArgument(f"{field} is for HANDLE on a GPU", field)
        return self._unattached(request) if attachment is None else self._attached(request, attachment)

    def _unattached(self, request: pb.ProposeRequest) -> pb.ProposeResponse:
        params = params_of(request.parameters, self._defaults, self._config.max_k, "the service's limit", self._config.depth)
        if not 0 <= request.vocab_size <= MAX_VOCAB:
            raise InvalidArgument(f"vocab_size is {request.vocab_size}; it must be in [0, {MAX_VOCAB}]", "vocab_size")
        contexts = []
        for i, row in enumerate(request.rows):
            name = f"rows[{i}]"
            if row.document_id or row.HasField("row_index") or row.offset:
                field = "document_id" if row.document_id else "offset" if row.offset else "row_index"
                raise InvalidArgument(f"{name}.{field} needs an attachment", f"{name}.{field}")
            check_group(row.group, f"{name}.group")
            namespace = check_name(row.namespace, f"{name}.namespace") if row.namespace else DEFAULT_NAMESPACE
            # A bare token list is answered even by a service that has seen nothing yet: from the list itself.
            known = self._corpus.has_namespace(namespace)
            if row.namespace and not known and not row.private:
                raise NotFound(f"{name}.namespace {namespace!r} does not exist", f"{name}.namespace")
            tokens = self._whole_context(row, name)
            check_vocabulary(tokens, min(request.vocab_size or MAX_VOCAB, self._corpus.vocab_size(namespace) if known else MAX_VOCAB), name)
            contexts.append(RowContext(tokens, namespace, row.private or not known))
        drafts, seconds = self._draft(contexts, params)
        counted = DEFAULT_NAMESPACE if contexts[0].private else contexts[0].namespace
        asyncio.get_running_loop().call_soon(self._count, self._telemetry.unattached(counted), INLINE, len(contexts), seconds)
        return _response(request, drafts, contexts)

    def _attached(self, request: pb.ProposeRequest, attachment: Attachment) -> pb.ProposeResponse:
        engine = attachment.engine
        params = params_of(request.parameters, self._defaults, engine.k, "the attachment's k", self._config.depth)
        if params.branches > 1 and attachment.tensors is not None:
            raise InvalidArgument(f"parameters.branches is {params.branches}; the tensors of HANDLE hold chains: 1", "parameters.branches")
        if len(request.rows) > engine.max_rows:
            raise InvalidArgument(f"rows: {len(request.rows)} rows; the attachment's max_rows is {engine.max_rows}", "rows")
        rows: list[RowUpdate] = []
        for i, sent in enumerate(request.rows):
            name = f"rows[{i}]"
            tokens = self._row_tokens(sent, attachment, name)
            namespace = self._namespace_of(sent, attachment, name)
            rows.append(RowUpdate(sent.document_id, sent.offset, tokens, sent.prompt_length, namespace, sent.private, sent.group))
        check_batch_vocabulary([row.tokens for row in rows], engine.vocab_size)
        kept = [i for i, row in enumerate(rows) if row.document_id]
        for i, row in enumerate(rows):
            self._check_row(row, attachment, f"rows[{i}]")
        updates = [rows[i] for i in kept]
        served = attachment.rows
        if served is not None:
            served.check_room(updates)
        contexts = [served.take(row) if served is not None and row.document_id else self._own_context(row, engine) for row in rows]
        groups = NO_GROUPS if served is None else served.groups_of(rows)
        drafts, seconds = self._draft(contexts, params, groups)
        if attachment.tensors is not None:
            attachment.tensors.write(drafts)
        # What follows is nobody's wait: the answer goes out first.
        later = asyncio.get_running_loop().call_soon
        if served is not None and updates:
            later(served.remember, kept, updates, drafts)
        later(self._count, attachment.stats, attachment.transport, len(rows), seconds)
        return _response(request, drafts, contexts, with_drafts=attachment.transport != HANDLE)

    def _check_row(self, row: RowUpdate, attachment: Attachment, name: str) -> None:
        if row.document_id:
            if attachment.rows is None:
                raise FailedPrecondition(
                    f"{name}.document_id: a mapped attachment keeps its rows in its row block, not in Propose", f"{name}.document_id"
                )
            attachment.rows.check(row, name)
            return
        check_group(row.group, f"{name}.group")
        if not 1 <= len(row.tokens) <= attachment.engine.max_length:
            limit = attachment.engine.max_length
            raise InvalidArgument(f"{name} has {len(row.tokens)} tokens; a row has 1 to max_length={limit}", f"{name}.tokens")

    def _own_context(self, row: RowUpdate, engine: Engine) -> RowContext:
        fits = self._corpus.has_vocabulary(row.namespace, engine.vocab_size)
        return RowContext(row.tokens, row.namespace, row.private or not fits)

    def _draft(self, contexts: list[RowContext], params: DraftParams, groups: GroupTexts = NO_GROUPS) -> tuple[Drafts, float]:
        """Drafts, and the seconds that they took."""
        started = time.perf_counter()
        drafts = self._corpus.draft_checked(contexts, params, groups)
        return drafts, time.perf_counter() - started

    def _count(self, stats: EngineStats, transport: str, rows: int, seconds: float) -> None:
        if transport != MAPPED:  # a mapped engine counts in its own block
            stats.count_proposal(rows, seconds * 1e6)
        self._metrics.batch(transport, rows, seconds)

    def _namespace_of(self, row: pb.Row, attachment: Attachment, name: str) -> str:
        namespace = row.namespace
        if not namespace or namespace == attachment.namespace:
            return attachment.namespace
        if namespace not in attachment.namespaces:
            if not self._corpus.has_namespace(check_name(namespace, f"{name}.namespace")):
                raise NotFound(f"{name}.namespace {namespace!r} does not exist", f"{name}.namespace")
            raise FailedPrecondition(f"{name}.namespace {namespace!r} is not one of the attachment's namespaces", f"{name}.namespace")
        return namespace

    def _row_tokens(self, row: pb.Row, attachment: Attachment, name: str) -> NDArray[np.int32]:
        """The tokens that a row carries, or, for HANDLE, those of its tensor from `offset` on."""
        if attachment.tensors is None:
            if row.HasField("row_index"):
                raise InvalidArgument(f"{name}.row_index is for HANDLE; this attachment is {attachment.transport}", f"{name}.row_index")
            if not row.document_id and row.offset:
                raise InvalidArgument(f"{name}.offset needs a document_id", f"{name}.offset")
            return tokens_of(row, name)
        if not row.HasField("row_index"):
            raise InvalidArgument(f"{name}.row_index is missing; HANDLE needs it", f"{name}.row_index")
        if row.packed_tokens or row.tokens:
            raise InvalidArgument(f"{name}.tokens: a row of a HANDLE attachment carries no tokens", f"{name}.tokens")
        return attachment.tensors.row(row.row_index, row.offset if row.document_id else 0, name)

    def _whole_context(self, row: pb.Row, name: str) -> NDArray[np.int32]:
        tokens = tokens_of(row, name)
        if not 1 <= len(tokens) <= self._config.max_length:
            raise InvalidArgument(f"{name} has {len(tokens)} tokens; a row has 1 to max_length={self._config.max_length}", f"{name}.tokens")
        return tokens


def _response(request: pb.ProposeRequest, drafts: Drafts, contexts: Sequence[RowContext], with_drafts: bool = True) -> pb.ProposeResponse:
    versions: dict[str, int] = {}
    for context, version in zip(contexts, drafts.version.tolist(), strict=True):
        if version:
            versions.setdefault(context.namespace, version)
    response = pb.ProposeResponse(versions=versions.values())
    if with_drafts:
        add_drafts(response, drafts, request.packed)
    return response
