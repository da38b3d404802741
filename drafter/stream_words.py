"""Sequence words in a page of shared memory, by which GPU streams of two processes follow one another, and who watches them.

An engine's stream writes READY and waits for DONE; the service's host sees READY, launches, and its stream writes DONE. Events shared by
CUDA IPC would do the same, but one whose process is killed never completes, and nobody can end a wait for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from draftd.drafter.ops.intrinsics import fence
from draftd.drafter.ops.kernel import kernel

PAGE_BYTES = 4096
READY = 0
"""Sequence number that the engine's stream has come to. Offsets of words in the page, in bytes."""
DONE = 64
"""Sequence number up to which the engine's stream waits no longer: drafts are there, or nobody will make them."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WATCH_NAP_US = 100
_STOP, _GIVEN_UP = 0, 1


class WordPage:
    """The page, mapped. Nobody can make it smaller, so that no access to it fails, and nobody can take a word away from who waits for it.

    Attributes:
        path: What another process of this user opens it by.
        address: Where it is mapped.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._words: NDArray[np.uint32] = np.frombuffer(mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED), np.uint32)
        self.address = int(self._words.ctypes.data)

    @staticmethod
    def create() -> WordPage:
        """A new page of zeros.

        Raises:
            OSError: It cannot be made.
        """
        fd = os.memfd_create("draftd-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return WordPage(fd, f"/proc/{os.getpid()}/fd/{fd}")

    @staticmethod
    def open(path: str) -> WordPage:
        """Another process's page.

        Raises:
            OSError: It cannot be opened: its process is gone, or is in another PID namespace, or another user's.
            ValueError: It is no such page.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            sealed = False
        if not sealed or os.fstat(fd).st_size != PAGE_BYTES:
            os.close(fd)
            raise ValueError("what the service named is no page of sequence words")
        return WordPage(fd, path)

    def read(self, offset: int) -> int:
        """A word."""
        return int(self._words[offset // 4])

    def write(self, offset: int, value: int) -> None:
        """Stores a word; streams see it too."""
        self._words[offset // 4] = value & 0xFFFFFFFF

    def reached(self, offset: int, sequence: int) -> bool:
        """The word has come to that sequence number; they count on from 2^32 - 1 to 0."""
        return (self.read(offset) - sequence) & 0xFFFFFFFF < 1 << 31


class Watchdog:
    """Ends waits of this process's own stream for DONE: `timeout_us` after the stream came to a sequence number that is not done.

    A thread that never takes the GIL, so that nothing else in the process can hold it up. Its wait has a bound because of it alone.
    """

    def __init__(self, page: WordPage, timeout_us: int) -> None:
        self._page = page
        self._state = np.zeros(2, np.int64)
        libc = ctypes.CDLL(None)
        calls = np.array([_address(libc.usleep), _address(libc.clock_gettime)], np.int64)
        arguments = (page.address, timeout_us * 1000, self._state, calls, np.zeros(2, np.int64))
        # The thread keeps this object, and so the page that it reads.
        self._thread = threading.Thread(target=self._run, args=arguments, name="draftd-watchdog", daemon=True)
        self._thread.start()

    def _run(self, *arguments: Any) -> None:
        _watch(*arguments)

    @property
    def given_up(self) -> int:
        """Waits that it has ended."""
        return int(self._state[_GIVEN_UP])

    def close(self) -> None:
        """Ends every wait for the page, and the thread."""
        self._page.write(DONE, self._page.read(READY))
        self._state[_STOP] = 1
        self._thread.join()


def compile_watchdog() -> None:
    """Compiles what a watchdog runs, which takes seconds the first time on a machine."""
    Watchdog(WordPage.create(), 1).close()


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def load32(typingctx: Any, address: Any) -> Any:
    """Loads the uint32 at an address atomically; later loads stay later."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.load_atomic(pointer, "acquire", 4)

    return types.uint32(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def store32(typingctx: Any, address: Any, value: Any) -> Any:
    """Stores a uint32 at an address atomically; earlier stores stay earlier."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), codegen


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def call(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Calls the C function at an address with up to four integers of 64 bits; it reads as many as it has, and answers an int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [word, word, word, word])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int32(types.int64, types.int64, types.int64, types.int64, types.int64), codegen


@kernel
def is_reached(word: Any, sequence: int) -> bool:
    """A word, uint32, has come to a sequence number; see WordPage.reached."""
    return bool((np.int64(word) - sequence) & 0xFFFFFFFF < 1 << 31)


@kernel
def now_ns(clock_gettime: int, clock: Any) -> int:
    """The clock of time.monotonic_ns; `clock` int64 [2] is for what the system answers."""
    call(clock_gettime, 1, clock.ctypes.data, 0, 0)
    fence()
    return clock[0] * 1_000_000_000 + clock[1]


@kernel
def _watch(page: int, timeout_ns: int, state: Any, calls: Any, clock: Any) -> None:
    waited_for, since = np.int64(-1), np.int64(0)
    while state[_STOP] == 0:
        ready = load32(page + READY)
        if is_reached(load32(page + DONE), np.int64(ready)):
            waited_for = np.int64(-1)
        else:
            now = now_ns(calls[1], clock)
            if waited_for != ready:
                waited_for, since = np.int64(ready), now
            elif now - since > timeout_ns:
                state[_GIVEN_UP] += 1
                store32(page + DONE, ready)
        call(calls[0], _WATCH_NAP_US, 0, 0, 0)
        fence()
