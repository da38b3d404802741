"""The data directory: whose it is, and the lock that keeps a second service out of it."""

import fcntl
import os
from pathlib import Path

_LOCK = "lock"


class StoreError(Exception):
    """The store cannot be used as it is; the message says why and what to do."""


class DataDir:
    """The right to keep a corpus in a directory: held until `close`, by a lock that ends with the process."""

    def __init__(self, path: Path) -> None:
        """Claims the directory, which is made with mode 0700 if it is not there.

        Raises:
            StoreError: It is another user's, cannot be written, or is in use.
        """
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = path.stat().st_uid
        except OSError as error:
            raise _unusable(path, error) from None
        if owner != os.geteuid():
            raise StoreError(
                f"data_dir {path} belongs to user {owner}, not to {os.geteuid()}; choose another --data-dir, or change its owner"
            )
        try:
            self._lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip()
            os.close(self._lock_fd)
            raise StoreError(
                f"data_dir {path} is used by another service, process {holder}; stop it, or choose another --data-dir"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Gives the directory up."""
        os.close(self._lock_fd)


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"data_dir {path} cannot be written: {error.strerror}; choose another --data-dir, or leave it out to keep nothing")
