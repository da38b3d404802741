"""`draftd status`: what a running service is doing."""

import json

import typer
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.cli.channel import TIMEOUT_S, EndpointOption, JsonOption, channel, endpoint_or_default, wide_console
from draftd.server.cli.failure import Failure


def status(endpoint: EndpointOption = "", as_json: JsonOption = False) -> None:
    """Show whether the service serves, and its namespaces. Fails if it does not serve."""
    with channel(endpoint) as opened:
        checked = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(checked.status)
        namespaces = draftd_pb2_grpc.CorpusServiceStub(opened).ListNamespaces(pb.ListNamespacesRequest(), timeout=TIMEOUT_S).namespaces
    target = endpoint_or_default(endpoint)
    if as_json:
        listed = [_plain(namespace) for namespace in namespaces]
        typer.echo(json.dumps({"endpoint": target, "health": state, "namespaces": listed}, indent=2))
    else:
        typer.echo(f"{target}: {state}")
        _print_table(list(namespaces))
    if state != "SERVING":
        raise Failure(f"the service at {target} is {state}")


def _plain(namespace: pb.Namespace) -> dict[str, object]:
    """A namespace as JSON values, with 64-bit numbers as numbers."""
    fields = MessageToDict(namespace, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        name: int(value) if isinstance(value, str) and name not in ("name", "tokenizer_fingerprint") else value
        for name, value in fields.items()
        if name != "segments"
    } | {"segments": {name: getattr(namespace.segments, name) for name in ("main", "recent", "live")}}


def _print_table(namespaces: list[pb.Namespace]) -> None:
    if not namespaces:
        typer.echo("no namespaces yet")
        return
    table = Table("namespace", box=None, pad_edge=False)
    for column in ("vocab", "tokens", "of quota", "documents", "open", "evicted", "generation", "version", "MiB", "engines"):
        table.add_column(column, justify="right")
    for n in namespaces:
        table.add_row(
            n.name,
            str(n.vocab_size),
            f"{n.tokens:,}",
            f"{n.tokens / n.quota_tokens:.1%}",
            f"{n.documents:,}",
            f"{n.open_documents:,}",
            f"{n.evicted_tokens:,}",
            str(n.generation),
            str(n.version),
            f"{n.bytes / 2**20:.1f}",
            str(n.attachments),
        )
    wide_console().print(table)
