"""OpenTelemetry spans of calls, where an endpoint is set: one a call, which joins the caller's trace, sent by a thread of its own.

A call never waits for a span: what does not fit the queue, or cannot be sent, is dropped and counted.
"""

import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import grpc
import structlog
from grpc import aio
from opentelemetry.context import Context as TraceContext
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from draftd.server.security.audit import code_name

log = structlog.get_logger()

MAX_QUEUED = 4096
BATCH = 512
EVERY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
_STOP_S = 3.0
_SERVICE_PREFIX = "/draftd.v1."
_OF_THE_SERVER = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that are the server's fault, by OpenTelemetry's conventions for gRPC."""

Context = aio.ServicerContext[Any, Any]
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]"


@dataclass(frozen=True, slots=True)
class Attached:
    """What a span says of an attachment."""

    namespace: str
    transport: str


class SpanQueue(SpanProcessor):
    """Spans that have ended, on their way to the exporter.

    Attributes:
        sent: Spans that the exporter has delivered.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.sent = 0
        self._exporter = exporter
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failing = False
        # One writer each: the event loop, and the thread.
        self._overflowed = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that nobody will see: the queue was full, or they could not be sent."""
        return self._overflowed + self._failed

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span; never waits."""
        if len(self._queue) >= MAX_QUEUED:
            self._overflowed += 1
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH:
            self._wake.set()

    def shutdown(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_STOP_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))])

    def _send(self, batch: list[ReadableSpan]) -> None:
        if self._exporter.export(batch) is SpanExportResult.SUCCESS:
            self.sent += len(batch)
            self._failing = False
            return
        self._failed += len(batch)
        if not self._failing:
            log.warning("spans_not_sent", spans=len(batch))
        self._failing = True


class Tracing(aio.ServerInterceptor):
    """Makes a span for each call of draftd.v1; the outermost interceptor, so that refused calls have one too.

    Args:
        endpoint: An OTLP/gRPC receiver, http://host:port or https://host:port.
        ratio: Share of the traces that begin here which are kept; a caller's own decision is followed.
        attributes: Of the resource: service.name and so on.
        attached: What is known of an attachment id; None if it names no live attachment.
    """

    def __init__(self, endpoint: str, ratio: float, attributes: Mapping[str, str], attached: Callable[[str], Attached | None]) -> None:
        # It says so once in our own log, and counts; the SDK would say it in a format of its own each time.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        insecure = urlsplit(endpoint).scheme == "http"
        self.queue = SpanQueue(OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S))
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(sampler, Resource.create(dict(attributes)), shutdown_on_exit=False)
        self._provider.add_span_processor(self.queue)
        self._tracer = self._provider.get_tracer("draftd")
        self._propagator = TraceContextTextMapPropagator()
        self._attached = attached

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        self._provider.shutdown()

    async def intercept_service(  # type: ignore[override]
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(details)
        method = details.method
        if handler is None or not method.startswith(_SERVICE_PREFIX):
            return handler  # type: ignore[no-any-return]
        carrier = {key: value for key, value in details.invocation_metadata or () if key in self._propagator.fields}
        parent = self._propagator.extract(carrier) if carrier else TraceContext()
        if handler.response_streaming:
            kind = "stream_stream" if handler.request_streaming else "unary_stream"
            behavior = self._streaming(getattr(handler, kind), method, parent)
        else:
            kind = "stream_unary" if handler.request_streaming else "unary_unary"
            behavior = self._unary(getattr(handler, kind), method, parent)
        return handler._replace(**{kind: behavior})  # type: ignore[no-any-return]

    def _unary(self, behavior: Any, method: str, parent: TraceContext) -> Any:
        async def call(request: Any, context: Context) -> Any:
            with _Call(self._start(method, parent), context, self._attached, method) as traced:
                answer = await behavior(traced.reading(request), context)
                traced.note_attachment(getattr(answer, "attachment_id", ""))
                return answer

        return call

    def _streaming(self, behavior: Any, method: str, parent: TraceContext) -> Any:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            with _Call(self._start(method, parent), context, self._attached, method) as traced:
                answers = behavior(traced.reading(request), context)
                if inspect.isawaitable(answers):
                    # A handler that writes its answers itself, as one does that refuses the call.
                    await answers
                    return
                async for answer in answers:
                    yield answer

        return call

    def _start(self, method: str, parent: TraceContext) -> Span:
        service, _, name = method[1:].partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span: Any = self._tracer.start_span(method[1:], parent, SpanKind.SERVER, attributes)
        return span  # type: ignore[no-any-return]


class _Call:
    """The span of one call, from its start to its status."""

    def __init__(self, span: Span, context: Context, attached: Callable[[str], Attached | None], method: str) -> None:
        self._span = span
        self._context = context
        self._attached = attached
        self._proposes = method.endswith(("/Propose", "/ProposeStream"))
        self._messages = 0
        self._batch = 0

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace_: object) -> None:
        span = self._span
        if span.is_recording():
            code = code_name(self._context)
            if kind is not None and not issubclass(kind, aio.AbortError):
                code = "UNKNOWN" if issubclass(kind, Exception) else "CANCELLED"
            span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[code].value[0])
            span.set_attribute("draftd.batch_size", self._batch)
            span.set_attribute("draftd.messages", self._messages)
            if code in _OF_THE_SERVER:
                span.set_status(Status(StatusCode.ERROR, code))
        span.end()

    def reading(self, request: Any) -> Any:
        """The request, or stream of them, with what the span says of it noted."""
        if not self._span.is_recording():
            return request
        if hasattr(request, "__aiter__"):
            return self._reading_all(request)
        self._note(request)
        return request

    async def _reading_all(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            self._note(request)
            yield request

    def _note(self, message: Any) -> None:
        """Of the first message its namespace and attachment; of each its rows or documents."""
        inner = getattr(message, "request", message)
        self._messages += 1
        rows: Any = getattr(inner, "rows", None) or getattr(inner, "documents", ())
        self._batch += len(rows)
        if self._messages > 1:
            return
        if self._proposes:
            self._span.set_attribute("draftd.transport", "inline")
        self.note_attachment(getattr(inner, "attachment_id", ""))
        named = getattr(inner, "namespace", "") or next((name for row in rows if (name := getattr(row, "namespace", ""))), "")
        if named:
            self._span.set_attribute("draftd.namespace", named[:128])

    def note_attachment(self, attachment_id: str) -> None:
        """Notes the namespace and the transport of an attachment."""
        known = self._attached(attachment_id) if attachment_id and self._span.is_recording() else None
        if known:
            self._span.set_attribute("draftd.namespace", known.namespace)
            self._span.set_attribute("draftd.transport", known.transport)
