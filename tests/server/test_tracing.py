"""Spans of calls, received by a small OTLP server in this process: what they say, whose trace they join, and that no call waits."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from draftd.client import Drafter
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server import tracing
from draftd.server.config import ConfigError, load_config
from draftd.server.security.tokens import hash_of
from tests.server.harness import REFRAIN, VOCAB, RunningService, error_of, pack, wait_until

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver(otlp_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return otlp.ExportTraceServiceResponse()

    def wait_for(self, method: str, **wanted: Any) -> Any:
        """The first span of a method whose attributes are these, dots written as two underscores."""
        names = {name.replace("__", "."): value for name, value in wanted.items()}

        def found() -> list[Any]:
            return [span for span in self.spans if span.name.endswith("/" + method) and names.items() <= attributes(span).items()]

        wait_until(found)
        return found()[0]

    def close(self) -> None:
        self._server.stop(0).wait(5)


def attributes(of: Any) -> dict[str, Any]:
    """Attributes of a span or a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    started = Receiver()
    yield started
    started.close()


@pytest.fixture(scope="module")
def traced(receiver: Receiver) -> Iterator[RunningService]:
    running = RunningService(otlp_endpoint=receiver.endpoint)
    running.seed()
    yield running
    running.close()


def test_span_says_what_the_call_was(traced: RunningService, receiver: Receiver) -> None:
    attachment = traced.attach("traced", namespace="spans").attachment_id
    assert attributes(receiver.wait_for("Attach"))["draftd.transport"] == "inline"
    traced.propose([pb.Row(document_id=f"d{i}", tokens=REFRAIN[:6], prompt_length=6) for i in range(3)], attachment)
    span = receiver.wait_for("Propose", draftd__namespace="spans")
    assert attributes(span) == {
        "rpc.system": "grpc",
        "rpc.service": "draftd.v1.DrafterService",
        "rpc.method": "Propose",
        "rpc.grpc.status_code": 0,
        "draftd.namespace": "spans",
        "draftd.transport": "inline",
        "draftd.batch_size": 3,
        "draftd.messages": 1,
    }
    assert span.kind == span.SPAN_KIND_SERVER
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    resource = receiver.resources[0]
    assert (resource["service.name"], resource["service.instance.id"]) == ("draftd", traced.service.corpus.instance)
    # An attachment's id lets its holder act as the engine; who reads traces may not.
    assert attachment not in str(receiver.spans)


