"""Bytes that are no message of their method cost their sender INVALID_ARGUMENT; gRPC itself would log each as a defect of the service.

A message of a stream that cannot be parsed is raised where it is read, inside the method; see draftd.server.rpc.errors.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from draftd.server.metrics import OTHER, Metrics

MALFORMED = "the message cannot be parsed: it is not one of this method's requests"

Context = aio.ServicerContext[Any, Any]


class Registrar:
    """What generated code adds its services to in place of a server."""

    def __init__(self, server: aio.Server, metrics: Metrics) -> None:
        self._server = server
        self._metrics = metrics

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Nothing: the same handlers come as registered ones."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Registers the methods of a service."""
        self._server.add_registered_method_handlers(service, {name: _parsing(handler, self._refused) for name, handler in handlers.items()})

    def _refused(self) -> tuple[grpc.StatusCode, str]:
        self._metrics.rpc_error(OTHER, "INVALID_ARGUMENT")
        return grpc.StatusCode.INVALID_ARGUMENT, MALFORMED


Refused = Callable[[], tuple[grpc.StatusCode, str]]


def _parsing(handler: Any, refused: Refused) -> Any:
    """The same handler, for which bytes that cannot be parsed are an answer and not a defect."""
    if handler.request_streaming:
        # Those of ours tell a DecodeError by themselves; of the others, reflection alone takes a stream.
        return handler._replace(stream_stream=_stream_stream(handler.stream_stream, refused)) if handler.stream_stream else handler
    parse = handler.request_deserializer

    def parse_or_tell(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    handler = handler._replace(request_deserializer=parse_or_tell)
    if handler.unary_stream:
        return handler._replace(unary_stream=_unary_stream(handler.unary_stream, refused))
    return handler._replace(unary_unary=_unary_unary(handler.unary_unary, refused))


def _unary_unary(behavior: Any, refused: Refused) -> Any:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, DecodeError):
            await context.abort(*refused())
        return await behavior(request, context)

    return call


def _unary_stream(behavior: Any, refused: Refused) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, DecodeError):
            await context.abort(*refused())
        async for answer in behavior(request, context):
            yield answer

    return call


def _stream_stream(behavior: Any, refused: Refused) -> Any:
    async def call(requests: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for answer in behavior(requests, context):
                yield answer
        except DecodeError:
            await context.abort(*refused())

    return call
