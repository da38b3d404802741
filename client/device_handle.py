"""HANDLE on a GPU: the service drafts on an engine's own tensors, for engines that cannot run the kernels themselves.

Nothing on the host waits for the service. The engine's stream does, after its decode step, for `timeout_ms` at most.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, cast

import grpc
import torch

from draftd.client.config import ClientConfig, default_endpoint
from draftd.client.credentials import Credentials
from draftd.client.failopen import FailOpenLog, reason_of
from draftd.client.session import Session
from draftd.client.transports import Link, Transport
from draftd.client.wire import parameters_message
from draftd.drafter import cuda_memory
from draftd.drafter.cuda_memory import CudaError
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import EngineStats
from draftd.drafter.stream_words import DONE, PAGE_BYTES, READY, Watchdog, WordPage, compile_watchdog
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_HANDLE_BYTES = 64
_ALIGNMENT = 4
"""Shared tensors start at multiples of so many int32 elements."""
_INFO_FIELDS = 4
_RPC_TIMEOUT_S = 1.0
_DEVICE_MAP = 2


class HandleDrafts(NamedTuple):
    """Drafts on the device: tokens int32 [n, k], -1 behind a draft; probabilities float32 [n, k]; the others int32 [n], as in
    draftd.drafter.drafts.Drafts. Valid on the stream that asked for them, until it asks again."""

    tokens: torch.Tensor
    probabilities: torch.Tensor
    counts: torch.Tensor
    source: torch.Tensor
    match_length: torch.Tensor
    occurrences: torch.Tensor

    @staticmethod
    def of(words: torch.Tensor, max_batch: int, k: int) -> HandleDrafts:
        """The drafts that lie in int32 [words] as `Places` has them."""
        places = Places.of(max_batch, k)
        start = places.draft_tokens

        def part(at: int, *shape: int) -> torch.Tensor:
            return words[at - start :][: torch.Size(shape).numel()].view(shape)

        info = part(places.draft_info, _INFO_FIELDS, max_batch)
        probabilities = part(places.draft_probabilities, max_batch, k).view(torch.float32)
        return HandleDrafts(part(places.draft_tokens, max_batch, k), probabilities, info[0], info[1], info[2], info[3])

    def first(self, n: int) -> HandleDrafts:
        """Those of the first n rows."""
        return HandleDrafts(*(column[:n] for column in self))


class FinishedRow(NamedTuple):
    """A row that has ended: its place in the token buffer, its id, and how many of its tokens count, and how many of those are prompt."""

    row: int
    document_id: str
    length: int
    prompt_length: int = 0


@dataclass(frozen=True, slots=True)
class Places:
    """Where what the client shares beside the engine's own tensors lies in one array of int32; offsets in elements."""

    row_indices: int
    draft_tokens: int
    draft_probabilities: int
    draft_info: int
    draft_stamp: int
    size: int

    @staticmethod
    def of(max_batch: int, k: int) -> Places:
        """The drafts are between draft_tokens and draft_stamp."""
        at, offsets = 0, []
        for elements in (max_batch, max_batch * k, max_batch * k, _INFO_FIELDS * max_batch, 1):
            offsets.append(at)
            at += -(-elements // _ALIGNMENT) * _ALIGNMENT
        rows, tokens, probabilities, info, stamp = offsets
        return Places(rows, tokens, probabilities, info, stamp, at)


class DeviceHandle:
    """An engine's attachment over HANDLE with tensors on a GPU. One stream uses it.

    Args:
        endpoint: The service's Unix socket; None takes DRAFTD_ENDPOINT or the default socket.
        tokens: int32 [rows, max_length], contiguous; the engine's token buffer. lengths: int32 [rows]; tokens of each row.
        max_batch: Most rows of a batch.
        params: How to draft; None takes the service's defaults.
        timeout_ms: Longest that the stream waits for drafts.

    The others are those of draftd.client.Drafter.

    Raises:
        InvalidArgument: An argument is outside its range, or a tensor is not as it must be. A service that is not there is not an error.
        CudaError: The tensors' memory cannot be shared, as that of expandable segments of PyTorch's allocator.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        engine: str,
        vocab_size: int,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        k: int = 16,
        max_batch: int,
        namespace: str = "default",
        params: DraftParams | None = None,
        tokenizer_fingerprint: str = "",
        timeout_ms: float = 2.0,
        credentials: Credentials | None = None,
    ) -> None:
        _check_tensors(tokens, lengths)
        config = ClientConfig(
            endpoint=endpoint or default_endpoint(),
            engine=engine,
            vocab_size=vocab_size,
            k=k,
            max_rows=max_batch,
            max_length=tokens.shape[1],
            namespace=namespace,
            extra_namespaces=(),
            transport="handle",
            timeout_ms=timeout_ms,
            params=params,
            tokenizer_fingerprint=tokenizer_fingerprint,
            strict=False,
            credentials=Credentials.from_environment() if credentials is None else credentials,
        )
        device = tokens.device
        places = Places.of(max_batch, k)
        self._shared = torch.zeros(places.size, dtype=torch.int32, device=device)
        self._rows = self._shared[places.row_indices :][:max_batch]
        self._written = self._shared[places.draft_tokens : places.draft_stamp]
        self._stamp = self._shared[places.draft_stamp :][:1]
        self._stamped = torch.zeros(1, dtype=torch.bool, device=device)
        # What is returned is a copy: of the service's drafts, or of none, and never of what a late service is just writing.
        self._none = torch.zeros_like(self._written)
        HandleDrafts.of(self._none, max_batch, k).tokens.fill_(-1)
        self._copy = self._none.clone()
        self._drafts = HandleDrafts.of(self._copy, max_batch, k)
        self._no_drafts = HandleDrafts.of(self._none, max_batch, k)
        torch.cuda.current_stream(device).synchronize()
        message = pb.EngineTensors(
            device_uuid=cuda_memory.device_uuid(device),
            tokens=_described(tokens, tokens.shape),
            lengths=_described(lengths, lengths.shape),
            row_indices=_described(self._rows, (max_batch,)),
            draft_tokens=_described(self._written, (max_batch, k)),
            draft_probabilities=_described(self._shared[places.draft_probabilities :], (max_batch, k), pb.DATA_TYPE_FLOAT32),
            draft_info=_described(self._shared[places.draft_info :], (_INFO_FIELDS, max_batch)),
            draft_stamp=_described(self._stamp, (1,)),
        )
        if params is not None:
            message.parameters.CopyFrom(parameters_message(replace(params, k=k)))
        self._kept = (tokens, lengths)
        self._device = device
        self._max_batch = max_batch
        self._timeout_us = int(1000 * timeout_ms)
        self._context = cuda_memory.call("cuDevicePrimaryCtxRetain", device.index or 0)
        self._attachment: _Attachment | None = None
        self._retired: deque[tuple[_Attachment, Any]] = deque()
        self._failures: deque[tuple[str, str]] = deque()
        self._given_up = 0
        self.stats = EngineStats()
        self._log = FailOpenLog(engine, self.stats)
        # A session only keeps its transport attached; it never drafts with it.
        self._session = Session(config, message, lambda link, response: cast(Transport, self._open(link, response)))

    @property
    def attached(self) -> bool:
        """The service answered the last call of the session."""
        return self._session.alive

    @property
    def trouble(self) -> tuple[str, str]:
        """Fail-open reason and detail of the session's last failure."""
        return self._session.trouble

    @property
    def given_up(self) -> int:
        """Times that the stream went on without drafts, because they did not come in time."""
        return self._given_up + (self._attachment.watchdog.given_up if self._attachment else 0)

    def propose(self, rows: torch.Tensor) -> HandleDrafts:
        """Drafts for rows of the buffer, int32 or int64 [n] on the device, on the current stream: what it was given before is drafted from.

        Call it while the stream still works on the decode step, so that it hides the call to the service.

        Raises:
            InvalidArgument: There are more than max_batch.
        """
        batch = int(rows.shape[0])
        if batch > self._max_batch:
            raise InvalidArgument(f"rows has {batch} rows; max_batch is {self._max_batch}", "rows")
        attachment = self._adopt()
        if attachment is None or not self._session.alive or batch == 0:
            if batch:
                self._log.failed(*self._session.trouble)
            return self._no_drafts.first(batch)
        sequence = attachment.next()
        request = pb.ProposeRequest(attachment_id=attachment.link.attachment_id, sequence=sequence, batch=batch)
        answer = attachment.link.stub.Propose.future(request, timeout=_RPC_TIMEOUT_S)
        answer.add_done_callback(partial(self._answered, attachment, sequence))
        self._rows[:batch].copy_(rows)
        size = min(1 << (batch - 1).bit_length(), self._max_batch)
        if size > batch:
            # The service drafts for a power of two.
            self._rows[batch:size].fill_(-1)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        attachment.signal(stream, sequence)
        attachment.wait(stream, sequence)
        torch.eq(self._stamp, sequence - ((sequence >> 31) << 32), out=self._stamped)
        torch.where(self._stamped, self._written, self._none, out=self._copy)
        self.stats.count_proposal(batch, 0.0)
        return self._drafts.first(batch)

    def harvest(self, rows: Sequence[FinishedRow], *, wait_visible: bool = False) -> Any:
        """Has the service read finished rows, and answers a gRPC future of a HarvestResponse, None without a service.

        A row may be used anew when the future is done, and not before; nothing waits for that here. The service reads what the current
        stream has written so far.
        """
        attachment = self._adopt()
        if attachment is None or not self._session.alive:
            self._log.failed(*self._session.trouble)
            return None
        sequence = attachment.next()
        request = pb.HarvestRequest(
            attachment_id=attachment.link.attachment_id,
            sequence=sequence,
            wait_visible=wait_visible,
            rows=[
                pb.HarvestRow(row_index=row.row, document_id=row.document_id, length=row.length, prompt_length=row.prompt_length)
                for row in rows
            ],
        )
        attachment.signal(torch.cuda.current_stream(self._device).cuda_stream, sequence, waits=False)
        return attachment.link.stub.Harvest.future(request)

    def close(self) -> None:
        """Ends the attachment, and every wait of the stream for it."""
        self._session.close()
        self._adopt()
        if self._attachment is not None:
            self._retire(self._attachment)
            self._attachment = None
        while self._retired:
            attachment, passed = self._retired.popleft()
            passed.synchronize()
            attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self, link: Link, response: pb.AttachResponse) -> _Attachment:
        """Called from the session's thread."""
        if not response.sequence_words:
            raise ValueError("the service knows no sequence words: it is too old for tensors on a GPU")
        compile_watchdog()
        cuda_memory.call("cuCtxSetCurrent", self._context)
        return _Attachment(link, WordPage.open(response.sequence_words), self._timeout_us)

    def _adopt(self) -> _Attachment | None:
        """The attachment to use; a new one takes the place of the old one. Counts what has failed since the last call."""
        while self._failures:
            self._log.failed(*self._failures.popleft())
        newest = cast("_Attachment | None", self._session.transport)
        if newest is not self._attachment:
            if self._attachment is not None:
                self._retire(self._attachment)
            self._attachment = newest
        while self._retired and self._retired[0][1].query():
            self._retired.popleft()[0].close()
        return newest

    def _retire(self, attachment: _Attachment) -> None:
        """Ends the stream's waits for an attachment; its words stay until the stream has passed them."""
        attachment.give_up(attachment.sequence)
        self._given_up += attachment.watchdog.given_up
        self._retired.append((attachment, torch.cuda.current_stream(self._device).record_event()))

    def _answered(self, attachment: _Attachment, sequence: int, answer: Any) -> None:
        """Called from a thread of gRPC: drafts that were refused will not come."""
        if answer.code() is not grpc.StatusCode.OK:
            attachment.give_up(sequence)
            self._failures.append(reason_of(answer))
            self._session.check()


