"""The calls of HANDLE engines whose tensors are on a GPU: Attach, Propose and Harvest as far as they differ from those of others.

Propose only queues: the answer comes before the drafts, which the engine's stream waits for.
"""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import FailedPrecondition, InvalidArgument
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.attachments import Attachment, Attachments, Engine
from draftd.server.config import ServerConfig
from draftd.server.metrics import Metrics
from draftd.server.rows import RowUpdate
from draftd.server.rpc.convert import check_vocabulary, params_of

if TYPE_CHECKING:
    from draftd.server.device_handle import DeviceTensors, TensorSharing


class FinishedRow(NamedTuple):
    """A row of a Harvest that has been read and checked, and begun with its prompt; `tokens` int32 [n], the whole row."""

    sent: pb.HarvestRow
    tokens: NDArray[np.int32]
    name: str


class DeviceHandles:
    """Answers for attachments with tensors on a GPU."""

    def __init__(self, config: ServerConfig, corpus: Corpus, attachments: Attachments, metrics: Metrics) -> None:
        self._config = config
        self._corpus = corpus
        self._attachments = attachments
        self._metrics = metrics
        self._opening = asyncio.Lock()

    async def open(self, request: pb.AttachRequest, engine: Engine) -> "DeviceTensors":
        """Checks and opens an engine's tensors, and makes ready to draft on them.

        Raises:
            InvalidArgument: Something that it declares is not as it must be.
            FailedPrecondition: The index is not on a GPU.
            ResourceExhausted: The GPU has no memory left.
        """
        message = request.tensors
        defaults = self._config.draft_params()
        params = params_of(message.parameters, defaults, engine.k, "the attachment's k", self._config.depth)
        if message.parameters.HasField("k") and params.k != engine.k:
            raise InvalidArgument(
                f"tensors.parameters.k is {params.k}; on a GPU it must be {engine.k}, the attachment's k", "tensors.parameters.k"
            )
        if params.branches > 1:
            raise InvalidArgument(
                f"tensors.parameters.branches is {params.branches}; the tensors hold chains: 1", "tensors.parameters.branches"
            )
        if len(engine.namespaces) > 1:
            raise InvalidArgument("extra_namespaces: tensors on a GPU are drafted from one namespace", "extra_namespaces")
        sharing = await self._sharing()
        opening = partial(
            sharing.open,
            message,
            max_rows=engine.max_rows,
            max_length=engine.max_length,
            params=replace(params, k=engine.k),
            name=engine.namespaces[0],
            vocab_size=engine.vocab_size,
        )
        opened = asyncio.get_running_loop().run_in_executor(None, opening)
        try:
            return await asyncio.shield(opened)
        except asyncio.CancelledError:
            opened.add_done_callback(_close_unwanted)
            raise

    async def _sharing(self) -> "TensorSharing":
        async with self._opening:
            if self._attachments.sharing is None:
                # With several GPUs, `handle` is for engines on the first.
                indexes = next(iter(self._corpus.device_indexes), None)
                if indexes is None:
                    raise FailedPrecondition(
                        "tensors.device_uuid: the service's index is in host memory, and so must the tensors be", "tensors.device_uuid"
                    )
                if indexes.memory.sharing_failure:
                    raise FailedPrecondition(f"tensors.device_uuid: {indexes.memory.sharing_failure}", "tensors.device_uuid")
                from draftd.server.device_handle import TensorSharing

                self._attachments.sharing = await asyncio.get_running_loop().run_in_executor(None, TensorSharing, indexes)
            return self._attachments.sharing

    def propose(self, request: pb.ProposeRequest, attachment: Attachment, tensors: "DeviceTensors") -> pb.ProposeResponse:
        """Queues a batch; raises DraftdError with the field and the limit."""
        started = time.perf_counter()
        if request.rows:
            raise InvalidArgument("rows: tensors on a GPU hold the rows; give sequence and batch", "rows")
        if request.HasField("parameters"):
            raise InvalidArgument("parameters: tensors on a GPU are drafted on as was agreed in Attach, tensors.parameters", "parameters")
        if not 1 <= request.batch <= attachment.engine.max_rows:
            raise InvalidArgument(f"batch is {request.batch}; it must be in [1, {attachment.engine.max_rows}], max_rows", "batch")
        tensors.queue(request.sequence, request.batch, self._attachments.lease_ms / 1000)
        seconds = time.perf_counter() - started
        attachment.stats.count_proposal(request.batch, seconds * 1e6)
        self._metrics.batch(attachment.transport, request.batch, seconds)
        return pb.ProposeResponse()

    async def finished_rows(self, request: pb.HarvestRequest, attachment: Attachment, tensors: "DeviceTensors") -> list[FinishedRow]:
        """Waits until the engine's stream has come to the request's sequence number, then reads and checks its rows.

        Raises:
            InvalidArgument: A row is not as it must be.
            FailedPrecondition: The stream does not come in time.
        """
        engine, rows = attachment.engine, attachment.rows
        assert rows is not None
        for i, sent in enumerate(request.rows):
            name = f"rows[{i}]"
            if sent.tokens or sent.packed_tokens or sent.offset:
                raise InvalidArgument(f"{name}.tokens: a row of tensors on a GPU carries none, and no offset", f"{name}.tokens")
            if not sent.HasField("row_index") or not 0 <= sent.row_index < tensors.buffer_rows:
                raise InvalidArgument(
                    f"{name}.row_index must be in [0, {tensors.buffer_rows}), the rows of tensors.tokens", f"{name}.row_index"
                )
            if not 1 <= sent.length <= engine.max_length:
                raise InvalidArgument(
                    f"{name}.length is {sent.length}; it must be in [1, {engine.max_length}], max_length", f"{name}.length"
                )
            if not 0 <= sent.prompt_length <= sent.length:
                raise InvalidArgument(
                    f"{name}.prompt_length is {sent.prompt_length}; it must be in [0, {sent.length}], length", f"{name}.prompt_length"
                )
        await tensors.reach(request.sequence, self._attachments.lease_ms / 1000)
        read = [FinishedRow(row, await tensors.read(row.row_index, row.length), f"rows[{i}]") for i, row in enumerate(request.rows)]
        updates = []
        for row in read:
            check_vocabulary(row.tokens, engine.vocab_size, row.name)
            updates.append(RowUpdate(row.sent.document_id, 0, row.tokens, row.sent.prompt_length, attachment.namespace, False))
            rows.check(updates[-1], row.name)
        rows.check_room(updates)
        for row, update in zip(read, updates, strict=True):
            if not rows.has_ended(update.document_id):
                # With its prompt alone: its output is what Harvest brings.
                rows.take(replace(update, tokens=row.tokens[: update.prompt_length]))
        return read


def _close_unwanted(opened: "Awaitable[DeviceTensors]") -> None:
    """Nobody waits for them any more: the caller's time was up."""
    assert isinstance(opened, asyncio.Future)
    if not opened.cancelled() and opened.exception() is None:
        tensors = opened.result()
        tensors.stop()
        asyncio.get_running_loop().run_in_executor(None, tensors.close)
