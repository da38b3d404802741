"""How the client commands reach a service."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TypeVar

import grpc
import typer
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from draftd.client.channel import open_channel, socket_path
from draftd.client.credentials import ENV_PREFIX, Credentials
from draftd.drafter.errors import DraftdError
from draftd.server.cli.failure import Failure, UsageFailure
from draftd.server.config import default_socket

EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint",
        envvar="DRAFTD_ENDPOINT",
        help="Service to talk to: unix:/path or host:port. Default: the service's default socket.",
        show_default=False,
    ),
]
NamespaceOption = Annotated[str, typer.Option("--namespace", "-n", help='Namespace; empty means "default".', show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TIMEOUT_S = 30.0
_PLAIN_WIDTH = 200
_CONNECTED_S = 0.2
"""Longest time to find out whether a channel is connected, where it is not."""

M = TypeVar("M", bound=Message)

_credentials: ContextVar[Credentials | None] = ContextVar("credentials", default=None)
"""Those of the running command."""


def _flag(name: str, kind: Any, about: str, metavar: str | None = None) -> Any:
    option = typer.Option(
        "--" + name.replace("_", "-"),
        envvar=ENV_PREFIX + name.upper(),
        help=about,
        metavar=metavar,
        show_default=False,
        rich_help_panel="Connection",
    )
    return Annotated[kind, option]


_FLAGS = {
    "tls": _flag("tls", bool, "Use TLS; implied by the other --tls flags."),
    "tls_ca": _flag("tls_ca", Path | None, "PEM certificates of the authorities to believe. Default: those of the system.", "FILE"),
    "tls_cert": _flag("tls_cert", Path | None, "PEM certificate of the client, with --tls-key.", "FILE"),
    "tls_key": _flag("tls_key", Path | None, "PEM private key of the client.", "FILE"),
    "tls_server_name": _flag(
        "tls_server_name", str | None, "Name that the service's certificate must have, if not the endpoint's host.", "NAME"
    ),
    "token_file": _flag("token_file", Path | None, "File with a token, of mode 0600.", "FILE"),
    "socket_owner": _flag("socket_owner", int | None, "Also talk to a Unix socket of this user.", "UID"),
}


def sends_token() -> bool:
    """The running command proves who it is with a token, which may not show it everything."""
    credentials = _credentials.get()
    return bool(credentials and credentials.token_file)


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough for whoever reads our output from a pipe."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=_PLAIN_WIDTH)


def printable(text: str) -> str:
    """Text of others with control characters escaped: a terminal would obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def message_of(kind: type[M], **fields: Any) -> M:
    """A protobuf message of what flags say; UsageFailure if a value does not fit its field."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except ValueError:
            raise UsageFailure(f"--{name.replace('_', '-')}: {value!a} is out of range, or no UTF-8") from None
    return kind(**fields)


def endpoint_or_default(endpoint: str) -> str:
    """A gRPC target."""
    return endpoint or f"unix:{default_socket()}"


@contextlib.contextmanager
def channel(endpoint: str) -> Iterator[grpc.Channel]:
    """A channel to the service, with the credentials of the running command; what goes wrong becomes a Failure of one line."""
    target = endpoint_or_default(endpoint)
    options: list[tuple[str, int | str]] = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if socket_path(target) is not None:
        # A path is no host name, which HTTP/2 servers may want.
        options.append(("grpc.default_authority", "localhost"))
    try:
        opened = open_channel(target, _credentials.get() or Credentials(), options)
    except (DraftdError, PermissionError) as error:
        raise Failure(str(error)) from None
    with opened:
        try:
            yield opened
        except grpc.RpcError as error:
            raise _failure(error, target, opened) from None


def check_answers(endpoint: str) -> None:
    """Failure if no service answers; for commands whose engines would wait for one. They take their credentials from the environment."""
    try:
        _credentials.set(Credentials.from_environment())
    except DraftdError as error:
        raise UsageFailure(str(error)) from None
    with channel(endpoint) as opened:
        health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that opens channels one flag a field of Credentials."""
    signature = inspect.signature(command, eval_str=True)

    def call(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _FLAGS}
        try:
            _credentials.set(Credentials(**given | {"tls_server_name": given["tls_server_name"] or ""}))
        except DraftdError as error:
            raise UsageFailure(str(error)) from None
        command(**arguments)

    flags = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag) for name, flag in _FLAGS.items()]
    flags[0] = flags[0].replace(default=False)
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=[*parameters, *flags])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, *flags)}
    call.__doc__ = command.__doc__
    return call


def _failure(error: grpc.RpcError, target: str, opened: grpc.Channel) -> Failure:
    code = error.code()
    # A service says the same while it starts, or while its disk is full.
    if code == grpc.StatusCode.UNAVAILABLE and not _is_connected(opened):
        return Failure(f"no service answers at {target}; start one with `draftd serve`, or give --endpoint{_tls_hint(error)}")
    return Failure(f"{code.name}: {error.details()}")


def _is_connected(opened: grpc.Channel) -> bool:
    try:
        grpc.channel_ready_future(opened).result(_CONNECTED_S)
    except grpc.FutureTimeoutError:
        return False
    return True


def _tls_hint(error: grpc.RpcError) -> str:
    """What to look at where a connection was made and broken off."""
    details = (error.details() or "").lower()
    if any(word in details for word in ("ssl", "tls", "handshake", "certificate")):
        return "; the TLS handshake failed: see --tls-ca, --tls-cert and --tls-server-name"
    if "socket closed" in details or "reset" in details:
        return "; it broke the connection off: it may want --tls, or a certificate"
    return ""
