"""`draftd status`: what a running service is doing."""

import json

import typer
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.cli.channel import TIMEOUT_S, EndpointOption, JsonOption, channel, endpoint_or_default, sends_token, wide_console
from draftd.server.cli.failure import Failure


def status(endpoint: EndpointOption = "", as_json: JsonOption = False) -> None:
    """Show whether the service serves, and its namespaces. Fails if it does not serve."""
    with channel(endpoint) as opened:
        checked = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(checked.status)
        if checked.status != health_pb2.HealthCheckResponse.SERVING:
            raise Failure(f"the service at {endpoint_or_default(endpoint)} is {state}")
        listed = draftd_pb2_grpc.CorpusServiceStub(opened).ListNamespaces(pb.ListNamespacesRequest(), timeout=TIMEOUT_S)
    target = endpoint_or_default(endpoint)
    if as_json:
        namespaces = [_plain(namespace) for namespace in listed.namespaces]
        store = (
            {field.name: getattr(listed.store, field.name) for field in pb.Store.DESCRIPTOR.fields} if listed.HasField("store") else None
        )
        replication = (
            {field.name: getattr(listed.replication, field.name) for field in pb.Replication.DESCRIPTOR.fields}
            if listed.HasField("replication")
            else None
        )
        shown = {"endpoint": target, "health": state, "store": store, "replication": replication, "namespaces": namespaces}
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(f"{target}: {state}")
        typer.echo(_store_line(listed))
        if listed.HasField("replication"):
            typer.echo(_replication_line(listed.replication))
        _print_table(list(listed.namespaces))


def _plain(namespace: pb.Namespace) -> dict[str, object]:
    """A namespace as JSON values, with 64-bit numbers as numbers."""
    fields = MessageToDict(namespace, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        name: int(value) if isinstance(value, str) and name not in ("name", "tokenizer_fingerprint") else value
        for name, value in fields.items()
        if name != "segments"
    } | {"segments": {name: getattr(namespace.segments, name) for name in ("main", "recent", "live")}}


def _store_line(listed: pb.ListNamespacesResponse) -> str:
    """The store in one line."""
    if not listed.HasField("store"):
        # The answer is the same for who may not read all namespaces.
        return "store: none that this token may see" if sends_token() else "store: none, nothing is kept after a stop"
    store = listed.store
    parts = [f"{store.bytes / 2**20:.1f} MiB", f"{store.pending_documents:,} documents not on disk"]
    if store.pending_documents:
        parts[-1] += f" for {store.lag_ms / 1000:.1f} s"
    if store.restored_documents:
        parts.append(f"{store.restored_documents:,} documents restored at the start")
    if store.damaged_documents:
        parts.append(f"{store.damaged_documents:,} were damaged")
    if store.failure:
        parts.append(f"CANNOT BE WRITTEN: {store.failure}")
    return "store: " + ", ".join(parts)


def _replication_line(replication: pb.Replication) -> str:
    """Replication in one line."""
    parts = [
        f"stream {replication.stream} as {replication.node}",
        f"{replication.published_documents:,} documents published, {replication.consumed_documents:,} taken",
        f"{replication.lag_messages:,} messages behind",
    ]
    if replication.outbox_documents:
        parts.append(f"{replication.outbox_documents:,} waiting to be published for {replication.outbox_age_ms / 1000:.1f} s")
    if replication.refused_messages:
        parts.append(f"{replication.refused_messages:,} messages refused")
    if replication.warning:
        parts.append(f"WARNING: {replication.warning}")
    if not replication.connected:
        parts.append(f"NOT CONNECTED: {replication.failure}")
    return "replication: " + ", ".join(parts)


def _print_table(namespaces: list[pb.Namespace]) -> None:
    if not namespaces:
        typer.echo("no namespaces yet")
        return
    table = Table("namespace", box=None, pad_edge=False)
    for column in ("vocab", "tokens", "of quota", "documents", "open", "evicted", "generation", "version", "MiB", "engines"):
        table.add_column(column, justify="right")
    for n in namespaces:
        table.add_row(
            f"{n.name} (asleep)" if n.asleep else n.name,
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
