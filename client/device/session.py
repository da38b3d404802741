"""An engine's drafting on its GPU: kernels on its own stream, over its own token buffer, from the service's index.

No message and no wait for the host is on the decode path. What the rows become reaches the service off it: told by the engine
(`committed`), or carried by the stream (`collect`) to a helper process, which has an interpreter of its own. The session never raises in
the decode loop unless it is strict.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from draftd.client.config import ClientConfig, default_endpoint
from draftd.client.credentials import Credentials
from draftd.client.device.collector import Collector
from draftd.client.device.memory import MappedMemory, Received
from draftd.client.failopen import FailOpen
from draftd.client.helper import Greeting
from draftd.client.helper_process import HelperProcess
from draftd.client.rows import is_row
from draftd.drafter import compiling
from draftd.drafter.cuda_memory import device_uuid
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_layout import PIN_MAPPED
from draftd.drafter.device_rules import DeviceRule
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.layout import MAX_DOCUMENT_ID_BYTES
from draftd.drafter.ops.collect.ring import RingShape
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import EngineStats
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_NO_ID = "?" * (MAX_DOCUMENT_ID_BYTES + 1)
_ANSWER_S = 5.0
"""How much longer than it was asked to wait the helper may take to say so."""


class DeviceSession:
    """Drafts on the device for the rows of one engine.

    The engine keeps each request's tokens in a row of its buffer. It calls `start` when a request gets a row, `propose` every step, then
    `collect` or `committed`, and `finish` when the request ends; one thread does all that. `propose` may be captured in a graph of the
    engine's, which stays valid whatever becomes of the service: without one, drafts come from the rows' own tokens and from the index as it
    was.

    Args:
        endpoint: gRPC target of the service, a Unix socket; None takes DRAFTD_ENDPOINT or the default socket.
        engine: Name of the engine, unique on the service.
        vocab_size: Tokens are in [0, vocab_size).
        tokens: int32 [rows, max_length] on the GPU, rows contiguous: the engine's own buffer.
        lengths: int32 or int64 [rows] on the GPU; how many tokens of each row count when `propose` runs.
        k: Most tokens of a draft, in [1, 64].
        max_batch: Most rows of a `propose`.
        namespace, extra_namespaces: What rows draft from and are kept in; those that `start` may name.
        params: How to draft; chains only. None: k tokens by the defaults.
        tokenizer_fingerprint: Identifies the tokenizer; a namespace refuses another than its first.
        strict: Raise instead of failing open; for tests.
        credentials: The token; None takes the DRAFTD_CLIENT_* variables.

    Attributes:
        params: How it drafts.
        memory: The index, mapped.
        headers: The header of each namespace that is mapped.

    Raises:
        InvalidArgument: An argument is outside its range. A service that is not there is not an error.
        CudaError: The GPU cannot map another process's memory; the message says why.
        OSError: There is no memory for what is carried to the host.
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
        extra_namespaces: Sequence[str] = (),
        params: DraftParams | None = None,
        tokenizer_fingerprint: str = "",
        strict: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        if tokens.dtype != torch.int32 or tokens.dim() != 2 or tokens.stride(1) != 1:
            raise InvalidArgument("tokens must be int32 [rows, max_length] on a GPU with contiguous rows", "tokens")
        rows, max_length = tokens.shape
        if lengths.shape != (rows,) or lengths.device != tokens.device or lengths.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(f"lengths must be int32 or int64 [{rows}] on {tokens.device}", "lengths")
        self.params = params or DraftParams(k=k)
        if self.params.branches != 1:
            raise InvalidArgument(f"params.branches is {self.params.branches}; on a GPU drafts are chains: 1", "params.branches")
        self.device = tokens.device
        self._config = ClientConfig(
            endpoint=endpoint or default_endpoint(), engine=engine, vocab_size=vocab_size, k=self.params.k, max_rows=rows,
            max_length=max_length, namespace=namespace, extra_namespaces=tuple(extra_namespaces), transport="mapped", timeout_ms=2.0,
            params=self.params, tokenizer_fingerprint=tokenizer_fingerprint, strict=strict,
            credentials=Credentials.from_environment() if credentials is None else credentials, device_uuid=device_uuid(self.device),
        )  # fmt: skip
        self._tokens, self._lengths_of_rows = tokens, lengths
        self._mapping = threading.Lock()
        self._launching = threading.Lock()
        self.memory = MappedMemory(self.device)
        with torch.cuda.device(self.device):
            self._side = torch.cuda.Stream(self.device)
            self._namespaces = torch.full((rows,), -1, dtype=torch.int32, device=self.device)
            memory = self.memory
            self._rule = DeviceRule(
                memory.words, memory.headers, max_batch=max_batch, max_row_tokens=max_length, params=self.params, teaching=True,
                control=memory.control, pins=memory.pins,
            )  # fmt: skip
            self._out = DeviceDrafts.empty(max_batch, self.params.k, self.device)
            self._warm_up(max_batch)
            self._collector = Collector(tokens, lengths, RingShape(max_batch, self.params.k, self._rule.lessons is not None))
        self._lock = threading.RLock()
        self.headers: dict[str, int] = {}
        self._names: list[str | None] = [None] * rows
        self._remapping = False
        self._helper = HelperProcess(self._collector.block, self._greeting, self._remap_sent)

    # -- what an engine calls ------------------------------------------------------------------------------------------------

    def start(
        self,
        row: int,
        tokens: ArrayLike,
        document_id: str | None = None,
        namespace: str | None = None,
        private: bool = False,
        *,
        prompt_length: int | None = None,
    ) -> None:
        """Begins a request in a row, or goes on with one that was preempted, in the order of the current stream; see Drafter.start."""
        held = _sendable(tokens)
        # What has another type is refused by the helper as what it becomes here.
        if document_id is not None and not isinstance(document_id, str):
            document_id = _NO_ID
        document_id = document_id or uuid.uuid4().hex
        namespace = namespace if namespace is None or isinstance(namespace, str) else ""
        prompt_length = prompt_length if prompt_length is None or isinstance(prompt_length, int | np.integer) else -1
        private = private if isinstance(private, bool | int | np.bool_) else True
        name = None if private else self._config.namespace if namespace is None else namespace
        generation = 0
        if self._has(row):
            with self._lock:
                self._names[row] = name
                if not self._remapping:
                    self._namespaces[row].fill_(self.headers.get(name, -1) if name is not None else -1)
                generation = self._collector.begin(row, held.size if isinstance(held, np.ndarray) else 0)
        self._tell("start", row, generation, held, document_id, namespace, private, prompt_length)

    def propose(self, rows: torch.Tensor, out: DeviceDrafts | None = None) -> DeviceDrafts:
        """Drafts for rows, on the current stream; nothing waits for the host, and it can be captured.

        Args:
            rows: int32 or int64 [batch] on the GPU.
            out: Where to write; None: in buffers of the session that the next call overwrites.

        Returns:
            Drafts [batch, k] on the GPU; those of rows that there are not are empty.
        """
        drafts = out or self._out.first(rows.shape[0])
        # A graph keeps the addresses that it was captured with: they must not be those of the empty index.
        captured = self._mapping if torch.cuda.is_current_stream_capturing() else nullcontext()
        with torch.cuda.device(self.device), captured, self._launching:
            self._rule.propose(self._tokens, self._lengths_of_rows, rows, self._namespaces, drafts)
        return drafts

    def collect(self, rows: torch.Tensor, drafts: DeviceDrafts) -> None:
        """Carries the rows' new tokens and their drafts to the host, which tells the service of them; after their `propose`, on its stream.

        By the rule `calibrated`, a few rows of each batch also carry what their drafts were decided from, to be learned from.
        """
        if not self._collector.launched:
            # A helper that is greeted meanwhile knows it too.
            self._collector.launched = True
            self._tell("carry")
        with torch.cuda.device(self.device):
            self._collector.launch(rows, drafts, self._rule.lessons)

    def committed(self, row: int, tokens: ArrayLike) -> None:
        """Tells what the engine has committed to a row, where `collect` does not: integers [n]."""
        self._tell("committed", row, _sendable(tokens))

    def finish(self, row: int, length: int | None = None, discard: bool = False) -> None:
        """Ends a row's request; its output is kept for others to draft from, or forgotten if `discard`.

        Args:
            length: Tokens of the request that count, prompt included, where the row may hold some past its end; None: all told or carried.
        """
        self._leave(row)
        self._tell("finish", row, length, discard)

    def preempt(self, row: int) -> None:
        """Takes a request from its row without ending it; see Drafter.preempt."""
        self._leave(row)
        self._tell("preempt", row)

    def close(self) -> None:
        """Ends the attachment. Drafts of captured graphs then come from the index as it is now."""
        self._helper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- what an operator or a test asks ------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """The service answered the last call."""
        return self._helper.attached

    @property
    def transport(self) -> str:
        """`mapped`, or `none` before the first attachment."""
        return self._helper.transport

    @property
    def attachments(self) -> int:
        """Attachments so far."""
        return self._helper.attachments

    @property
    def trouble(self) -> tuple[str, str]:
        """Reason and detail of the last failure."""
        return self._helper.trouble

    @property
    def stats(self) -> EngineStats:
        """What was counted since the session was made: a copy."""
        return self._collector.block.stats.snapshot()

    @property
    def overruns(self) -> int:
        """Launches of `collect` that were overwritten before they were read; requests in them are kept up to there."""
        return int(self._collector.block.overruns[0])

    def wait_attached(self, timeout_s: float) -> bool:
        """Waits until the service has answered; not for the decode loop."""
        return self._helper.wait(lambda: self._helper.attached, timeout_s)

    def wait_visible(self, timeout_s: float) -> bool:
        """Waits until all that was committed can be drafted from; not for the decode loop."""
        try:
            return bool(self._helper.ask("visible", timeout_s, timeout_s=timeout_s + _ANSWER_S))
        except FailOpen:
            return False

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper; None while there is none."""
        return self._helper.pid

    @property
    def helper_restarts(self) -> int:
        """Times that the helper process has ended and another was started; requests in flight then are not told of any more."""
        return self._helper.restarts

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is mapped stays so meanwhile; for who reads `memory` other than by `propose`."""
        with self._mapping:
            yield

    # -- what the helper process has done ----------------------------------------------------------------------------------------

    def _tell(self, what: str, *arguments: Any) -> None:
        """Tells the helper; a strict session raises what it raises."""
        if self._config.strict:
            self._helper.ask(what, *arguments)
        else:
            self._helper.tell(what, *arguments)

    def _leave(self, row: int) -> None:
        if self._has(row):
            with self._lock:
                self._names[row] = None

    def _has(self, row: int) -> bool:
        """A row that there is; of others the helper says what is wrong with them."""
        return is_row(row, len(self._names))

    def _greeting(self) -> Greeting:
        """What a helper that starts now is told first."""
        collector = self._collector
        level = logging.getLogger("draftd.client").getEffectiveLevel()
        return Greeting(self._config, collector.block.ring.shape, collector.newest.copy(), collector.launched, log_level=level)

    def _remap_sent(self, message: bytes) -> None:
        self.remap(pb.DeviceMap.FromString(message))

    def remap(self, device: pb.DeviceMap) -> None:
        """See DeviceLink. Called from a thread: meanwhile rows draft from their own tokens only."""
        with torch.cuda.device(self.device):
            received = self.memory.receive(device)
            try:
                with self._mapping:
                    self._replace(received)
            except RuntimeError as error:  # what PyTorch raises when the GPU fails, or a stream is being captured
                raise OSError(f"the index cannot be mapped on {self.device}: {error}") from error

    def _replace(self, received: Received) -> None:
        memory = self.memory
        with self._lock:
            self._remapping = True
        headers: dict[str, int] = {}
        try:
            # Addresses at which nothing is mapped for a moment cannot be given to a kernel.
            with self._launching:
                self._rule.read_from(*memory.empty)
            # What `start` has put on its way would set a row's namespace behind our back; from now on it puts nothing.
            torch.cuda.synchronize(self.device)
            self._set_namespaces([-1] * len(self._names), mapped=False)
            torch.cuda.synchronize(self.device)
            memory.replace(received.pieces)
            headers = received.headers
        finally:
            with self._launching:
                self._rule.read_from(memory.words, memory.headers, memory.control)
            with self._lock:
                self.headers = headers
                self._set_namespaces([-1 if name is None else headers.get(name, -1) for name in self._names], mapped=True)
                self._remapping = False

    def _set_namespaces(self, headers: list[int], *, mapped: bool) -> None:
        with torch.cuda.stream(self._side):
            self.memory.pins[PIN_MAPPED].fill_(int(mapped))
            self._namespaces.copy_(torch.tensor(headers, dtype=torch.int32))
            self._side.synchronize()

    def _warm_up(self, max_batch: int) -> None:
        """Compiles the kernels for every batch size, so that no step waits for a compiler."""
        nowhere = torch.full((max_batch,), -1, dtype=torch.int32, device=self.device)
        batches = sorted({1, *(size for size in (65, 193, 385) if size <= max_batch), max_batch})
        compiling.warm_up(lambda batch: self.propose(nowhere[:batch]), batches)
        torch.cuda.current_stream(self.device).synchronize()


def _sendable(tokens: ArrayLike) -> NDArray[np.generic] | str:
    """A copy of tokens that can be sent; of what is no list of numbers, what is wrong with it, which the helper refuses."""
    try:
        copied = np.array(tokens)
    except Exception as error:  # noqa: BLE001 -- whatever a caller's object raises
        return str(error)
    return copied if copied.dtype.kind in "biuf" else f"tokens are {copied.dtype}"
