"""Launches drafts for engines that share tensors, each when the engine's stream has come to it: one thread that never takes the GIL.

No stream of this process waits for an engine. Such a wait would cost 3 µs a step less, but while it lasts the driver neither loads a
module nor frees memory here, and refreshes would come after it; and an engine that is killed would never end it.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.errors import ResourceExhausted
from draftd.drafter.ops.intrinsics import fence, load_word, store_word
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.stream_words import DONE, READY, WordPage, call, is_reached, load32, now_ns, store32

DEPTH = 4
"""Drafts of one engine that may wait to be launched."""
_SLOTS = 256

# Words of a slot (int64).
_ACTIVE, _PAGE, _STREAM, _STAMP, _DONE_ON_DEVICE = 0, 1, 2, 3, 4
_HEAD, _TAIL = 5, 6
_LAUNCHED, _EXPIRED, _SKIPPED, _FAILED, _ERROR = 7, 8, 9, 10, 11
_USUAL_NS = 12
"""How long the engine's stream usually takes to come to what was queued."""
_QUEUE, _ENTRY_WORDS = 16, 4
_SEQUENCE, _GRAPH, _DEADLINE, _QUEUED_AT = 0, 1, 2, 3
_SLOT_WORDS = _QUEUE + DEPTH * _ENTRY_WORDS

_STOP, _TURNS = 0, 1
_GRAPH_LAUNCH, _WRITE_VALUE, _USLEEP, _YIELD, _CLOCK = 0, 1, 2, 3, 4
_NO_NAP_US, _SHORT_NAP_US, _NAP_US, _LONG_NAP_US = 0, 5, 50, 1000
_IDLE_NS = 100_000_000
_SET_TIMER_SLACK = 29


@dataclass(frozen=True, slots=True)
class LaunchCounts:
    """What became of an engine's drafts: launched; expired, since the engine's stream did not come in time; skipped, since the engine did
    not wait any longer; failed, of which `error` is the driver's last code."""

    launched: int
    expired: int
    skipped: int
    failed: int
    error: int

    def outcomes(self) -> dict[str, int]:
        """The counts by name."""
        return {"launched": self.launched, "expired": self.expired, "skipped": self.skipped, "failed": self.failed}


class Launcher:
    """The thread, and what it has to launch.

    Args:
        graph_launch, write_value: Addresses of the driver's cuGraphLaunch and cuStreamWriteValue32.
        prepare: Called first in the thread: makes the device current.
    """

    def __init__(self, graph_launch: int, write_value: int, prepare: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None)
        self._libc = libc
        self._table = np.zeros((_SLOTS, _SLOT_WORDS), np.int64)
        self._state = np.zeros(2, np.int64)
        system = [int(ctypes.cast(f, ctypes.c_void_p).value or 0) for f in (libc.usleep, libc.sched_yield, libc.clock_gettime)]
        self._calls = np.array([graph_launch, write_value, *system], np.int64)
        self._pages: dict[int, WordPage] = {}
        self._thread = threading.Thread(target=self._run, args=(prepare,), name="draftd-launch", daemon=True)
        self._thread.start()

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        # Naps of microseconds are otherwise as long as the kernel finds convenient.
        self._libc.prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
        launch_when_ready(self._table, self._state, self._calls, np.zeros(2, np.int64))

    def add(self, page: WordPage, stream: int, stamp: int, done: int) -> int:
        """Serves an engine from now on; its slot.

        Args:
            page: The engine's words. stream: The stream to launch on.
            stamp, done: Where to write a sequence number when its drafts are there, in this order; addresses on the device.

        Raises:
            ResourceExhausted: There are too many.
        """
        free = np.flatnonzero(self._table[:, _ACTIVE] == 0)
        if not len(free):
            raise ResourceExhausted(f"engine: {_SLOTS} engines share tensors on one device; that is the limit", "engine")
        slot = int(free[0])
        words = self._table[slot]
        words[:] = 0
        words[[_PAGE, _STREAM, _STAMP, _DONE_ON_DEVICE]] = page.address, stream, stamp, done
        self._pages[slot] = page
        store(words, _ACTIVE, 1)
        return slot

    def queue(self, slot: int, sequence: int, graph: int, wait_s: float) -> bool:
        """Launches a graph when the engine's stream has come to `sequence`; never after `wait_s` seconds. False if too many wait."""
        words = self._table[slot]
        head = int(words[_HEAD])
        if head - int(words[_TAIL]) >= DEPTH:
            return False
        entry = words[_QUEUE + head % DEPTH * _ENTRY_WORDS :]
        now = time.monotonic_ns()
        entry[[_SEQUENCE, _GRAPH, _DEADLINE, _QUEUED_AT]] = sequence, graph, now + int(wait_s * 1e9), now
        store(words, _HEAD, head + 1)
        return True

    def counts(self, slot: int) -> LaunchCounts:
        """What became of an engine's drafts so far."""
        return LaunchCounts(*(int(v) for v in self._table[slot, [_LAUNCHED, _EXPIRED, _SKIPPED, _FAILED, _ERROR]]))

    def remove(self, slot: int) -> LaunchCounts:
        """Forgets an engine; returns when nothing more will be launched for it, which takes a millisecond. Answers its last counts."""
        words = self._table[slot]
        store(words, _ACTIVE, 2)
        turn = int(self._state[_TURNS])
        while self._thread.is_alive() and int(self._state[_TURNS]) < turn + 2:
            time.sleep(0.0005)
        counts = self.counts(slot)
        del self._pages[slot]
        store(words, _ACTIVE, 0)
        return counts

    def close(self) -> None:
        """Ends the thread."""
        self._state[_STOP] = 1
        self._thread.join()


