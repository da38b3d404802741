"""Who calls, found out before the first message of a call is read. What a call may do is settled where its request is known.

It is installed on an endpoint only where there is something to ask for: elsewhere a call costs nothing more.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc import aio

from draftd.drafter.errors import DraftdError
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.metrics import OTHER, Metrics
from draftd.server.security.access import ACCESS
from draftd.server.security.principal import CALLER, EVERYTHING, RIGHTS, PermissionDenied, Principal, Quotas, Unauthenticated
from draftd.server.security.rates import RateExceeded, Rates
from draftd.server.security.tokens import Tokens

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Need no token: a kubelet has none."""
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"
_HEALTH = "/grpc.health.v1.Health/"
_OURS = frozenset(
    f"/{service.full_name}/{method.name}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name in ACCESS
)

NO_TOKEN = "a token is needed: send it as metadata `authorization: Bearer TOKEN`"
_REASONS = ((Unauthenticated, "unauthenticated"), (PermissionDenied, "permission"), (RateExceeded, "rate"))

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]"


class Guard(aio.ServerInterceptor):
    """Sets CALLER for each call, or refuses it.

    Args:
        tokens: None: everybody may call, all as one principal "anonymous", which has `rates` and `quotas`.
    """

    def __init__(self, tokens: Tokens | None, rates: Rates, metrics: Metrics, quotas: Quotas | None = None) -> None:
        self._tokens = tokens
        self._anonymous = Principal("anonymous", frozenset(RIGHTS), (EVERYTHING,), rates, quotas=quotas or Quotas())
        self._metrics = metrics

    async def intercept_service(  # type: ignore[override]
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """See grpc.aio.ServerInterceptor."""
        method = details.method
        if method in OPEN_METHODS:
            return await continuation(details)
        try:
            CALLER.set(self._caller(method, details.invocation_metadata or ()))
        except DraftdError as error:
            count_refusal(self._metrics, error)
            self._metrics.rpc_error(method.rpartition("/")[2] if method in _OURS else OTHER, error.code)
            return _refusal(error)
        return await continuation(details)

    def _caller(self, method: str, metadata: Any) -> Principal:
        if self._tokens is None:
            return self._anonymous
        caller = self._tokens.authenticate(next((value for key, value in metadata if key == "authorization"), None))
        if caller is None:
            raise Unauthenticated(NO_TOKEN)
        if method in _OURS or method.startswith((_HEALTH, _REFLECTION)):
            return caller
        # What is left shows the connections of everybody, as channelz does, or does not exist.
        if not caller.may_everywhere("admin"):
            raise PermissionDenied(f"the token of {caller.name!r} lacks 'admin' in every namespace")
        return caller


def count_refusal(metrics: Metrics, error: Exception) -> None:
    """Counts a call that was refused for who made it or how fast; nothing for other errors."""
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            metrics.count("draftd_refused_calls_total", reason)


def _refusal(error: DraftdError) -> "grpc.RpcMethodHandler[Any, Any]":
    """Answers whatever kind of call it is, before a message of it is read."""

    async def refuse(_: Any, context: aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(grpc.StatusCode[error.code], str(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
