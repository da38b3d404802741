"""Blocks of shared memory as files in /dev/shm, and the directory of one service run.

A lock held on the directory marks the run as alive; a later run removes directories whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import uuid
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.layout import LAYOUT_VERSION, BlockSpec

_LOCK = "lock"


def default_root() -> Path:
    """The directory below which every service run of this user keeps its blocks."""
    return Path("/dev/shm") / f"draftd-{os.getuid()}"


def private_directory(path: Path) -> Path:
    """Makes `path` a directory of this user alone (mode 0700).

    Raises:
        PermissionError: It exists and belongs to somebody else.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
        raise PermissionError(f"{path} must be a directory of user {os.getuid()}")
    path.chmod(0o700)
    return path


class SharedBlock:
    """A mapped file of fixed size, of which memory is taken only where it was reserved or written.

    Writing where the file system has no room left kills the process (SIGBUS): reserve first.

    Attributes:
        path: The file.
        size: Its size in bytes.
        buf: uint8 [size], read-only unless opened writable.
    """

    def __init__(self, path: str, size: int, fd: int, writable: bool) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.buf: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, prot), np.uint8)

    @staticmethod
    def create(path: str, size: int) -> SharedBlock:
        """Creates the file, zeroed, and maps it writable.

        Raises:
            OSError: It exists, or cannot be made.
        """
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, size)
        return SharedBlock(path, size, fd, True)

    @staticmethod
    def open(path: str, size: int, writable: bool = False) -> SharedBlock:
        """Maps an existing file.

        Raises:
            OSError: It cannot be opened.
            ValueError: It is smaller than `size`.
        """
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise ValueError(f"the block is smaller than {size} bytes")
        return SharedBlock(path, size, fd, writable)

    @staticmethod
    def from_spec(spec: BlockSpec, *, create: bool = False, writable: bool = False) -> tuple[SharedBlock, dict[str, NDArray[np.generic]]]:
        """A block and its arrays by name; the mapping lives as long as any of them.

        Raises:
            ValueError: The layout version is not ours, or an array does not lie in the block.
            OSError: The file cannot be made or opened.
        """
        if spec.layout_version != LAYOUT_VERSION:
            raise ValueError(f"layout version {spec.layout_version} is not {LAYOUT_VERSION}")
        for array in spec.arrays:
            if array.offset < 0 or min(array.shape) < 0 or array.offset + array.byte_size > spec.byte_size:
                raise ValueError(f"array {array.name} does not lie in its block")
        block = SharedBlock.create(spec.handle, spec.byte_size) if create else SharedBlock.open(spec.handle, spec.byte_size, writable)
        return block, {a.name: block.buf[a.offset : a.offset + a.byte_size].view(a.dtype).reshape(a.shape) for a in spec.arrays}

    def reserve(self, offset: int, size: int) -> None:
        """Takes the memory of a part of the block.

        Raises:
            OSError: There is not enough (ENOSPC).
        """
        if size > 0:
            os.posix_fallocate(self._fd, offset, size)

    def resident_bytes(self) -> int:
        """Memory that the block takes now."""
        return os.fstat(self._fd).st_blocks * 512

    def unlink(self) -> None:
        """Removes the file's name; mappings stay valid."""
        Path(self.path).unlink(missing_ok=True)


class ShmDir:
    """The directory of one service run, locked while the run lives."""

    def __init__(self, path: Path, instance: str, lock_fd: int) -> None:
        self.path = path
        self.instance = instance
        self._lock_fd = lock_fd

    @staticmethod
    def create(root: Path | None = None) -> ShmDir:
        """Makes a new directory below `root` and removes those of runs that are dead.

        Raises:
            PermissionError: `root` belongs to somebody else.
        """
        root = private_directory(root or default_root())
        for other in root.iterdir():
            if (other / _LOCK).exists() and _lock(other / _LOCK, close=True) is not None:
                shutil.rmtree(other, ignore_errors=True)
        instance = uuid.uuid4().hex[:16]
        path = root / instance
        # The lock exists before the directory has its name, so that no other run can take it for a dead one.
        staging = root / f".{instance}"
        staging.mkdir(mode=0o700)
        (staging / _LOCK).touch(mode=0o600)
        fd = _lock(staging / _LOCK)
        assert fd is not None
        staging.rename(path)
        return ShmDir(path, instance, fd)

    def close(self) -> None:
        """Removes the directory; mappings stay valid."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _lock(path: Path, close: bool = False) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if close:
        os.close(fd)
        return -1
    return fd