class _Attachment:
    """One attachment's sequence words, which the engine's stream writes and waits for."""

    def __init__(self, link: Link, page: WordPage, timeout_us: int) -> None:
        self.link = link
        self.sequence = 0
        self._page = page
        cuda_memory.call("cuMemHostRegister", page.address, PAGE_BYTES, _DEVICE_MAP)
        self._words = int(cuda_memory.call("cuMemHostGetDevicePointer", page.address, 0))
        self.watchdog = Watchdog(page, timeout_us)

    @property
    def name(self) -> Literal["handle"]:
        """Which transport it is."""
        return "handle"

    def next(self) -> int:
        """The next sequence number."""
        self.sequence = (self.sequence + 1) & 0xFFFFFFFF
        return self.sequence

    def signal(self, stream: int, sequence: int, *, waits: bool = True) -> None:
        """The stream says that it has come to `sequence`, and where it does not wait then, that it does not."""
        cuda_memory.call("cuStreamWriteValue32", stream, self._words + READY, sequence, 0)
        if not waits:
            cuda_memory.call("cuStreamWriteValue32", stream, self._words + DONE, sequence, 0)

    def wait(self, stream: int, sequence: int) -> None:
        """The stream waits for the drafts of `sequence`; the watchdog has an eye on it."""
        cuda_memory.call("cuStreamWaitValue32", stream, self._words + DONE, sequence, 0)

    def give_up(self, sequence: int) -> None:
        """The stream does not wait for `sequence` any longer."""
        if not self._page.reached(DONE, sequence):
            self._page.write(DONE, sequence)

    def heartbeat(self, response: pb.HeartbeatResponse) -> None:
        """Nothing to do."""

    def orphaned(self) -> None:
        """Nothing to do: the watchdog ends what waits."""

    def close(self) -> None:
        """Ends the watchdog. The stream must have passed the words."""
        self.watchdog.close()
        cuda_memory.call("cuMemHostUnregister", self._page.address)


