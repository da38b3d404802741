"""The Corpus service: namespaces, explanations, export and import, for people and tools."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import FailedPrecondition, InvalidArgument, NotFound
from draftd.drafter.layout import MAX_DOCUMENT_ID_BYTES
from draftd.drafter.params import MAX_VOCAB
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1.draftd_pb2_grpc import CorpusServiceServicer
from draftd.server.attachments import Attachments
from draftd.server.config import ServerConfig
from draftd.server.metrics import Metrics
from draftd.server.names import check_fingerprint, namespace_or_default
from draftd.server.rpc.convert import (
    check_vocabulary,
    explain_message,
    namespace_message,
    params_of,
    replication_message,
    store_message,
    tokens_of,
)
from draftd.server.rpc.durability import Durability
from draftd.server.rpc.errors import Context, streaming, unary
from draftd.server.rpc.gate import Gate
from draftd.server.security.principal import CALLER, PermissionDenied
from draftd.server.store.store import Store

if TYPE_CHECKING:
    from draftd.server.replicate.replicator import Replicator

_EXPORT_BYTES = 2**20
_EXPLAIN_LIMIT = 1000
_EXPLAIN_DEFAULT = 10
MAX_GENERATION = 2**31 - 1


class CorpusRpc(CorpusServiceServicer):
    """draftd.v1.CorpusService."""

    def __init__(
        self,
        config: ServerConfig,
        corpus: Corpus,
        attachments: Attachments,
        metrics: Metrics,
        store: Store | None,
        durability: Durability,
        gate: Gate,
        replicator: "Replicator | None" = None,
    ) -> None:
        self.metrics = metrics
        self.gate = gate
        self._store = store
        self._replicator = replicator
        self._durability = durability
        self._config = config
        self._corpus = corpus
        self._attachments = attachments

    @unary
    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Context) -> pb.ListNamespacesResponse:
        caller = CALLER.get()
        states: list[pb.Namespace] = [namespace_message(info, self._attachments.users(info.name)) for info in self._corpus.namespaces()]
        if self.gate.sleepers:
            states += [namespace_message(info, 0, asleep=True) for info in self.gate.sleepers.infos()]
        states = [state for state in states if caller is None or caller.may("read", state.name)]
        states.sort(key=lambda state: state.name)
        response = pb.ListNamespacesResponse(namespaces=states)
        # What follows is about all namespaces.
        if caller is None or caller.may_everywhere("read"):
            if self._store:
                response.store.CopyFrom(store_message(self._store))
            if self._replicator:
                response.replication.CopyFrom(replication_message(self._replicator.state()))
        return response

    @unary
    async def GetNamespace(self, request: pb.GetNamespaceRequest, context: Context) -> pb.GetNamespaceResponse:
        if self.gate.sleepers and (info := self.gate.sleepers.info(namespace_or_default(request.namespace))):
            return pb.GetNamespaceResponse(namespace=namespace_message(info, 0, asleep=True))
        name = self._existing(request.namespace)
        return pb.GetNamespaceResponse(namespace=namespace_message(self._corpus.namespace(name), self._attachments.users(name)))

    @unary
    async def DropNamespace(self, request: pb.DropNamespaceRequest, context: Context) -> pb.DropNamespaceResponse:
        if not request.namespace:
            raise InvalidArgument("namespace must be given", "namespace")
        if self.gate.sleepers and (info := self.gate.sleepers.drop(request.namespace)):
            return pb.DropNamespaceResponse(documents=info.documents, tokens=info.tokens)
        name = self._existing(request.namespace)
        users = self._attachments.users(name)
        if users and not request.force:
            raise FailedPrecondition(f"namespace {name!r} is used by {users} attachments; detach them, or set force", "namespace")
        documents, tokens = self._corpus.drop_namespace(name)
        return pb.DropNamespaceResponse(documents=documents, tokens=tokens)

    @unary
    async def AdvanceGeneration(self, request: pb.AdvanceGenerationRequest, context: Context) -> pb.AdvanceGenerationResponse:
        name = self._existing(request.namespace)
        keep = request.keep_generations
        if not 0 <= keep <= MAX_GENERATION:
            raise InvalidArgument(f"keep_generations is {keep}; it must be in [0, {MAX_GENERATION}]", "keep_generations")
        generation, evicted_tokens = self._corpus.advance_generation(name, keep or None)
        return pb.AdvanceGenerationResponse(generation=generation, evicted_tokens=evicted_tokens)

    @unary
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        name = self._existing(request.namespace)
        tokens = tokens_of(request, "request")
        if not 1 <= len(tokens) <= self._config.max_length:
            raise InvalidArgument(f"tokens: {len(tokens)} tokens; a context has 1 to max_length={self._config.max_length}", "tokens")
        check_vocabulary(tokens, self._corpus.vocab_size(name), "request")
        if not 0 <= request.limit <= _EXPLAIN_LIMIT:
            raise InvalidArgument(f"limit is {request.limit}; it must be in [0, {_EXPLAIN_LIMIT}]", "limit")
        config = self._config
        params = params_of(request.parameters, config.draft_params(), config.max_k, "the service's limit", config.depth)
        return explain_message(self._corpus.explain(name, tokens, params, request.limit or _EXPLAIN_DEFAULT), self._corpus.namespace(name))

    @streaming
    async def Export(self, request: pb.ExportRequest, context: Context) -> AsyncIterator[pb.ExportResponse]:
        name = self._existing(request.namespace)
        info = self._corpus.namespace(name)
        message = pb.ExportResponse(
            total_documents=self._corpus.document_count(name),
            vocab_size=info.vocab_size,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            generation=info.generation,
        )
        first, size = True, 0
        for document in self._corpus.documents(name):
            packed = b"" if request.ids_only else document.tokens.astype("<i4", copy=False).tobytes()
            taken = len(packed) or len(document.document_id)
            if size and size + taken > _EXPORT_BYTES:
                yield message
                message, first, size = pb.ExportResponse(), False, 0
                await asyncio.sleep(0)
            message.documents.add(
                document_id=document.document_id,
                packed_tokens=packed,
                generation=document.generation,
                committed_us=document.committed_us,
            )
            size += taken
        if first or size:
            yield message

    @unary
    async def Import(self, request_iterator: AsyncIterator[pb.ImportRequest], context: Context) -> pb.ImportResponse:
        name = ""
        vocab_size = 0
        response = pb.ImportResponse()
        async for request in request_iterator:
            first, name = not name, name or namespace_or_default(request.namespace)
            # It may have fallen asleep since the message before.
            if self.gate.sleepers:
                await self.gate.sleepers.wake((name,))
            if first:
                vocab_size = self._import_vocabulary(request, name)
                self._attachments.check_room([name])
                self._corpus.ensure_namespace(name, vocab_size, check_fingerprint(request.tokenizer_fingerprint))
            checked = [self._checked(document, vocab_size, f"documents[{i}]") for i, document in enumerate(request.documents)]
            self._check_generations(request, name)
            for i, (document, tokens) in enumerate(zip(request.documents, checked, strict=True)):
                kept = self._corpus.add(name, document.document_id, tokens, document.generation)
                response.documents += kept > 0
                response.tokens += kept
                response.skipped_documents += not kept
                if i % 64 == 63:
                    await asyncio.sleep(0)
        if not name:
            raise InvalidArgument("namespace: the stream has no message", "namespace")
        self.metrics.count("draftd_ingest_tokens_total", self.metrics.namespace_label(name), "import", amount=response.tokens)
        response.durable = await self._durability.wait(context)
        return response

    def _import_vocabulary(self, request: pb.ImportRequest, name: str) -> int:
        if not request.vocab_size and self._corpus.has_namespace(name):
            return self._corpus.vocab_size(name)
        if not 1 <= request.vocab_size <= MAX_VOCAB:
            raise InvalidArgument(f"vocab_size is {request.vocab_size}; it must be in [1, {MAX_VOCAB}]", "vocab_size")
        return request.vocab_size

    def _checked(self, document: pb.StoredDocument, vocab_size: int, name: str) -> NDArray[np.int32]:
        """A document's tokens, int32 [n]; raises what is wrong with it."""
        if not 1 <= len(document.document_id.encode()) <= MAX_DOCUMENT_ID_BYTES:
            raise InvalidArgument(f"{name}.document_id must have 1 to {MAX_DOCUMENT_ID_BYTES} bytes", f"{name}.document_id")
        if not 0 <= document.generation <= MAX_GENERATION:
            raise InvalidArgument(f"{name}.generation is {document.generation}; it must be in [0, {MAX_GENERATION}]", f"{name}.generation")
        size = len(document.packed_tokens)
        if size % 4 or not 1 <= size // 4 <= self._config.max_length:
            raise InvalidArgument(
                f"{name}.packed_tokens has {size} bytes; it must have 1 to max_length={self._config.max_length} tokens of 4 bytes",
                f"{name}.packed_tokens",
            )
        tokens = tokens_of(pb.Row(packed_tokens=document.packed_tokens), name)
        check_vocabulary(tokens, vocab_size, name)
        return tokens

    def _check_generations(self, request: pb.ImportRequest, name: str) -> None:
        """A later generation would have the namespace's older documents evicted at the next AdvanceGeneration: that is an admin's."""
        caller, now = CALLER.get(), self._corpus.namespace(name).generation
        if caller is None or caller.renewed().may("admin", name):
            return
        for i, document in enumerate(request.documents):
            if document.generation > now:
                raise PermissionDenied(
                    f"documents[{i}].generation is {document.generation}, namespace {name!r} is at {now}: to raise it, the token of "
                    f"{caller.name!r} lacks the right 'admin'",
                    f"documents[{i}].generation",
                )

    def _existing(self, namespace: str) -> str:
        """A namespace that exists; NotFound otherwise."""
        name = namespace_or_default(namespace)
        if not self._corpus.has_namespace(name):
            raise NotFound(f"namespace {name!r} does not exist", "namespace")
        return name
