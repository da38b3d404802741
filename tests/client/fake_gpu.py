"""A stand-in for a GPU and its driver, on which a stream does at once what it is given: addresses are those of this process.

The service's side drafts for each row the token after its last one. Words, watchdog, launcher and RPCs are the real ones.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.drafter.errors import FailedPrecondition, ResourceExhausted
from draftd.drafter.stream_words import DONE, READY, WordPage
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.launcher import Launcher

UUID = "cd" * 16
_GraphLaunch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
_WriteValue = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)


def _words(address: int, *shape: int) -> NDArray[np.int32]:
    size = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(address)).reshape(shape)


class _Handle:
    """An IPC handle."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class FakeStream:
    """A stream, and an event of it."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """All is done already."""

    def record_event(self) -> FakeStream:
        return self

    def query(self) -> bool:
        return True


@dataclass
class FakeDriver:
    """What the client calls.

    Attributes:
        registered: Pages that are registered.
        waited_s: How long the stream has waited in all.
    """

    registered: list[int] = field(default_factory=list)
    waited_s: float = 0.0

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1

    def cuCtxSetCurrent(self, context: int) -> None:
        assert context == 1

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        return 0, 1 << 62

    def cuIpcGetMemHandle(self, address: int) -> _Handle:
        return _Handle()

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self.registered.append(address)

    def cuMemHostUnregister(self, address: int) -> None:
        self.registered.remove(address)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        return address

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> None:
        started = time.monotonic()
        while (ctypes.c_uint32.from_address(address).value - value) & 0xFFFFFFFF >= 1 << 31:
            assert time.monotonic() < started + 20, "the stream is stuck"
            time.sleep(0.0001)
        self.waited_s += time.monotonic() - started


class FakeTensors:
    """One attachment's tensors; see draftd.server.device_handle.DeviceTensors.

    Attributes:
        mode: "drafts"; "refuses" proposals; or "is silent": answers and drafts nothing.
    """

    def __init__(self, sharing: FakeSharing, message: pb.EngineTensors, number: int, max_rows: int, k: int) -> None:
        self.mode = "drafts"
        self.buffer_rows = int(message.tokens.shape[0])
        self.tokens = _words(message.tokens.offset, *message.tokens.shape)
        self.lengths = _words(message.lengths.offset, self.buffer_rows)
        self.row_indices = _words(message.row_indices.offset, max_rows)
        self.draft_tokens = _words(message.draft_tokens.offset, max_rows, k)
        self.draft_probabilities = _words(message.draft_probabilities.offset, max_rows, k).view(np.float32)
        self.draft_info = _words(message.draft_info.offset, 4, max_rows)
        self.stamp = _words(message.draft_stamp.offset, 1)
        self.words = WordPage.create()
        self.closed = False
        self._launcher = sharing.launcher
        self._slot = sharing.launcher.add(self.words, number, message.draft_stamp.offset, self.words.address + DONE)

    def queue(self, sequence: int, batch: int, wait_s: float) -> None:
        if self.mode == "refuses":
            raise ResourceExhausted("sequence: no more", "sequence")
        if self.mode == "drafts":
            assert self._launcher.queue(self._slot, sequence, batch, wait_s)

    def draft(self, batch: int) -> None:
        """What a graph does."""
        for i, row in enumerate(self.row_indices[:batch].tolist()):
            there = 0 <= row < self.buffer_rows
            self.draft_tokens[i] = -1
            self.draft_tokens[i, 0] = self.tokens[row, self.lengths[row] - 1] + 1 if there else -1
            self.draft_probabilities[i] = 0.5 * there
            self.draft_info[:, i] = [1, 2, 3, 4] if there else 0

    async def reach(self, sequence: int, wait_s: float) -> None:
        if not self.words.reached(READY, sequence):
            raise FailedPrecondition("sequence: not yet", "sequence")

    async def read(self, row: int, length: int) -> NDArray[np.int32]:
        return self.tokens[row, :length].copy()

    def stop(self) -> None:
        """Nothing is read later."""

    def close(self) -> None:
        self._launcher.remove(self._slot)
        self.closed = True


class FakeSharing:
    """What engines share; see draftd.server.device_handle.TensorSharing."""

    abandoned, mps = 0, False

    def __init__(self) -> None:
        self.opened: list[FakeTensors] = []
        self._functions = _GraphLaunch(self._launch), _WriteValue(self._write)
        launch, write = (int(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in self._functions)
        self.launcher = Launcher(launch, write, lambda: None)

    def open(self, message: pb.EngineTensors, *, max_rows: int, params: Any, **others: Any) -> FakeTensors:
        self.opened.append(FakeTensors(self, message, len(self.opened), max_rows, params.k))
        return self.opened[-1]

    def _launch(self, graph: int, stream: int) -> int:
        self.opened[stream].draft(graph)
        return 0

    def _write(self, stream: int, address: int, value: int, flags: int) -> int:
        ctypes.c_uint32.from_address(address).value = value
        return 0

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.launcher.close()


def buffer(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and lengths of an engine: row i holds i * 10, i * 10 + 1, and so on, 4 of them."""
    tokens = torch.zeros((rows, length), dtype=torch.int32)
    tokens[:, :4] = torch.arange(rows)[:, None] * 10 + torch.arange(4)
    return tokens, torch.full((rows,), 4, dtype=torch.int32)