def _check_tensors(tokens: torch.Tensor, lengths: torch.Tensor) -> None:
    if tokens.dtype != torch.int32 or tokens.dim() != 2 or not tokens.is_contiguous() or tokens.device.type != "cuda":
        raise InvalidArgument("tokens must be a contiguous tensor int32 [rows, max_length] on a GPU", "tokens")
    if lengths.dtype != torch.int32 or lengths.shape != tokens.shape[:1] or not lengths.is_contiguous() or lengths.device != tokens.device:
        raise InvalidArgument(f"lengths must be a tensor int32 [{tokens.shape[0]}] on the GPU of tokens", "lengths")


def _described(tensor: torch.Tensor, shape: Sequence[int], data_type: pb.DataType = pb.DATA_TYPE_INT32) -> pb.Tensor:
    """What the service is told of a tensor that begins where `tensor` does."""
    address = tensor.data_ptr()
    base, size = cuda_memory.call("cuMemGetAddressRange", address)
    try:
        handle = cuda_memory.call("cuIpcGetMemHandle", base)
    except CudaError as error:
        raise CudaError(
            f"{error}: the tensor's memory cannot be shared; expandable_segments in PYTORCH_CUDA_ALLOC_CONF rules it out"
        ) from None
    return pb.Tensor(
        handle=ctypes.string_at(handle.getPtr(), _HANDLE_BYTES).hex(),
        offset=address - int(base),
        data_type=data_type,
        shape=shape,
        allocation_bytes=int(size),
    )
