"""A gate in a stream of this process: what is launched behind it waits until the host has launched all of it.

Processes take turns on a GPU. Work that comes kernel by kernel, as the host launches it, costs the others a turn each time; this costs one.
"""

from __future__ import annotations

import weakref

from draftd.drafter import cuda_memory
from draftd.drafter.stream_words import DONE, PAGE_BYTES, READY, Watchdog, WordPage

_LONGEST_US = 5000
_NAP_US = 1000
_DEVICE_MAP = 2


class StreamGate:
    """The gate of one stream. One thread at a time uses it.

    It opens by itself after a few milliseconds: what the host does meanwhile may itself wait for the stream, as loading a kernel does.

    Args:
        stream: The driver's handle of the stream, whose context is current.

    Raises:
        CudaError: The driver does not have streams wait for memory.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._sequence = 0
        self._page = WordPage.create()
        cuda_memory.call("cuMemHostRegister", self._page.address, PAGE_BYTES, _DEVICE_MAP)
        self._words = int(cuda_memory.call("cuMemHostGetDevicePointer", self._page.address, 0))
        self._watchdog = Watchdog(self._page, _LONGEST_US, _NAP_US)
        weakref.finalize(self, self._watchdog.close)

    def shut(self) -> None:
        """Holds what is launched from now on; does nothing if the gate is shut."""
        if not self._page.reached(DONE, self._sequence):
            return
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._page.write(READY, self._sequence)
        cuda_memory.call("cuStreamWaitValue32", self._stream, self._words + DONE, self._sequence, 0)

    def open(self) -> None:
        """Lets through what was held."""
        self._page.write(DONE, self._sequence)

    @property
    def opened_late(self) -> int:
        """Times that it opened by itself."""
        return self._watchdog.given_up
