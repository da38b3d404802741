"""The audit log: one line for each call that administers the corpus or moves much of it, whatever came of it.

Its lines have `logger: "draftd.audit"`, and are written at every log level.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.message import Message
from grpc import aio

from draftd.server.metrics import Metrics
from draftd.server.security.principal import CALLER

AUDIT_LOGGER = "draftd.audit"
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}

Context = aio.ServicerContext[Any, Any]


class AuditedCall:
    """One call from its start to its line in the log; a context manager around answering it.

    Attributes:
        request: The call's request, or stream of requests, to be answered in place of the one given.
    """

    def __init__(self, method: str, request: Any, context: Context, metrics: Metrics) -> None:
        self._method = method
        self._context = context
        self._metrics = metrics
        self._namespace = ""
        # Asked for now: when a stream that was cancelled is closed, gRPC has freed the call.
        self._principal, self._peer = principal_name(context), context.peer()
        self.request: Any = request
        if isinstance(request, Message):
            self._note(request)
        else:
            self.request = self._noting(request)

    def _note(self, message: Any) -> None:
        self._namespace = message.namespace[:128]

    async def _noting(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        first = True
        async for message in requests:
            if first:
                self._note(message)
                first = False
            yield message

    def __enter__(self) -> "AuditedCall":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            outcome = "CANCELLED"
        elif kind is not None and not issubclass(kind, aio.AbortError):
            outcome = "UNKNOWN"
        else:
            outcome = code_name(self._context)
        self._metrics.count("draftd_audited_calls_total", self._method, outcome)
        _logger().info(
            "call",
            principal=self._principal,
            peer=self._peer,
            rpc=self._method,
            namespace=self._namespace,
            outcome=outcome,
        )


def _logger() -> Any:
    """A logger that no level silences, with the processors that are configured now."""
    lines = structlog.wrap_logger(structlog.WriteLogger(sys.stderr), wrapper_class=structlog.make_filtering_bound_logger(0))
    return lines.bind(logger=AUDIT_LOGGER)


def code_name(context: Context) -> str:
    """Name of the status code that a call was answered with."""
    code = context.code()
    return str(code.name) if isinstance(code, grpc.StatusCode) else _CODES.get(code, "OK")


def principal_name(context: Context) -> str:
    """Who calls: the name of a token, `cert:NAME` of a client certificate, or the kind of endpoint where neither is known."""
    caller = CALLER.get()
    if caller is not None:
        return caller.name
    for name in context.auth_context().get("x509_common_name", ()):
        return "cert:" + bytes(name).decode("utf-8", "replace")[:128]
    return "unix" if context.peer().startswith("unix:") else "tcp"
