"""Drafting on tensors that engines share on a GPU: graphs of the drafter over an engine's own memory, launched by the launcher.

`TensorSharing` is the service's; a `DeviceTensors` is one attachment's. Engines are not waited for here, but in Harvest, and not for long.
"""

import asyncio
import ctypes
import time
from collections import Counter
from threading import Lock
from typing import Any

import numpy as np
import structlog
import torch
from cuda.bindings import driver  # type: ignore[import-not-found,unused-ignore]
from numpy.typing import NDArray

from draftd.drafter import compiling, cuda_memory
from draftd.drafter.cuda_memory import AddressRange, CudaError, Physical
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_indexes import DeviceIndexes
from draftd.drafter.device_layout import PIN_WORDS
from draftd.drafter.device_rules import DeviceRule
from draftd.drafter.errors import FailedPrecondition, NotFound, ResourceExhausted
from draftd.drafter.params import MAX_K, DraftParams
from draftd.drafter.stream_words import DONE, PAGE_BYTES, READY, WordPage
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.device_tensors import HANDLE_BYTES, Claims, DriverRefusal, OpenedTensors, Placed
from draftd.server.launcher import DEPTH, LaunchCounts, Launcher

_log = structlog.get_logger("draftd.handle")

WAIT_S = 1.0
"""Longest that an engine's stream may take to come to a sequence number."""
_DRAIN_S = 2.0
_POLL_S = 0.0005
_DEVICE_MAP = 2
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING, _PRIORITY = 1, -1


class CudaDriver:
    """The driver of this process; see Driver."""

    def open(self, handle: bytes) -> int:
        """See Driver."""
        given = driver.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        return int(_asked("cuIpcOpenMemHandle", given, _LAZY_PEER_ACCESS))

    def address_range(self, address: int) -> tuple[int, int]:
        """See Driver."""
        base, size = _asked("cuMemGetAddressRange", address)
        return int(base), int(size)

    def device_of(self, address: int) -> int:
        """See Driver."""
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(_asked("cuPointerGetAttribute", attribute, address))

    def close(self, address: int) -> None:
        """See Driver."""
        _asked("cuIpcCloseMemHandle", address)


def _asked(name: str, *arguments: Any) -> Any:
    try:
        return cuda_memory.call(name, *arguments)
    except CudaError as error:
        raise DriverRefusal(str(error)) from None


class TensorSharing:
    """What engines share with the service on one GPU.

    Attributes:
        abandoned: Attachments whose stream did not end in time, so that what they shared stays mapped.
    """

    def __init__(self, indexes: DeviceIndexes) -> None:
        self.indexes = indexes
        self.device: torch.device = indexes.memory.device
        self.driver = CudaDriver()
        self.claims = Claims()
        self.abandoned = 0
        index = self.device.index or 0
        self._context = cuda_memory.call("cuDevicePrimaryCtxRetain", index)
        self.make_current()
        library = ctypes.CDLL("libcuda.so.1")
        launch, write = (int(ctypes.cast(f, ctypes.c_void_p).value or 0) for f in (library.cuGraphLaunch, library.cuStreamWriteValue32_v2))
        self.launcher = Launcher(launch, write, self.make_current)
        self._lock = Lock()
        self._live: set[DeviceTensors] = set()
        self._ended: Counter[str] = Counter()
        self._idle_streams: list[int] = []

    def take_stream(self) -> int:
        """A stream for one attachment: those of PyTorch are shared once there are many.

        It is given back and never destroyed, since PyTorch's allocators remember on which streams memory was used.
        """
        with self._lock:
            if self._idle_streams:
                return self._idle_streams.pop()
        return int(cuda_memory.call("cuStreamCreateWithPriority", _NON_BLOCKING, _PRIORITY))

    def give_back_stream(self, stream: int) -> None:
        """Nothing is on it any more."""
        with self._lock:
            self._idle_streams.append(stream)

    def make_current(self) -> None:
        """Makes the GPU the calling thread's."""
        torch.cuda.set_device(self.device)
        cuda_memory.call("cuCtxSetCurrent", self._context)

    def open(
        self, message: pb.EngineTensors, *, max_rows: int, max_length: int, params: DraftParams, name: str, vocab_size: int
    ) -> "DeviceTensors":
        """Opens an engine's tensors and makes ready to draft on them; takes as long as the kernels take to compile.

        Args:
            params: How to draft; its k is the attachment's.
            name, vocab_size: The attachment's namespace.

        Raises:
            InvalidArgument: See OpenedTensors.open.
            ResourceExhausted: The GPU has no memory left for it, or there are too many.
        """
        self.make_current()
        opened = OpenedTensors.open(
            message,
            max_rows=max_rows,
            max_length=max_length,
            k=params.k,
            uuid=self.indexes.uuid,
            device=self.device.index or 0,
            driver=self.driver,
            claims=self.claims,
        )
        try:
            tensors = DeviceTensors(self, opened, max_rows, max_length, params)
        except torch.OutOfMemoryError as error:
            opened.close()
            raise ResourceExhausted(f"max_rows, max_length: {self.device} has no memory left for one more engine", "max_rows") from error
        except BaseException:
            opened.close()
            raise
        self.indexes.follow(name, vocab_size, tensors.namespaces)
        with self._lock:
            self._live.add(tensors)
        return tensors

    def ended(self, tensors: "DeviceTensors", counts: LaunchCounts, abandoned: bool) -> None:
        """Keeps the counts of an attachment that has ended."""
        with self._lock:
            self._live.discard(tensors)
            self._ended.update(counts.outcomes())
            self.abandoned += abandoned

    def counts(self) -> dict[str, int]:
        """Batches so far by what became of them; see LaunchCounts."""
        with self._lock:
            total = Counter(self._ended)
            for tensors in self._live:
                total.update(tensors.counts().outcomes())
        return dict(total)

    def close(self) -> None:
        """Launches no more."""
        self.launcher.close()


