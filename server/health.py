"""grpc.health.v1.Health for names that are all in one state: that of the service.

Unlike the servicer of grpcio-health-checking, a watcher that leaves takes nothing from the others, and none outlives the last state.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context = aio.ServicerContext[Any, Any]
_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The state of some names; NOT_SERVING at first.

    Args:
        names: Names of services; "" is the server.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._status = _Response.NOT_SERVING
        self._last = False
        self._changed = asyncio.Event()

    def set(self, serving: bool, last: bool = False) -> None:
        """Tells every watcher; after the last state their streams end."""
        self._status = _Response.SERVING if serving else _Response.NOT_SERVING
        self._last |= last
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        """The state now; NOT_FOUND for a name that is not one of ours."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: no such service")
        return _Response(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncIterator[Any]:
        """The state now and each later one; SERVICE_UNKNOWN for a name that is not one of ours."""
        if request.service not in self._names:
            yield _Response(status=_Response.SERVICE_UNKNOWN)
        told = None
        while True:
            changed = self._changed
            if request.service in self._names and told != self._status:
                told = self._status
                yield _Response(status=told)
                continue
            if self._last:
                return
            await changed.wait()
