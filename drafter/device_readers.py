"""Engines that read an index in device memory: each pins an epoch while it drafts, and the writer waits for the pins before it overwrites.

The memory of a pin is the reader's, which outlives any service that it attaches to; the writer only reads it. As draftd.drafter.epochs on
the host: a reader that does not move on within the grace is passed over. It cannot tell, but its drafts can: each is checked at its end
against what has been reclaimed since it began.
"""

from __future__ import annotations

import os
import time
from threading import Lock

import torch

from draftd.drafter import cuda_memory
from draftd.drafter.cuda_memory import AddressRange, Physical
from draftd.drafter.device_layout import PIN_EPOCH, PIN_WORDS
from draftd.drafter.errors import InvalidArgument, ResourceExhausted

_GRACE_S = 0.05
_POLL_S = 0.0002
_MOST_READERS = 256


class DeviceReaders:
    """The pins of all readers on one device.

    Args:
        shared: Readers are other processes, which bring the memory of their pins.

    Attributes:
        passed_over: Times that a reader was not waited for any longer.
    """

    def __init__(self, device: torch.device, shared: bool) -> None:
        self.device = device
        self.passed_over = 0
        self._lock = Lock()
        self._places: dict[str, int] = {}
        self._free = list(reversed(range(_MOST_READERS)))
        self._stuck: dict[str, int] = {}
        self._memory: dict[str, Physical] = {}
        self._range: AddressRange | None = None
        if shared:
            index = device.index or 0
            self._stride = cuda_memory.granularity(index)
            self._range = AddressRange(index, _MOST_READERS * self._stride)
        self._pins: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, name: str, fd: int = -1) -> torch.Tensor:
        """Waits for this reader from now on; its pin, int64 [PIN_WORDS]. One of that name already is left as it is.

        Args:
            fd: Descriptor of its memory; closed. Without one the pin is this process's.

        Raises:
            ResourceExhausted: There are too many.
            InvalidArgument: The descriptor is not of memory on this device, or of too little.
        """
        with self._lock:
            if name in self._pins or self._range is None or not self._free:
                _close(fd)
            if name in self._pins:
                return self._pins[name]
            if not self._free:
                raise ResourceExhausted(f"engine: {_MOST_READERS} engines map the index on {self.device}; that is the limit")
            place = self._free.pop()
            if self._range is None:
                pin = torch.zeros(PIN_WORDS, dtype=torch.int64, device=self.device)
            else:
                try:
                    memory = Physical.receive(fd, self._stride)
                    self._range.map(place * self._stride, memory, writable=False)
                except cuda_memory.CudaError as error:
                    self._free.append(place)
                    raise InvalidArgument(f"pin: it is not {self._stride} bytes of memory on {self.device}", "pin") from error
                self._memory[name] = memory
                pin = self._range.tensor(place * self._stride, PIN_WORDS, torch.int64)
            self._places[name], self._pins[name] = place, pin
        return pin

    def remove(self, name: str) -> None:
        """Forgets a reader, and unmaps its pin."""
        with self._lock:
            place = self._places.pop(name, None)
            if place is None:
                return
            del self._pins[name]
            self._stuck.pop(name, None)
            if self._range is not None:
                memory = self._memory.pop(name)
                self._range.unmap(place * self._stride, memory.byte_size)
                memory.release()
            self._free.append(place)

    def wait(self, epoch: int) -> None:
        """Returns when no reader that moves is drafting from before `epoch`; at most the grace for those that do not."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            with self._lock:
                pins = self._read()
            waiting = False
            for name, pin in pins.items():
                if pin == 0 or pin >= epoch:
                    self._stuck.pop(name, None)
                elif self._stuck.get(name) != pin:
                    if time.monotonic() > deadline:
                        self._stuck[name] = pin
                        self.passed_over += 1
                    else:
                        waiting = True
            if not waiting:
                return
            time.sleep(_POLL_S)

    def _read(self) -> dict[str, int]:
        if not self._pins:
            return {}
        words = torch.stack([pin[PIN_EPOCH] for pin in self._pins.values()]).tolist()
        return dict(zip(self._pins, words, strict=True))


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