def test_span_joins_the_trace_of_its_caller(traced: RunningService, receiver: Receiver) -> None:
    request = pb.ProposeRequest(rows=[pb.Row(tokens=REFRAIN[:6])])
    traced.drafter.Propose(request, metadata=(("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),))
    wait_until(lambda: any(span.trace_id.hex() == TRACE_ID for span in receiver.spans))
    (span,) = [span for span in receiver.spans if span.trace_id.hex() == TRACE_ID]
    assert span.parent_span_id.hex() == PARENT_ID
    for malformed in ("", "00-zz", "x" * 5000):
        assert traced.drafter.Propose(request, metadata=(("traceparent", malformed),)).drafts


def test_caller_that_does_not_sample_is_followed(traced: RunningService, receiver: Receiver) -> None:
    unsampled = TRACE_ID[::-1]
    request = pb.ProposeRequest(rows=[pb.Row(tokens=REFRAIN[:7])])
    assert traced.drafter.Propose(request, metadata=(("traceparent", f"00-{unsampled}-{PARENT_ID}-00"),)).drafts
    traced.corpus.ListNamespaces(pb.ListNamespacesRequest())
    receiver.wait_for("ListNamespaces")
    assert not [span for span in receiver.spans if span.trace_id.hex() == unsampled]


def test_traces_that_begin_here_are_thinned_out_and_those_of_callers_are_not(receiver: Receiver) -> None:
    running = RunningService(otlp_endpoint=receiver.endpoint, otlp_sample_ratio=0.0)
    try:
        callers = "ab" * 16
        for i in range(20):
            running.ingest(f"thin-{i}", REFRAIN, namespace="thinned", vocab_size=VOCAB, complete=True)
        request = pb.GetNamespaceRequest(namespace="thinned")
        running.corpus.GetNamespace(request, metadata=(("traceparent", f"00-{callers}-{PARENT_ID}-01"),))
        wait_until(lambda: [span for span in receiver.spans if span.trace_id.hex() == callers])
        thinned = [span for span in receiver.spans if attributes(span).get("draftd.namespace") == "thinned"]
        assert [span.name for span in thinned] == ["draftd.v1.CorpusService/GetNamespace"]
    finally:
        running.close()


def test_errors_and_streams(traced: RunningService, receiver: Receiver) -> None:
    assert error_of(lambda: traced.namespace("nowhere"))[0] == "NOT_FOUND"
    span = receiver.wait_for("GetNamespace", draftd__namespace="nowhere")
    assert attributes(span)["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    # The caller's own mistake is no error of the server.
    assert span.status.code == span.status.STATUS_CODE_UNSET
    items = [pb.ProposeStreamRequest(sequence=i, request=pb.ProposeRequest(rows=[pb.Row(tokens=REFRAIN[:6])] * 2)) for i in range(3)]
    assert len(list(traced.drafter.ProposeStream(iter(items)))) == 3
    stream = attributes(receiver.wait_for("ProposeStream"))
    assert (stream["draftd.messages"], stream["draftd.batch_size"], stream["rpc.grpc.status_code"]) == (3, 6, 0)
    documents = [
        pb.ImportRequest(namespace="imported", vocab_size=VOCAB, documents=[pb.StoredDocument(document_id="d", packed_tokens=pack([1, 2]))])
    ]
    assert traced.corpus.Import(iter(documents)).documents == 1
    assert attributes(receiver.wait_for("Import"))["draftd.namespace"] == "imported"


def test_defect_is_an_error_of_the_server(
    traced: RunningService, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, json_logs: None
) -> None:
    monkeypatch.setattr(traced.service.corpus, "namespaces", lambda: 1 // 0)
    assert error_of(lambda: traced.corpus.ListNamespaces(pb.ListNamespacesRequest()))[0] == "INTERNAL"
    monkeypatch.undo()
    span = receiver.wait_for("ListNamespaces", rpc__grpc__status_code=grpc.StatusCode.INTERNAL.value[0])
    assert span.status.code == span.status.STATUS_CODE_ERROR


def test_only_calls_of_draftd_are_traced(traced: RunningService, receiver: Receiver) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    health_pb2_grpc.HealthStub(traced.channel).Check(health_pb2.HealthCheckRequest())
    traced.corpus.ListNamespaces(pb.ListNamespacesRequest())
    receiver.wait_for("ListNamespaces")
    assert not [span.name for span in receiver.spans if not span.name.startswith("draftd.v1.")]


def test_an_engine_works_as_without(traced: RunningService, receiver: Receiver) -> None:
    with Drafter(f"unix:{traced.config.socket_path()}", engine="mapped-traced", vocab_size=VOCAB, max_rows=2, max_length=128) as drafter:
        drafter.wait_attached(30)
        drafter.start(0, REFRAIN[:6])
        assert drafter.propose([0]).counts[0] > 0
    assert attributes(receiver.wait_for("Attach", draftd__transport="mapped"))["draftd.namespace"] == "default"
    receiver.wait_for("Detach")


def test_what_was_sent_is_counted(traced: RunningService, receiver: Receiver) -> None:
    traced.corpus.ListNamespaces(pb.ListNamespacesRequest())
    receiver.wait_for("ListNamespaces")
    wait_until(lambda: traced.metric("draftd_spans_sent_total") > 0)
    assert traced.metric("draftd_spans_dropped_total") == 0


def test_refused_calls_are_traced_too(receiver: Receiver, tmp_path: Any) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(f'[tokens.one]\nsha256 = "{hash_of("secret")}"\nrights = ["read"]\nnamespaces = ["*"]\n')
    file.chmod(0o600)
    running = RunningService(otlp_endpoint=receiver.endpoint, token_file=file, require_token=True)
    try:
        assert error_of(lambda: running.corpus.ListNamespaces(pb.ListNamespacesRequest()))[0] == "UNAUTHENTICATED"
        receiver.wait_for("ListNamespaces", rpc__grpc__status_code=grpc.StatusCode.UNAUTHENTICATED.value[0])
        assert running.corpus.ListNamespaces(pb.ListNamespacesRequest(), metadata=(("authorization", "Bearer secret"),)) is not None
    finally:
        running.close()
    assert "secret" not in str(receiver.spans)


class Stuck(SpanExporter):
    """An exporter that hangs until it is let go, and then fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.closed = False

    def export(self, spans: Any) -> SpanExportResult:
        self.go.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.closed = True


def _until(queue: tracing.SpanQueue, condition: Callable[[], bool]) -> None:
    wait_until(condition)
    assert queue.sent == 0


def test_receiver_that_hangs_costs_bounded_memory_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_QUEUED", 100)
    monkeypatch.setattr(tracing, "BATCH", 10)
    exporter = Stuck()
    queue = tracing.SpanQueue(exporter)
    span: Any = object()
    for _ in range(20):
        queue.on_end(span)
    _until(queue, lambda: len(queue._queue) == 10)
    started = time.monotonic()
    for _ in range(1000):
        queue.on_end(span)
    assert time.monotonic() - started < 10
    assert len(queue._queue) == 100
    # One batch is with the exporter, a hundred are queued, and the others are gone.
    assert queue.dropped == 1020 - 100 - 10
    exporter.go.set()
    _until(queue, lambda: queue.dropped == 1020)
    queue.shutdown()
    assert exporter.closed


def test_service_without_its_receiver_answers_and_stops() -> None:
    running = RunningService(otlp_endpoint="http://127.0.0.1:9")
    try:
        running.seed()
        assert running.draft(REFRAIN[:6], k=2) == REFRAIN[6:8]
    finally:
        running.close()
    assert not running._thread.is_alive()


def test_without_opentelemetry_it_says_what_to_install() -> None:
    blocked = "import sys; sys.modules['opentelemetry.sdk'] = None; from draftd.server.main import main; main()"
    flags = ["--otlp-endpoint", "http://127.0.0.1:4317", "--socket", "off", "--listen", "127.0.0.1:0", "--insecure", "--http", "off"]
    done = subprocess.run([sys.executable, "-c", blocked, "serve", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'draftd[otel]'" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("draftd:")]) == 1


def test_service_without_tracing_does_not_load_it() -> None:
    code = "import sys, draftd.server.service; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("wrong", ["127.0.0.1:4317", "ftp://host:1", "http://host", "http://host:99999"])
def test_endpoint_must_be_a_url(wrong: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load_config({"otlp_endpoint": wrong})
