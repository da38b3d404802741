"""The device memory of all indexes on one GPU: allocated once, dealt out to namespaces, and the streams that fill it.

Refreshes run on streams of the lowest priority. What drafts in this process launches within `launching`, so that a refresh overwrites
nothing that a launch before it may still read; nothing on the host waits for the device for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock

import torch

from draftd.drafter.device_layout import ALIGNMENT, DEVICE_HEADER_WORDS
from draftd.drafter.errors import ResourceExhausted

_MIB = 1 << 20
_PRIORITIES = {"draft": -1, "refresh": 0, "merge": 0}
"""A lower number goes first; 0 is the last there is."""


class DeviceMemory:
    """An arena of int32 elements and the headers of the namespaces.

    Args:
        byte_size: Bytes to allocate for the arena.
        max_namespaces: Headers to allocate.
        device: A CUDA device; "cpu" for Triton's interpreter.

    Attributes:
        words: int32 [byte_size // 4]; the arena. headers: int64 [max_namespaces, DEVICE_HEADER_WORDS].

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
        self.words = torch.zeros(byte_size // 4, dtype=torch.int32, device=self.device)
        self.headers = torch.zeros((max_namespaces, DEVICE_HEADER_WORDS), dtype=torch.int64, device=self.device)
        if self.on_gpu:
            # Other streams write next: not before the zeros.
            torch.cuda.current_stream(self.device).synchronize()
        self._lock = Lock()
        # Free stretches by rising start, neighbours joined; and the headers that no index has.
        self._holes: list[tuple[int, int]] = [(0, self.words.shape[0] // ALIGNMENT * ALIGNMENT)]
        self._slots = list(reversed(range(max_namespaces)))
        self._streams = {name: torch.cuda.Stream(self.device, priority=p) for name, p in _PRIORITIES.items()} if self.on_gpu else {}
        # Triton's interpreter runs one kernel at a time.
        self._interpreter = RLock()
        self._launched: dict[int, torch.cuda.Event] = {}

    @property
    def byte_size(self) -> int:
        """Device memory that is taken for good."""
        return self.words.numel() * 4 + self.headers.numel() * 8

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
        size = -(-elements // ALIGNMENT) * ALIGNMENT
        with self._lock:
            for i, (start, hole) in enumerate(self._holes):
                if hole >= size and self._slots:
                    self._holes[i : i + 1] = [(start + size, hole - size)] if hole > size else []
                    return start, self._slots.pop()
            free = sum(hole for _, hole in self._holes)
        need, left, all_ = (4 * n / _MIB for n in (size, free, self.words.numel()))
        raise ResourceExhausted(
            f"an index needs {need:.1f} MiB of device memory; {left:.1f} of {all_:.1f} are free: raise device_memory or lower quota_tokens",
            "device_memory",
        )

    def give(self, start: int, elements: int, slot: int) -> None:
        """Gives back what `take` gave. Launches that may read it must have ended: see wait_for_launches."""
        size = -(-elements // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._slots.append(slot)
            self._holes = _joined(sorted([*self._holes, (start, size)]))

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
