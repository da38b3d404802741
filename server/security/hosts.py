"""The HTTP Host header: a request by a name that is not the service's is refused, whoever sends it.

A web page can have a name of its own point to this machine (DNS rebinding), and a browser then lets it read what answers there.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from draftd.server.metrics import Metrics

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

ANY = "*"


class HostGuard:
    """An ASGI application in front of another.

    Args:
        names: Names that are allowed, `.example.com` for all below it, `*` for any. localhost and addresses always are: a page that was
            loaded from an address can read from there only what it could anyway.
    """

    def __init__(self, app: App, names: Iterable[str], metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._names = frozenset(name.lower().rstrip(".") for name in names)

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
        """See the ASGI specification."""
        if scope["type"] == "http" and not all(self.allows(value) for key, value in scope["headers"] if key == b"host"):
            self._metrics.count("draftd_refused_calls_total", "host")
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 421, "headers": headers})
            await send({"type": "http.response.body", "body": b"the Host header is none of this service's names; see http_hosts\n"})
            return
        await self._app(scope, receive, send)

    def allows(self, header: bytes) -> bool:
        """The header is an address or an allowed name, with or without a port."""
        host = _name_of(header.decode("latin-1"))
        if _is_address(host) or host == "localhost" or host.endswith(".localhost") or ANY in self._names or host in self._names:
            return True
        below = host
        while "." in below:
            below = below.partition(".")[2]
            if f".{below}" in self._names:
                return True
        return False


def hosts_of(configured: str, bound: str) -> list[str]:
    """The names of `http_hosts`, that of this machine, and the host that HTTP is bound to."""
    return [bound, socket.gethostname(), *filter(None, (part.strip() for part in configured.split(",")))]


def _name_of(header: str) -> str:
    host, colon, port = header.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.endswith("]")):
        host = header
    return host.strip("[]").lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