@kernel
def store(words: Any, index: int, value: int) -> None:
    """Stores a word that the thread reads; it then sees everything stored before."""
    fence()
    store_word(words, index, value)


@kernel
def launch_when_ready(table: NDArray[np.int64], state: NDArray[np.int64], calls: NDArray[np.int64], clock: NDArray[np.int64]) -> None:
    """The thread's loop, until state[0] is set. See Launcher."""
    busy_at = now_ns(calls[_CLOCK], clock)
    while state[_STOP] == 0:
        now = now_ns(calls[_CLOCK], clock)
        nap_us = _NAP_US if now - busy_at < _IDLE_NS else _LONG_NAP_US
        for slot in range(table.shape[0]):
            words = table[slot]
            while load_word(words, _ACTIVE) == 1 and words[_TAIL] < load_word(words, _HEAD):
                at = _QUEUE + words[_TAIL] % DEPTH * _ENTRY_WORDS
                sequence = words[at + _SEQUENCE]
                page = words[_PAGE]
                if is_reached(load32(page + DONE), sequence):
                    words[_SKIPPED] += 1
                elif is_reached(load32(page + READY), sequence):
                    _launch(words, sequence, words[at + _GRAPH], calls)
                    _learn(words, now - words[at + _QUEUED_AT])
                elif now > words[at + _DEADLINE]:
                    words[_EXPIRED] += 1
                    # Should the stream come yet, it need not wait.
                    store32(page + DONE, np.uint32(sequence & 0xFFFFFFFF))
                else:
                    busy_at = now
                    nap_us = min(nap_us, _nap_us(words[_USUAL_NS], now - words[at + _QUEUED_AT]))
                    break
                store_word(words, _TAIL, words[_TAIL] + 1)
        call(calls[_USLEEP if nap_us else _YIELD], nap_us, 0, 0, 0)
        state[_TURNS] += 1
        fence()


@kernel
def _launch(words: Any, sequence: int, graph: int, calls: Any) -> None:
    """Launches, and has the device write the sequence number: beside the drafts first, then where the engine's stream waits."""
    stream = words[_STREAM]
    error = call(calls[_GRAPH_LAUNCH], graph, stream, 0, 0)
    if error == 0:
        error = call(calls[_WRITE_VALUE], stream, words[_STAMP], sequence, 0)
    if error == 0:
        error = call(calls[_WRITE_VALUE], stream, words[_DONE_ON_DEVICE], sequence, 0)
    if error == 0:
        words[_LAUNCHED] += 1
        return
    words[_FAILED] += 1
    words[_ERROR] = error
    store32(words[_PAGE] + DONE, np.uint32(sequence & 0xFFFFFFFF))


@kernel
def _learn(words: Any, took_ns: int) -> None:
    """Follows the shorter of an engine's steps quickly, the longer slowly."""
    usual = words[_USUAL_NS]
    words[_USUAL_NS] = took_ns if usual == 0 or took_ns < usual else usual + (took_ns - usual) // 8


@kernel
def _nap_us(usual_ns: int, waited_ns: int) -> int:
    """How long to sleep before the next look: not at all about when the engine's stream usually comes, a little longer well before."""
    if usual_ns == 0 or 2 * waited_ns > 3 * usual_ns:
        return _SHORT_NAP_US
    if 10 * waited_ns > 9 * usual_ns:
        return _NO_NAP_US
    return _SHORT_NAP_US if 2 * waited_ns > usual_ns else _NAP_US
