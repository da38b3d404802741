"""The device memory of all indexes on one GPU: allocated once, dealt out to namespaces, shared with engines, and the streams that fill it.

Refreshes run on streams of the lowest priority. What drafts in this process launches within `launching`, so that a refresh overwrites
nothing that a launch before it may still read; engines that map the memory pin epochs, see draftd.drafter.device_readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import NamedTuple

import torch

from draftd.drafter import cuda_memory
from draftd.drafter.cuda_memory import AddressRange, CudaError, Physical
from draftd.drafter.device_layout import (
    ALIGNMENT,
    DEVICE_CONTROL_WORDS,
    DEVICE_DESCRIPTOR_WORDS,
    DEVICE_DESCRIPTORS_START,
    DEVICE_EPOCH,
    DEVICE_HEADER_WORDS,
)
from draftd.drafter.device_readers import DeviceReaders
from draftd.drafter.errors import ResourceExhausted

_MIB = 1 << 20
_PRIORITIES = {"draft": -1, "refresh": 0, "merge": 0}
"""A lower number goes first; 0 is the last there is."""
_MOST_PIECES = 128
"""Pieces of physical memory that an arena is made of: a process passes each as one file descriptor."""


class Exported(NamedTuple):
    """Physical memory for another process: where it belongs in the arena, its size, and a file descriptor that the receiver closes."""

    offset: int
    byte_size: int
    fd: int


class DeviceMemory:
    """An arena of int32 elements that begins with control words and the headers of the namespaces.

    Args:
        byte_size: Bytes to allocate for indexes.
        max_namespaces: Headers to allocate.
        device: A CUDA device; "cpu" for Triton's interpreter.

    Attributes:
        words: int32; the arena. control: int64 [DEVICE_CONTROL_WORDS]; headers: int64 [max_namespaces, DEVICE_HEADER_WORDS]; views of it.
        sharing_failure: Why other processes cannot map it; empty if they can.
        readers: Engines that map it.

    Raises:
        ResourceExhausted: The device has not that much free memory.
    """

    def __init__(self, byte_size: int, max_namespaces: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            free, _ = torch.cuda.mem_get_info(self.device)
            if byte_size > free:
                raise ResourceExhausted(
                    f"device_memory is {byte_size // _MIB} MiB; {self.device} has {free // _MIB} MiB free", "device_memory"
                )
        head = 8 * (DEVICE_CONTROL_WORDS + max_namespaces * DEVICE_HEADER_WORDS)
        self.sharing_failure = cuda_memory.sharing_failure(self.device)
        self._range: AddressRange | None = None
        self._pieces: list[Physical] = []
        if self.sharing_failure:
            self.head_bytes, self.piece_bytes = -(-head // (4 * ALIGNMENT)) * 4 * ALIGNMENT, 4 * ALIGNMENT
            self.words = torch.zeros((self.head_bytes + byte_size) // 4, dtype=torch.int32, device=self.device)
        else:
            self._allocate(head, byte_size)
        words = self.words[: head // 4].view(torch.int64)
        self.control = words[:DEVICE_CONTROL_WORDS]
        self.headers = words[DEVICE_CONTROL_WORDS:].view(max_namespaces, DEVICE_HEADER_WORDS)
        self.readers = DeviceReaders(self.device, self._range is not None)
        if self.on_gpu:
            # Other streams write next: not before the zeros.
            torch.cuda.current_stream(self.device).synchronize()
        self._epoch = 0
        self._lock = Lock()
        # Free stretches by rising start, neighbours joined; the headers that no index has, the one that is free for longest first.
        start = self.head_bytes // 4
        self._holes: list[tuple[int, int]] = [(start, (self.words.shape[0] - start) // self._step * self._step)]
        self._slots = deque(range(max_namespaces))
        self._exported: set[int] = set()
        self._streams = {name: torch.cuda.Stream(self.device, priority=p) for name, p in _PRIORITIES.items()} if self.on_gpu else {}
        # Triton's interpreter runs one kernel at a time.
        self._interpreter = RLock()
        self._launched: dict[int, torch.cuda.Event] = {}

    def _allocate(self, head: int, byte_size: int) -> None:
        """Makes the arena of pieces that can be exported."""
        index = self.device.index or 0
        unit = cuda_memory.granularity(index)
        self.head_bytes = -(-head // unit) * unit
        self.piece_bytes = max(1, -(-byte_size // (_MOST_PIECES * unit))) * unit
        pieces = -(-byte_size // self.piece_bytes)
        self._range = AddressRange(index, self.head_bytes + pieces * self.piece_bytes)
        try:
            for offset, size in [(0, self.head_bytes)] + [
                (self.head_bytes + i * self.piece_bytes, self.piece_bytes) for i in range(pieces)
            ]:
                self._pieces.append(Physical.create(index, size))
                self._range.map(offset, self._pieces[-1], writable=True)
        except CudaError as error:
            raise ResourceExhausted(
                f"device_memory is {byte_size // _MIB} MiB; {self.device} does not give as much", "device_memory"
            ) from error
        self.words = self._range.tensor(0, self._range.byte_size // 4, torch.int32)
        self.words.zero_()

    @property
    def under_mps(self) -> bool:
        """See cuda_memory.under_mps; False where the driver does not say."""
        try:
            return cuda_memory.under_mps(self.device)
        except CudaError:
            return False

    @property
    def failure(self) -> str:
        """See cuda_memory.device_failure."""
        return cuda_memory.device_failure(self.device)

    @property
    def _step(self) -> int:
        """int32 elements that stretches are multiples of."""
        return self.piece_bytes // 4

    def _rounded(self, elements: int) -> int:
        """int32 elements of a stretch that has at least so many."""
        return -(-elements // self._step) * self._step

    @property
    def byte_size(self) -> int:
        """Device memory that is taken for good."""
        return self.words.numel() * 4

    @property
    def free_bytes(self) -> int:
        """Bytes of the arena that no index has."""
        with self._lock:
            return 4 * sum(size for _, size in self._holes)

    def take(self, elements: int) -> tuple[int, int]:
        """Takes a stretch of the arena and a header, and answers where the stretch starts and which header it is.

        Raises:
            ResourceExhausted: There is none as large.
        """
        size = self._rounded(elements)
        with self._lock:
            for i, (start, hole) in enumerate(self._holes):
                if hole >= size and self._slots:
                    self._holes[i : i + 1] = [(start + size, hole - size)] if hole > size else []
                    return start, self._slots.popleft()
            free = sum(hole for _, hole in self._holes)
        need, left, all_ = (4 * n / _MIB for n in (size, free, self.words.numel()))
        raise ResourceExhausted(
            f"an index needs {need:.1f} MiB of device memory; {left:.1f} of {all_:.1f} are free: raise device_memory or lower quota_tokens",
            "device_memory",
        )

    def give(self, start: int, elements: int, slot: int) -> None:
        """Gives back what `take` gave. Nothing may read it any more: see wait_for_launches and the readers.

        What an engine has mapped stays what that engine sees: another namespace gets other memory.
        """
        size = self._rounded(elements)
        self._replace_exported(4 * start, 4 * size)
        with self._lock:
            self._slots.append(slot)
            self._holes = _joined(sorted([*self._holes, (start, size)]))

    def last_version(self, slot: int) -> int:
        """The highest version that an index with this header had."""
        return int(self.headers[slot, DEVICE_DESCRIPTORS_START::DEVICE_DESCRIPTOR_WORDS].max())

    def export_head(self) -> list[Exported]:
        """The control words and headers, for another process; see Exported.

        Raises:
            CudaError: The driver does not.
        """
        return [Exported(0, self.head_bytes, self._pieces[0].export())]

    def export(self, start: int, elements: int) -> list[Exported]:
        """A stretch that `take` gave, for another process; see Exported.

        Raises:
            CudaError: The driver does not.
        """
        numbers = self._numbers(4 * start, 4 * elements)
        self._exported.update(numbers)
        return [Exported(self._offset(i), self.piece_bytes, self._pieces[i].export()) for i in numbers]

    def _numbers(self, offset: int, byte_size: int) -> list[int]:
        """Which pieces lie in a part of the arena behind the head."""
        first = 1 + (offset - self.head_bytes) // self.piece_bytes
        return list(range(first, first + -(-byte_size // self.piece_bytes)))

    def _offset(self, number: int) -> int:
        return self.head_bytes + (number - 1) * self.piece_bytes

    def _replace_exported(self, offset: int, byte_size: int) -> None:
        if self._range is None:
            return
        index = self.device.index or 0
        for number in self._exported.intersection(self._numbers(offset, byte_size)):
            self._range.unmap(self._offset(number), self.piece_bytes)
            self._pieces[number].release()
            self._pieces[number] = Physical.create(index, self.piece_bytes)
            self._range.map(self._offset(number), self._pieces[number], writable=True)
            self._exported.discard(number)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Work of the context goes to a stream: "draft"; "refresh"; or "merge", for merges into `main`, after refreshes before it.

        What refreshes and merges do comes after the drafting that was launched before.

        Raises:
            MemoryError: Scratch memory cannot be allocated.
        """
        if not self.on_gpu:
            with self._interpreter:
                yield
            return
        stream = self._streams[name]
        if name != "draft":
            with self._lock:
                launched = list(self._launched.values())
            for event in launched:
                stream.wait_event(event)
        if name == "merge":
            stream.wait_stream(self._streams["refresh"])
        try:
            with torch.cuda.stream(stream):
                yield
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{self.device} has no memory left beside the indexes") from error

    def wait(self, name: str) -> None:
        """Waits on the host until a stream has done what it was given."""
        if self.on_gpu:
            self._streams[name].synchronize()

    def advance(self) -> int:
        """Counts a publication, on the current stream, and answers the new epoch."""
        with self._lock:
            self._epoch += 1
            epoch = self._epoch
            self.control[DEVICE_EPOCH].fill_(epoch)
        return epoch

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Drafting is launched on the current stream meanwhile: what it reads is overwritten only after it has ended.

        Refreshes do not begin in between: one that began after the launch and before the note would not wait for it.
        """
        if not self.on_gpu:
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        with self._lock:
            try:
                yield
            finally:
                self._launched.setdefault(stream.cuda_stream, torch.cuda.Event()).record(stream)

    def wait_for_launches(self) -> None:
        """Waits on the host until everything noted has ended."""
        with self._lock:
            launched = list(self._launched.values())
        for event in launched:
            event.synchronize()


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, size in holes:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + size)
        else:
            out.append((start, size))
    return out