class DeviceTensors:
    """One attachment's tensors on a GPU, and the graphs that draft on them.

    Attributes:
        words: Its sequence words.
        namespaces: int32 [rows of tokens]; header of the index that each row is drafted from.
    """

    def __init__(self, sharing: TensorSharing, opened: OpenedTensors, max_rows: int, max_length: int, params: DraftParams) -> None:
        self._sharing = sharing
        self._opened = opened
        self._max_rows = max_rows
        self._closed = False
        self._lock = asyncio.Lock()
        device = sharing.device
        self._raw_stream = sharing.take_stream()
        self._stream = torch.cuda.ExternalStream(self._raw_stream, device)
        at = opened.placed
        # Only the first columns count, so that the drafter's workspace is no larger than the attachment asks for.
        self._tokens = _view(at["tokens"], "<i4", device)[:, :max_length]
        self._lengths = _view(at["lengths"], "<i4", device)
        self._rows = _view(at["row_indices"], "<i4", device)
        info = _view(at["draft_info"], "<i4", device)
        tokens, probabilities = _view(at["draft_tokens"], "<i4", device), _view(at["draft_probabilities"], "<f4", device)
        versions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._drafts = DeviceDrafts(tokens, probabilities, info[0], info[1], info[2], info[3], versions)
        self.namespaces = torch.full(self._lengths.shape, -1, dtype=torch.int32, device=device)
        self._staging = torch.empty(max_length, dtype=torch.int32, pin_memory=True)
        self.words = WordPage.create()
        cuda_memory.call("cuMemHostRegister", self.words.address, PAGE_BYTES, _DEVICE_MAP)
        self._graphs: dict[int, Any] = {}
        self._pin: _Pin | None = None
        try:
            words = int(cuda_memory.call("cuMemHostGetDevicePointer", self.words.address, 0))
            self._pin = _Pin(sharing.indexes, f"handle-{id(self):x}", device)
            self._capture(params, max_length)
            self._slot = sharing.launcher.add(self.words, self._raw_stream, at["draft_stamp"].address, words + DONE)
        except BaseException:
            self._stream.synchronize()
            self._release()
            raise

    def _capture(self, params: DraftParams, length: int) -> None:
        """Makes a graph for each batch size, the powers of two, and warms up what is in it: capturing compiles and allocates nothing."""
        memory = self._sharing.indexes.memory
        assert self._pin is not None
        sizes = [1 << i for i in range((self._max_rows - 1).bit_length())] + [self._max_rows]
        # Its workspace is allocated on the default stream, whose memory serves the next attachment.
        self._drafter = DeviceRule(
            memory.words,
            memory.headers,
            max_batch=self._max_rows,
            max_row_tokens=length,
            params=params,
            teaching=False,
            compiled_k=16 if params.k <= 16 else MAX_K,
            compiled_depth=params.max_depth,
            control=memory.control,
            pins=self._pin.words,
        )
        torch.cuda.current_stream(self._sharing.device).synchronize()
        drafter = self._drafter

        def draft(size: int) -> None:
            drafter.propose(self._tokens, self._lengths, self._rows[:size], self.namespaces, self._drafts.first(size))

        with torch.cuda.stream(self._stream):
            compiling.warm_up(draft, sizes)
            self._stream.synchronize()
            for size in sizes:
                mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                cuda_memory.call("cuStreamBeginCapture", self._raw_stream, mode)
                try:
                    draft(size)
                finally:
                    graph = cuda_memory.call("cuStreamEndCapture", self._raw_stream)
                self._graphs[size] = cuda_memory.call("cuGraphInstantiate", graph, 0)
                cuda_memory.call("cuGraphDestroy", graph)
        self._sizes = sizes

    def queue(self, sequence: int, batch: int, wait_s: float) -> None:
        """Drafts for the first `batch`, in [1, max_rows], of row_indices, when the engine's stream has come to `sequence`.

        Raises:
            ResourceExhausted: Too many batches wait already.
        """
        size = next(size for size in self._sizes if size >= batch)
        if not self._sharing.launcher.queue(self._slot, sequence, int(self._graphs[size]), min(wait_s, WAIT_S)):
            raise ResourceExhausted(f"sequence: {DEPTH} batches wait for the engine's stream already; that is the limit", "sequence")

    def counts(self) -> LaunchCounts:
        """What became of its batches."""
        return self._sharing.launcher.counts(self._slot)

    async def reach(self, sequence: int, wait_s: float) -> None:
        """Returns when the engine's stream has come to `sequence`.

        Raises:
            FailedPrecondition: It does not in time.
            NotFound: The attachment has ended meanwhile.
        """
        deadline = time.monotonic() + min(wait_s, WAIT_S)
        while not self.words.reached(READY, sequence):
            if time.monotonic() > deadline:
                raise FailedPrecondition(
                    f"sequence: the engine's stream has not come to {sequence} within {1000 * min(wait_s, WAIT_S):.0f} ms", "sequence"
                )
            await asyncio.sleep(_POLL_S)
            self._check_open()

    async def read(self, row: int, length: int) -> NDArray[np.int32]:
        """The first `length` tokens of a row of the buffer, int32 [length]; the engine may change them afterwards.

        Raises:
            NotFound: The attachment has ended meanwhile.
        """
        async with self._lock:
            self._check_open()
            with torch.cuda.stream(self._stream):
                self._staging[:length].copy_(self._tokens[row, :length], non_blocking=True)
                copied = self._stream.record_event()
            while not copied.query():
                await asyncio.sleep(_POLL_S)
                self._check_open()
            tokens: NDArray[np.int32] = self._staging[:length].numpy().copy()
            return tokens

    @property
    def buffer_rows(self) -> int:
        """Rows of tokens."""
        return int(self._lengths.shape[0])

    def _check_open(self) -> None:
        if self._closed:
            raise NotFound("attachment_id names no live attachment; attach again", "attachment_id")

    def stop(self) -> None:
        """Reads no more; called from the event loop, before `close` is called from elsewhere."""
        self._closed = True

    def close(self) -> None:
        """Launches no more, waits for what was launched, and unmaps everything. A stream that does not end in time is abandoned: what it
        may still use stays mapped."""
        sharing = self._sharing
        sharing.make_current()
        counts = sharing.launcher.remove(self._slot)
        sharing.indexes.unfollow(self.namespaces)
        deadline = time.monotonic() + _DRAIN_S
        drained = False
        try:
            while not (drained := self._stream.query()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except RuntimeError as error:  # torch.AcceleratorError: the context is lost, and nothing in it can be given back
            _log.error("stream_failed", exc_info=error)
        sharing.ended(self, counts, abandoned=not drained)
        if drained:
            self._release()
            self._opened.close()
        else:
            _log.error("stream_abandoned", after_s=_DRAIN_S)
            self._opened.forget()

    def _release(self) -> None:
        for graph in self._graphs.values():
            cuda_memory.call("cuGraphExecDestroy", graph)
        self._graphs = {}
        cuda_memory.call("cuMemHostUnregister", self.words.address)
        if self._pin is not None:
            self._pin.close()
        self._sharing.give_back_stream(self._raw_stream)


class _Pin:
    """A reader's pin in this process: what it drafts from is not overwritten meanwhile.

    Attributes:
        words: int64 [PIN_WORDS].
    """

    def __init__(self, indexes: DeviceIndexes, name: str, device: torch.device) -> None:
        self._readers = indexes.memory.readers
        self._name = name
        index = device.index or 0
        size = cuda_memory.granularity(index)
        try:
            memory = Physical.create(index, size)
        except CudaError as error:
            raise ResourceExhausted(f"engine: {device} has no memory left for one more engine", "engine") from error
        self._range = AddressRange(index, size)
        try:
            self._range.map(0, memory, writable=True)
            self.words = self._range.tensor(0, PIN_WORDS, torch.int64)
            self.words.zero_()
            torch.cuda.current_stream(device).synchronize()
            self._readers.add(name, memory.export())
        finally:
            memory.release()

    def close(self) -> None:
        """Nothing waits for it any more. Nothing may be using it."""
        self._readers.remove(self._name)
        self._range.unmap(0, self._range.byte_size)
        self._range.close()


class _Array:
    """A tensor's place as PyTorch takes it."""

    def __init__(self, placed: Placed, kind: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": placed.shape,
            "typestr": kind,
            "data": (placed.address, False),
            "version": 3,
            "strides": None,
        }


def _view(placed: Placed, kind: str, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Array(placed, kind), device=device)
