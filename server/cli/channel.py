"""How the client commands reach a service."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import grpc
import typer
from rich.console import Console

from draftd.server.cli.failure import Failure
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


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough for whoever reads our output from a pipe."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=_PLAIN_WIDTH)


def endpoint_or_default(endpoint: str) -> str:
    """A gRPC target."""
    return endpoint or f"unix:{default_socket()}"


@contextlib.contextmanager
def channel(endpoint: str) -> Iterator[grpc.Channel]:
    """A channel to the service; what the service answers or fails to answer becomes a Failure of one line."""
    target = endpoint_or_default(endpoint)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(target, options=options) as opened:
        try:
            yield opened
        except grpc.RpcError as error:
            raise _failure(error, target) from None


def _failure(error: grpc.RpcError, target: str) -> Failure:
    code = error.code()
    if code == grpc.StatusCode.UNAVAILABLE:
        return Failure(f"no service answers at {target}; start one with `draftd serve`, or give --endpoint")
    return Failure(f"{code.name}: {error.details()}")
