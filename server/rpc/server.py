"""One gRPC server for each endpoint, with all services on it: the Unix socket and TCP ask their callers for different things."""

import os
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import aio
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.endpoint import SocketPlace
from draftd.server.health import Health
from draftd.server.http import EndpointError
from draftd.server.rpc.corpus import CorpusRpc
from draftd.server.rpc.drafter import Drafter
from draftd.server.rpc.parsing import Registrar

SERVICES = ("draftd.v1.DrafterService", "draftd.v1.CorpusService")

_HANDSHAKE_MS = 10_000
_STREAMS_A_CONNECTION = 1024


def build_grpc(
    drafter: Drafter, corpus: CorpusRpc, health_: Health, interceptors: Sequence[aio.ServerInterceptor], max_message_bytes: int
) -> aio.Server:
    """A server with draftd's services, health, reflection and channelz, bound to nothing yet; the first interceptor is the outermost."""
    server = aio.server(
        interceptors=interceptors or None,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _STREAMS_A_CONNECTION),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.enable_channelz", 1),
        ],
    )
    names = (*SERVICES, health.SERVICE_NAME, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
    registrar: Any = Registrar(server, corpus.metrics)
    draftd_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, registrar)
    draftd_pb2_grpc.add_CorpusServiceServicer_to_server(corpus, registrar)
    health_pb2_grpc.add_HealthServicer_to_server(health_, registrar)
    channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.aio.ChannelzServicer(), registrar)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), registrar)
    return server


def bind_socket(server: aio.Server, place: SocketPlace) -> None:
    """Binds a server to a Unix socket that only this user can open; EndpointError if that cannot be."""
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{place.path}")
    except RuntimeError:
        raise EndpointError(f"socket {place.path}: cannot be bound") from None
    finally:
        os.umask(mask)
    place.verify()


def bind_tcp(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Binds a server to host:port, without TLS if there are no credentials, and answers the port; EndpointError if it is taken."""
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise EndpointError(f"listen {address}: the address is taken or cannot be bound; choose another --listen") from None
