"""Files that the service reads again when they change: certificates and tokens."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

Stamp = tuple[tuple[int, int, int, int] | None, ...]


class FileRefused(Exception):
    """A file cannot be used; the message names it and says why."""


def stamp(paths: Sequence[Path]) -> Stamp:
    """What changes when one of the files does, be it written, replaced, or given other permissions; None where there is none."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


def read(path: Path) -> bytes:
    """The content of a file; FileRefused if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None


def _check_private(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise FileRefused(f"{path}: not a regular file")
    if info.st_uid not in (os.geteuid(), 0):
        raise FileRefused(f"{path}: belongs to user {info.st_uid}; it must belong to user {os.geteuid()} or root")
    if info.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise FileRefused(f"{path}: mode is {stat.S_IMODE(info.st_mode):04o}; others must have no access to it: chmod 600")


def read_private(path: Path, limit_bytes: int) -> bytes:
    """The content of a file that nobody but its owner, and at most its group for reading, has access to.

    Raises:
        FileRefused: It cannot be read, is no regular file, has more than `limit_bytes`, belongs to another user than this one or root,
            is open to others, or can be written by its group.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None
    try:
        _check_private(path, os.fstat(fd))
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(data) > limit_bytes:
        raise FileRefused(f"{path}: has more than {limit_bytes} bytes")
    return data
