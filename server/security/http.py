"""The same tokens for HTTP: everything but the probes needs one that may read every namespace, since it shows all of them."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from draftd.server.dashboard.pages import OPEN_PATHS as PAGE_PATHS
from draftd.server.metrics import Metrics
from draftd.server.security.guard import count_refusal
from draftd.server.security.principal import PermissionDenied, Principal, Unauthenticated
from draftd.server.security.rates import RateExceeded
from draftd.server.security.tokens import Tokens

OPEN_PATHS = frozenset({"/healthz", "/readyz"}) | PAGE_PATHS
"""Need no token: a kubelet has none, and the page, which holds no data, asks for one."""

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class HttpGuard:
    """An ASGI application in front of another."""

    def __init__(self, app: App, tokens: Tokens, metrics: Metrics) -> None:
        self._app = app
        self._tokens = tokens
        self._metrics = metrics

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            return
        if scope["path"] not in OPEN_PATHS:
            header = next((value for key, value in scope["headers"] if key == b"authorization"), None)
            try:
                _admit(self._tokens.authenticate(header))
            except (Unauthenticated, PermissionDenied, RateExceeded) as error:
                count_refusal(self._metrics, error)
                await _answer(error, send)
                return
        await self._app(scope, receive, send)


def _admit(caller: Principal | None) -> None:
    if caller is None:
        raise Unauthenticated("a token is needed: send it as header `Authorization: Bearer TOKEN`")
    if not caller.may_everywhere("read"):
        raise PermissionDenied(f"the token of {caller.name!r} lacks 'read' in every namespace")
    caller.rates.charge(0)


async def _answer(error: Unauthenticated | PermissionDenied | RateExceeded, send: Callable[[Message], Awaitable[None]]) -> None:
    status = {Unauthenticated: 401, PermissionDenied: 403, RateExceeded: 429}[type(error)]
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{error}\n".encode()})
