"""What is around every method: its requests are let through for their caller, and what it raises becomes a gRPC status code.

A DraftdError becomes its code and message. Anything else becomes INTERNAL with an incident id that is also in the log, and nothing of
what happened: messages to callers never carry internal text.
"""

import errno
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from draftd.drafter.errors import DraftdError
from draftd.server.metrics import Metrics
from draftd.server.rpc.gate import Gate
from draftd.server.rpc.parsing import MALFORMED
from draftd.server.security.access import ACCESS, admit
from draftd.server.security.audit import AuditedCall
from draftd.server.security.guard import count_refusal

log = structlog.get_logger()

_EXHAUSTED = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE)

Context = aio.ServicerContext[Any, Any]


class Servicer(Protocol):
    """A servicer that can be wrapped: it counts its errors, and knows what its calls have to wait for."""

    metrics: Metrics
    gate: Gate


S = TypeVar("S", bound=Servicer)
Q = TypeVar("Q")
A = TypeVar("A")


class DeadlineExceeded(DraftdError):
    """The service did what was asked, but not within the time it may wait."""

    code = "DEADLINE_EXCEEDED"


def status_of(error: Exception, method: str, metrics: Metrics) -> tuple[grpc.StatusCode, str]:
    """The status code and the message that a caller gets for `error`; counts it, and logs it if it is a defect of the service."""
    if isinstance(error, DraftdError):
        count_refusal(metrics, error)
        code, message = grpc.StatusCode[error.code], str(error)
    elif isinstance(error, DecodeError):
        code, message = grpc.StatusCode.INVALID_ARGUMENT, MALFORMED
    elif isinstance(error, OSError) and error.errno in _EXHAUSTED:
        log.error("out_of_resources", method=method, exc_info=error)
        code, message = grpc.StatusCode.RESOURCE_EXHAUSTED, "the service's host has no more shared memory, memory or open files to give"
    else:
        incident = secrets.token_hex(6)
        log.error("rpc_failed", method=method, incident=incident, exc_info=error)
        code, message = grpc.StatusCode.INTERNAL, f"internal error; the service's log has it as incident {incident}"
    metrics.rpc_error(method, code.name)
    return code, message


async def _abort(error: Exception, method: str, metrics: Metrics, context: Context) -> NoReturn:
    code, message = status_of(error, method, metrics)
    await context.abort(code, message)


def unary(method: Callable[[S, Q, Context], Awaitable[A]]) -> Callable[[S, Q, Context], Awaitable[A]]:
    """Wraps a unary (or client-streaming) method of a servicer that has `metrics`."""
    name, access = method.__name__, ACCESS[method.__name__]

    @functools.wraps(method)
    async def call(servicer: S, request: Q, context: Context) -> A:
        try:
            admitted = admit(access, request)
            if not servicer.gate.is_open:
                await servicer.gate.enter(name, access.namespaces, request)
            return await method(servicer, admitted, context)
        except aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - answered, counted and logged by _abort
            await _abort(error, name, servicer.metrics, context)

    @functools.wraps(method)
    async def audited(servicer: S, request: Q, context: Context) -> A:
        with AuditedCall(name, request, context, servicer.metrics) as noted:
            return await call(servicer, noted.request, context)

    return audited if access.audited else call


def streaming(method: Callable[[S, Q, Context], AsyncIterator[A]]) -> Callable[[S, Q, Context], AsyncIterator[A]]:
    """Wraps a method of a servicer with `metrics` that answers with a stream."""
    name, access = method.__name__, ACCESS[method.__name__]

    @functools.wraps(method)
    async def call(servicer: S, request: Q, context: Context) -> AsyncIterator[A]:
        try:
            admitted = admit(access, request)
            if not servicer.gate.is_open:
                await servicer.gate.enter(name, access.namespaces, request)
            async for answer in method(servicer, admitted, context):
                yield answer
        except aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - answered, counted and logged by _abort
            await _abort(error, name, servicer.metrics, context)

    @functools.wraps(method)
    async def audited(servicer: S, request: Q, context: Context) -> AsyncIterator[A]:
        with AuditedCall(name, request, context, servicer.metrics) as noted:
            async for answer in call(servicer, noted.request, context):
                yield answer

    return audited if access.audited else call
