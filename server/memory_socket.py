"""Hands out device memory to engines that map it: file descriptors travel over a Unix socket, which gRPC cannot do.

The socket lies in the service's private directory. Who connects must be this user, name an attachment by its ticket, and bring the memory
of its pin; the answer is described at DeviceMap in the .proto file.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from draftd.drafter.device_indexes import DeviceIndexes
from draftd.drafter.errors import DraftdError

_log = structlog.get_logger("draftd.memory")

TICKET_BYTES = 32
_TIMEOUT_S = 2.0
_FDS_A_MESSAGE = 200
_CREDENTIALS = struct.Struct("3i")
LENGTH = struct.Struct("<I")


class MemorySocket:
    """The socket and its thread.

    Args:
        directory: Where to make it.
        indexes: What it hands out, of each GPU.
    """

    def __init__(self, directory: Path, indexes: Sequence[DeviceIndexes]) -> None:
        self.path = directory / "memory"
        self.refused = 0
        self._indexes = {part.uuid: part for part in indexes}
        self._lock = threading.Lock()
        self._granted: dict[str, tuple[DeviceIndexes, str, Sequence[str]]] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="draftd-memory", daemon=True).start()

    def grant(self, attachment_id: str, uuid: str, namespaces: Sequence[str]) -> str:
        """Lets an attachment map the indexes of namespaces on a GPU, also of those that the sequence gets later; its ticket."""
        ticket = secrets.token_hex(TICKET_BYTES // 2)
        with self._lock:
            self._granted[ticket] = (self._indexes[uuid], attachment_id, namespaces)
        return ticket

    def revoke(self, ticket: str, attachment_id: str) -> None:
        """The attachment has ended. What it has mapped it keeps."""
        with self._lock:
            granted = self._granted.pop(ticket, None)
        if granted is not None:
            granted[0].unshare(attachment_id)

    def close(self) -> None:
        """Ends the thread, and removes the socket."""
        self.path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(_TIMEOUT_S)
                    self._answer(connection)
                except (OSError, DraftdError, ValueError) as error:
                    self.refused += 1
                    _log.warning("device memory was not handed out", reason=str(error))

    def _answer(self, connection: socket.socket) -> None:
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (0, os.getuid()):
            raise ValueError(f"user {uid} is not the service's")
        data, fds, _, _ = socket.recv_fds(connection, LENGTH.size + TICKET_BYTES, 4)
        try:
            while len(data) < LENGTH.size + TICKET_BYTES and (more := connection.recv(LENGTH.size + TICKET_BYTES - len(data))):
                data += more
            ticket = data[LENGTH.size :].decode(errors="replace")
            with self._lock:
                granted = next((g for known, g in self._granted.items() if secrets.compare_digest(known.encode(), ticket.encode())), None)
            if granted is None or len(fds) != 1:
                raise ValueError("no attachment has this ticket" if granted is None else f"{len(fds)} file descriptors instead of one")
            pin = fds.pop()
        finally:
            for fd in fds:
                os.close(fd)
        self._hand_out(connection, *granted, pin)

    def _hand_out(self, connection: socket.socket, indexes: DeviceIndexes, attachment_id: str, namespaces: Sequence[str], pin: int) -> None:
        shared = indexes.share(attachment_id, list(namespaces), pin)
        fds = [piece.fd for piece in shared.pieces]
        try:
            about = {
                "headers": shared.headers,
                "pieces": [[piece.offset, piece.byte_size] for piece in shared.pieces],
                "head_bytes": indexes.memory.head_bytes,
            }
            body = json.dumps(about).encode()
            connection.sendall(LENGTH.pack(len(body)) + body)
            for at in range(0, len(fds), _FDS_A_MESSAGE):
                socket.send_fds(connection, [b"."], fds[at : at + _FDS_A_MESSAGE])
        finally:
            for fd in fds:
                os.close(fd)
