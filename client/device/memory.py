"""The service's index as an engine's process sees it: read-only, at addresses that stay the same over every attachment.

So an engine's captured graphs stay valid when the service dies and comes back. Until the first service came there is an empty index.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import NamedTuple

import torch

from draftd.drafter import cuda_memory
from draftd.drafter.cuda_memory import AddressRange, Physical
from draftd.drafter.device_layout import DEVICE_CONTROL_WORDS, DEVICE_HEADER_WORDS, DEVICE_LAYOUT_VERSION, PIN_WORDS
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_TIMEOUT_S = 5.0
_LENGTH = struct.Struct("<I")
_MOST_FDS = 253
_MOST_BYTES = 1 << 20


class Received(NamedTuple):
    """What the service handed out: each namespace's header, and physical memory by its offset in the arena."""

    headers: dict[str, int]
    pieces: list[tuple[int, Physical]]


class MappedMemory:
    """Addresses for an arena of up to the GPU's size, and the pin that the service waits for.

    Attributes:
        words: int32; the arena. control: int64 [DEVICE_CONTROL_WORDS]; headers: int64 [any, DEVICE_HEADER_WORDS]: views of its beginning.
        pins: int64 [PIN_WORDS]; written by kernels of this process only.
        empty: As words, headers and control, an index without anything, which is there while others are mapped in place of one another.

    Raises:
        CudaError: The device cannot do it; the message says why.
    """

    def __init__(self, device: torch.device) -> None:
        failure = cuda_memory.sharing_failure(device)
        if failure:
            raise cuda_memory.CudaError(failure)
        self.device = device
        with torch.cuda.device(device):
            self._allocate()

    def _allocate(self) -> None:
        device = self.device
        index = device.index or 0
        self._unit = cuda_memory.granularity(index)
        total = torch.cuda.get_device_properties(device).total_memory
        self._range = AddressRange(index, -(-total // self._unit) * self._unit)
        self._pin_memory = Physical.create(index, self._unit)
        pins = AddressRange(index, self._unit)
        pins.map(0, self._pin_memory, writable=True)
        self.pins = pins.tensor(0, PIN_WORDS, torch.int64)
        self.pins.zero_()
        self._blank = Physical.create(index, self._unit)
        self._range.map(0, self._blank, writable=True)
        self._mapped: list[tuple[int, Physical]] = [(0, self._blank)]
        self.words = self._range.tensor(0, self._range.byte_size // 4, torch.int32)
        head = self.words[: self._unit // 4]
        head.zero_()
        words = head.view(torch.int64)
        self.control, self.headers = _parts(words)
        nothing = torch.zeros(self._unit // 4, dtype=torch.int32, device=device)
        control, headers = _parts(nothing.view(torch.int64))
        self.empty = (nothing, headers, control)
        torch.cuda.current_stream(device).synchronize()

    @property
    def mapped_bytes(self) -> int:
        """Where the last of what is mapped ends, in bytes from the arena's beginning."""
        return max((offset + memory.byte_size for offset, memory in self._mapped), default=0)

    def receive(self, device: pb.DeviceMap) -> Received:
        """Fetches what an attachment may map from the service's memory socket. Nothing is mapped yet.

        Raises:
            OSError, ValueError: It cannot be had, or does not fit.
        """
        if device.device_uuid != cuda_memory.device_uuid(self.device):
            raise ValueError(f"the index is on another GPU than {self.device}")
        if device.layout_version != DEVICE_LAYOUT_VERSION:
            raise ValueError(f"the index has layout {device.layout_version}; this client knows {DEVICE_LAYOUT_VERSION}")
        fds: list[int] = []
        pieces: list[tuple[int, Physical]] = []
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(device.socket)
            pin = self._pin_memory.export()
            try:
                ticket = device.ticket.encode()
                socket.send_fds(connection, [_LENGTH.pack(len(ticket)) + ticket], [pin])
            finally:
                os.close(pin)
            try:
                size = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
                if size > _MOST_BYTES:
                    raise ValueError(f"the answer has {size} bytes")
                about = json.loads(_exactly(connection, size))
                while len(fds) < len(about["pieces"]):
                    data, more, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
                    fds += more
                    if not data:
                        raise ValueError("the service closed the connection")
                if about["head_bytes"] != self._unit:
                    raise ValueError(f"the service has room for more namespaces than the {len(self.headers)} that this client can map")
                for offset, byte_size in about["pieces"]:
                    if not (offset >= 0 and byte_size > 0 and offset + byte_size <= self._range.byte_size):
                        raise ValueError(f"a piece of memory at {offset} of {byte_size} bytes does not fit the device")
                    pieces.append((offset, Physical.receive(fds.pop(0), byte_size)))
            except BaseException:
                release(pieces)
                raise
            finally:
                for fd in fds:
                    os.close(fd)
        return Received({str(name): int(header) for name, header in about["headers"].items()}, pieces)

    def replace(self, pieces: list[tuple[int, Physical]]) -> None:
        """Maps other memory in place of what was mapped. No kernel may be reading the arena.

        Raises:
            CudaError: The driver does not; the index is empty then.
        """
        old, self._mapped = self._mapped, []
        for offset, memory in old:
            self._range.unmap(offset, memory.byte_size)
            if memory is not self._blank:
                memory.release()
        try:
            for offset, memory in pieces:
                self._range.map(offset, memory, writable=False)
                self._mapped.append((offset, memory))
        except cuda_memory.CudaError:
            for offset, memory in self._mapped:
                self._range.unmap(offset, memory.byte_size)
            self._range.map(0, self._blank, writable=True)
            self._mapped = [(0, self._blank)]
            release(pieces)
            raise


def _parts(head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Control words and headers of a head, int64."""
    rows = (head.shape[0] - DEVICE_CONTROL_WORDS) // DEVICE_HEADER_WORDS
    return head[:DEVICE_CONTROL_WORDS], head[DEVICE_CONTROL_WORDS:][: rows * DEVICE_HEADER_WORDS].view(rows, DEVICE_HEADER_WORDS)


def release(pieces: list[tuple[int, Physical]]) -> None:
    """Gives back memory that was received and is not mapped."""
    for _, memory in pieces:
        memory.release()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ValueError("the service closed the connection")
        data += more
    return data
