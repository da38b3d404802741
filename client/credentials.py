"""How a client proves who it is, and makes sure of the service: TLS files, a token, and the owner of a Unix socket.

Settings come from the caller or from DRAFTD_CLIENT_* variables. Nothing here connects.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from draftd.drafter.errors import InvalidArgument

ENV_PREFIX = "DRAFTD_CLIENT_"
_MAX_TOKEN_FILE_BYTES = 4096
_TRUE = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client knows beside the endpoint.

    Attributes:
        tls: Use TLS; implied by each of the other tls settings. Not for Unix sockets.
        tls_ca: PEM certificates of the authorities to believe; None: those of the system.
        tls_cert: PEM certificate chain of the client, for a service that asks for one; goes with tls_key.
        tls_key: PEM private key of the client.
        tls_server_name: Name that the service's certificate must have, where it is not the endpoint's host.
        token_file: File whose only content is a token; nobody but its owner and group may have access to it.
        socket_owner: Also talk to a Unix socket of this user id; None: only to one of this user or root.
    """

    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    token_file: Path | None = None
    socket_owner: int | None = None

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidArgument("tls_cert and tls_key go together", "tls_cert")

    @staticmethod
    def from_environment() -> Credentials:
        """What the DRAFTD_CLIENT_* variables say.

        Raises:
            InvalidArgument: One is malformed.
        """
        given = {name: os.environ.get(ENV_PREFIX + name.upper(), "") for name in Credentials.__slots__}
        if given["tls"].lower() not in _TRUE:
            raise InvalidArgument(f"{ENV_PREFIX}TLS is {given['tls']!r}; it must be true or false", "tls")
        if given["socket_owner"] and not given["socket_owner"].isdecimal():
            raise InvalidArgument(f"{ENV_PREFIX}SOCKET_OWNER is {given['socket_owner']!r}; it must be a user id", "socket_owner")
        return Credentials(
            tls=_TRUE[given["tls"].lower()],
            tls_ca=_path(given["tls_ca"]),
            tls_cert=_path(given["tls_cert"]),
            tls_key=_path(given["tls_key"]),
            tls_server_name=given["tls_server_name"],
            token_file=_path(given["token_file"]),
            socket_owner=int(given["socket_owner"]) if given["socket_owner"] else None,
        )

    @property
    def uses_tls(self) -> bool:
        """Any of the tls settings is given."""
        return bool(self.tls or self.tls_ca or self.tls_cert or self.tls_server_name)

    def stamp(self) -> tuple[object, ...]:
        """Changes when one of the files does."""
        return tuple(_stamp(path) for path in (self.tls_ca, self.tls_cert, self.tls_key, self.token_file))

    def token(self) -> str:
        """The token; empty without a token file.

        Raises:
            InvalidArgument: The file cannot be read, is open to others, or holds no token.
        """
        if self.token_file is None:
            return ""
        try:
            with self.token_file.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(_MAX_TOKEN_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidArgument(f"token_file {self.token_file}: {error.strerror}", "token_file") from None
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise InvalidArgument(f"token_file {self.token_file}: others must have no access to it: chmod 600", "token_file")
        text = data.decode("ascii", "replace").strip()
        if not text or len(data) > _MAX_TOKEN_FILE_BYTES or not text.isascii() or any(c.isspace() or not c.isprintable() for c in text):
            raise InvalidArgument(f"token_file {self.token_file}: it must hold one token and nothing else", "token_file")
        return text


def check_socket(path: Path, owner: int | None) -> None:
    """Makes sure that a Unix socket is that of a service to trust; a socket that does not exist is left to whoever connects.

    Whoever answers on it sees all tokens sent, and says which files the client maps.

    Raises:
        PermissionError: It, or its directory, belongs to another user than this one, root or `owner`, or others can replace it.
    """
    trusted = {os.geteuid(), 0, *(() if owner is None else (owner,))}
    real = Path(os.path.realpath(path))
    try:
        directory, info = real.parent.stat(), real.lstat()
    except FileNotFoundError:
        return
    hint = "; give socket_owner if that is meant"
    if directory.st_uid not in trusted:
        raise PermissionError(f"the directory of socket {path} belongs to user {directory.st_uid}{hint}")
    if directory.st_mode & stat.S_IWOTH and not directory.st_mode & stat.S_ISVTX:
        raise PermissionError(f"everybody can write to the directory of socket {path}, and so replace it")
    if info.st_uid not in trusted:
        raise PermissionError(f"socket {path} belongs to user {info.st_uid}{hint}")


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _stamp(path: Path | None) -> object:
    if path is None:
        return None
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino
