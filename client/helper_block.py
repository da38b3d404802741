"""The memory that a DeviceSession and its helper process have in common: what kernels carry to the host, and what the helper counts."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.ops.collect.ring import Ring, RingShape
from draftd.drafter.stats import STATS_WORDS, EngineStats

_HEAD_BYTES = -(-8 * (STATS_WORDS + 2) // 64) * 64


def above_standard(fd: int) -> int:
    """A descriptor in place of one that has the number of a standard stream, since that was closed: a new process gets others there."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


class HelperBlock:
    """The block, mapped. It has no name, and goes when the last process that has it does.

    Attributes:
        fd: Its descriptor.
        address, byte_size: Where it is mapped here.
        stats: What was counted; the helper writes.
        overruns: int64 [1]; launches that were overwritten before the helper read them; the helper writes.
        beats: int64 [1]; times that the helper has looked for something to do; the helper writes.
        ring: Launches of collect_rows; the GPU writes.
    """

    def __init__(self, fd: int, shape: RingShape) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.byte_size = _HEAD_BYTES + shape.byte_size
        memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, self.byte_size, mmap.MAP_SHARED), np.uint8)
        self.address = int(memory.ctypes.data)
        words = memory[:_HEAD_BYTES].view(np.int64)
        self.stats = EngineStats(words[:STATS_WORDS])
        self.overruns = words[STATS_WORDS : STATS_WORDS + 1]
        self.beats = words[STATS_WORDS + 1 : STATS_WORDS + 2]
        self.ring = Ring(memory[_HEAD_BYTES:], shape)

    @staticmethod
    def create(shape: RingShape) -> HelperBlock:
        """A new block of zeros.

        Raises:
            OSError: There is no memory for it.
        """
        fd = above_standard(os.memfd_create("draftd-helper", os.MFD_CLOEXEC))
        try:
            os.posix_fallocate(fd, 0, _HEAD_BYTES + shape.byte_size)
        except OSError:
            os.close(fd)
            raise
        return HelperBlock(fd, shape)
