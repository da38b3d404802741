"""What replication is told by the configuration: servers, stream, this node's name, credentials. Needs no NATS library.

A secret is read from its file at each connection, so that it can be changed while the service runs, and is never logged.
"""

import fnmatch
import re
import socket
import ssl
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftd.server.replicate.credentials import read_credentials
from draftd.server.security.files import FileRefused

STREAM_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NODE_NAME = re.compile(r"[A-Za-z0-9._-]{0,253}")
_SCHEMES = ("nats://", "tls://")


def servers_of(urls: str) -> list[str]:
    """The servers of `replicate`; ValueError unless they are nats://host:port or tls://host:port, all of one kind, without a user."""
    servers = [part.strip() for part in urls.split(",") if part.strip()]
    for server in servers:
        scheme = next((s for s in _SCHEMES if server.startswith(s)), None)
        address = server.removeprefix(scheme or "")
        if "@" in server:
            # The URL would be in the list of processes, and in logs.
            raise ValueError("a URL holds a user or a password; put them into the file of replicate_credentials")
        host, _, port = address.rpartition(":")
        if scheme is None or not host or not re.fullmatch(r"[A-Za-z0-9.\-:\[\]_]+", host) or not port.isdecimal() or int(port) > 65_535:
            raise ValueError(f"{server!r} is not nats://host:port or tls://host:port")
    if len({server.partition(":")[0] for server in servers}) > 1:
        raise ValueError("nats:// and tls:// cannot be mixed")
    return servers


def node_name(configured: str) -> str:
    """The configured name, or that of the host, in the characters and the length that NATS takes."""
    given = configured or socket.gethostname() or "node"
    name = re.sub(r"[^A-Za-z0-9_-]", "-", given)
    # What tells long names apart is often at their end.
    return name if len(name) <= 64 else f"{name[:55]}-{zlib.crc32(given.encode()):08x}"


@dataclass(frozen=True)
class ReplicationSettings:
    """Where and what a service replicates.

    Attributes:
        node: Name of this node, the same over restarts and different from that of every other node.
        namespaces: Patterns with * and ?; empty: all.
        max_bytes, max_age_s: Limits of the stream where this service makes it.
        max_tokens: Longest document taken.
    """

    servers: tuple[str, ...]
    stream: str
    node: str
    namespaces: tuple[str, ...] = ()
    max_bytes: int = 2**30
    max_age_s: float = 0.0
    max_tokens: int = 131_072
    credentials: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def wants(self, namespace: str) -> bool:
        """A namespace of that name is replicated."""
        return not self.namespaces or any(fnmatch.fnmatchcase(namespace, pattern) for pattern in self.namespaces)

    def exact_namespaces(self) -> list[str]:
        """The namespaces to share where they are all given by name: then NATS sends no others."""
        return [] if any(set(pattern) & set("*?[") for pattern in self.namespaces) else list(self.namespaces)

    def secrets(self) -> Mapping[str, str]:
        """What NATS asks for, see read_credentials; empty without a file.

        Raises:
            FileRefused: It cannot be used; the message does not tell its content.
        """
        return read_credentials(self.credentials) if self.credentials else {}

    def tls(self) -> ssl.SSLContext | None:
        """What tls:// servers are checked with; None for nats://.

        Raises:
            FileRefused: A certificate or key cannot be used.
        """
        if not self.servers[0].startswith("tls://"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise FileRefused(f"replicate_tls: a certificate or key cannot be used: {error.strerror or error}") from None
        return context
