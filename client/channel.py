"""A gRPC channel to a service, with TLS and a token where they are asked for; used by engines and by the command line.

What goes wrong here is said before anything is sent: a token never travels in the clear, nor to a socket of somebody else.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from draftd.client.credentials import Credentials, check_socket
from draftd.drafter.errors import InvalidArgument

_Option = tuple[str, int | str]


def grpc_target(endpoint: str) -> str:
    """An endpoint as gRPC wants it; a bare absolute path is a Unix socket."""
    return f"unix:{endpoint}" if endpoint.startswith("/") else endpoint


def socket_path(endpoint: str) -> Path | None:
    """The path of a Unix socket; None for TCP."""
    target = grpc_target(endpoint)
    if not target.startswith("unix:"):
        return None
    path = target.removeprefix("unix:")
    return Path(path.removeprefix("//") if path.startswith("//") else path)


def check_endpoint(endpoint: str, credentials: Credentials) -> None:
    """Raises InvalidArgument where credentials do not fit an endpoint."""
    if socket_path(endpoint) is not None:
        if credentials.uses_tls:
            raise InvalidArgument("tls is for host:port; a Unix socket is as safe as its file", "tls")
    elif credentials.token_file and not credentials.uses_tls and not _is_loopback(grpc_target(endpoint)):
        raise InvalidArgument("a token is sent over TLS only, or to this host: give tls, or tls_ca", "token_file")


def open_channel(endpoint: str, credentials: Credentials, options: Sequence[_Option] = ()) -> grpc.Channel:
    """A channel, which connects when it is used.

    Args:
        endpoint: `unix:PATH`, an absolute path, or `host:port`.

    Raises:
        InvalidArgument: The credentials do not fit the endpoint, or a file of theirs cannot be used.
        PermissionError: The Unix socket is not to be trusted.
    """
    check_endpoint(endpoint, credentials)
    path = socket_path(endpoint)
    if path is not None:
        check_socket(path, credentials.socket_owner)
    target = grpc_target(endpoint)
    token = credentials.token()
    if credentials.uses_tls:
        name = credentials.tls_server_name
        named: tuple[_Option, ...] = (("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)) if name else ()
        channel = grpc.secure_channel(target, _tls(credentials), options=[*options, *named])
    else:
        channel = grpc.insecure_channel(target, options=list(options))
    return grpc.intercept_channel(channel, _WithToken(token)) if token else channel


def _tls(credentials: Credentials) -> grpc.ChannelCredentials:
    def content(name: str) -> bytes | None:
        path: Path | None = getattr(credentials, name)
        try:
            return path.read_bytes() if path else None
        except OSError as error:
            raise InvalidArgument(f"{name} {path}: {error.strerror}", name) from None

    return grpc.ssl_channel_credentials(content("tls_ca"), content("tls_key"), content("tls_cert"))


def _is_loopback(target: str) -> bool:
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host.removeprefix("ipv4:").removeprefix("ipv6:")).is_loopback
    except ValueError:
        return host == "localhost"


class _Details(NamedTuple):
    """A call's details with further metadata."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Call(_Details, grpc.ClientCallDetails):  # type: ignore[misc]
    pass


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends the token with every call.

    gRPC's own call credentials would ask for it in another thread each time, which costs more than many a draft.
    """

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _send(self, continuation: Callable[[Any, Any], Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        call: Any = details
        metadata = [*(call.metadata or ()), self._header]
        return continuation(_Call(call.method, call.timeout, metadata, call.credentials, call.wait_for_ready, call.compression), request)

    intercept_unary_unary = _send  # type: ignore[assignment]
    intercept_unary_stream = _send  # type: ignore[assignment]
    intercept_stream_unary = _send  # type: ignore[assignment]
    intercept_stream_stream = _send  # type: ignore[assignment]
