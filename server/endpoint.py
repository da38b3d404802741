"""The Unix socket of the service: in whose directory it may lie, and whose it is.

Whoever can open the socket can read the corpus, so it is of mode 0600. A socket that a dead service left behind is removed; one that
answers is not touched.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path

from draftd.server.http import EndpointError


class SocketPlace:
    """The right to serve on a path: held until `close`, by a lock that ends with the process."""

    def __init__(self, path: Path) -> None:
        """Claims `path`; EndpointError if its directory is not ours or a service answers there."""
        self.path = path
        _check_directory(path.parent)
        self._lock_fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_stale(path)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise _taken(path) from None
        except EndpointError:
            os.close(self._lock_fd)
            raise

    def verify(self) -> None:
        """After binding: makes sure that nobody but this user can open the socket."""
        info = self.path.lstat()
        if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != 0o600:
            raise EndpointError(f"socket {self.path}: mode is {stat.S_IMODE(info.st_mode):o} instead of 600")

    def close(self) -> None:
        """Removes the socket and gives the path up."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _taken(path: Path) -> EndpointError:
    return EndpointError(f"socket {path}: a service is running there; stop it, or choose another --socket")


def _check_directory(directory: Path) -> None:
    """Makes the directory with mode 0700, or checks that it is ours or root's."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        raise EndpointError(f"socket directory {directory}: {error.strerror}") from None
    if info.st_uid not in (os.getuid(), 0):
        raise EndpointError(f"socket directory {directory} belongs to user {info.st_uid}, not to {os.getuid()}; choose another --socket")
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise EndpointError(f"socket directory {directory}: everybody can write to it, and so replace the socket; choose another --socket")


def _remove_stale(path: Path) -> None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise EndpointError(f"socket {path}: a file that is not a socket is in the way")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise EndpointError(f"socket {path}: {error.strerror or error}") from None
    raise _taken(path)
