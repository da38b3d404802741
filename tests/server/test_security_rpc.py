"""A service with tokens: what each call needs, that nobody gets at another's attachments, and what is written down about it.

The table of rights below is written by hand: it is what docs/security.md promises, not what the code happens to do.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftd.client.channel import open_channel
from draftd.client.credentials import Credentials
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.security.access import ACCESS
from draftd.server.security.audit import AUDIT_LOGGER
from draftd.server.security.tokens import hash_of
from tests.server.harness import REFRAIN, VOCAB, RunningService, Stubs, error_of, pack, wait_until

Call = Callable[[Stubs], Any]

PRINCIPALS: dict[str, dict[str, Any]] = {
    "reader": {"rights": ["read"], "namespaces": ["a/*", "default"]},
    "writer": {"rights": ["write"], "namespaces": ["a/*", "default"]},
    "engine": {"rights": ["read", "write"], "namespaces": ["a/*", "default"]},
    "twin": {"rights": ["read", "write"], "namespaces": ["a/*", "default"]},
    "stranger": {"rights": ["read", "write", "admin"], "namespaces": ["b/*"]},
    "admin": {"rights": ["read", "write", "admin"], "namespaces": ["*"]},
    "limited": {"rights": ["read", "write"], "namespaces": ["a/*"], "requests_per_s": 3},
    "slow": {"rights": ["read", "write"], "namespaces": ["a/*"], "tokens_per_s": 100},
}


def token_file(directory: Path, principals: dict[str, dict[str, Any]]) -> Path:
    """A token file in which each principal's token is its name followed by -token."""
    path = directory / "tokens.toml"
    lines = []
    for name, fields in principals.items():
        lines.append(f'[tokens.{name}]\nsha256 = "{hash_of(name + "-token")}"\n')
        lines += [f"{key} = {json.dumps(value)}\n" for key, value in fields.items()]
    path.write_text("".join(lines))
    path.chmod(0o600)
    return path


class Guarded(RunningService):
    """A service that serves TCP, to those in `principals`."""

    def __init__(self, directory: Path, principals: dict[str, dict[str, Any]] = PRINCIPALS, **settings: Any) -> None:
        self.tokens_at = token_file(directory, principals)
        self._directory = directory
        super().__init__(listen="127.0.0.1:0", insecure=True, token_file=self.tokens_at, lease_ms=30_000, **settings)
        self._opened: dict[str, Stubs] = {}

    @property
    def target(self) -> str:
        """Its TCP endpoint."""
        return f"127.0.0.1:{self.service.listen_port}"

    def as_(self, principal: str) -> Stubs:
        """Stubs with a principal's token; "" sends none."""
        if principal not in self._opened:
            secret = None
            if principal:
                secret = self._directory / f"{principal}.token"
                secret.write_text(f"{principal}-token\n")
                secret.chmod(0o600)
            self._opened[principal] = Stubs(self.target, open_channel(self.target, Credentials(token_file=secret)))
        return self._opened[principal]

    def close(self) -> None:
        """See RunningService."""
        for stubs in self._opened.values():
            stubs.channel.close()
        super().close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A guarded service with the namespaces default, a/x and b/x."""
    running = Guarded(tmp_path_factory.mktemp("tokens"))
    running.seed()
    for namespace in ("a/x", "b/x"):
        running.ingest(f"of {namespace}", REFRAIN, namespace=namespace, vocab_size=VOCAB, complete=True)
    yield running
    running.close()


def _stream(namespace: str) -> Iterator[pb.ProposeStreamRequest]:
    yield pb.ProposeStreamRequest(request=pb.ProposeRequest(rows=[pb.Row(tokens=[1], namespace=namespace)]))


def _import(namespace: str) -> Iterator[pb.ImportRequest]:
    document = pb.StoredDocument(document_id=f"imported {time.monotonic()}", packed_tokens=pack([1, 2]))
    yield pb.ImportRequest(namespace=namespace, vocab_size=VOCAB, documents=[document])


CALLS: dict[str, tuple[set[str], Callable[[Stubs, str], Any]]] = {
    "Attach": ({"read", "write"}, lambda s, n: s.attach(f"engine {time.monotonic()}".replace(" ", "-"), namespace=n)),
    "Propose": ({"read"}, lambda s, n: s.propose([pb.Row(tokens=[1], namespace=n)])),
    "ProposeStream": ({"read"}, lambda s, n: list(s.drafter.ProposeStream(_stream(n)))),
    "Ingest": ({"write"}, lambda s, n: s.ingest(f"d{time.monotonic()}", [1], namespace=n)),
    "GetNamespace": ({"read"}, lambda s, n: s.namespace(n)),
    "AdvanceGeneration": ({"admin"}, lambda s, n: s.corpus.AdvanceGeneration(_generation(n))),
    "DropNamespace": ({"admin"}, lambda s, n: s.corpus.DropNamespace(pb.DropNamespaceRequest(namespace=f"{n}/none"))),
    "Explain": ({"read"}, lambda s, n: s.corpus.Explain(pb.ExplainRequest(namespace=n, tokens=[1]))),
    "Export": ({"read"}, lambda s, n: list(s.corpus.Export(pb.ExportRequest(namespace=n)))),
    "Import": ({"write"}, lambda s, n: s.corpus.Import(_import(n))),
}
"""The rights that each call needs in the namespace it names. Detach, Heartbeat, Harvest and ListNamespaces have tests of their own."""


def _generation(namespace: str) -> pb.AdvanceGenerationRequest:
    return pb.AdvanceGenerationRequest(namespace=namespace, keep_generations=1000)


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """The code's name and the message of a call that may fail."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def test_every_method_has_its_access() -> None:
    services = pb.DESCRIPTOR.services_by_name.values()
    names = [method.name for service in services for method in service.methods]
    assert len(names) == len(set(names)), "the table goes by the method's name alone"
    assert set(ACCESS) == set(names)
    assert set(CALLS) | {"Detach", "Heartbeat", "Harvest", "ListNamespaces"} == set(names)


@pytest.mark.parametrize("name", CALLS)
def test_call_needs_a_token(guarded: Guarded, name: str) -> None:
    code, message = error_of(lambda: CALLS[name][1](guarded.as_(""), "a/x"))
    assert (code, message) == ("UNAUTHENTICATED", "a token is needed: send it as metadata `authorization: Bearer TOKEN`")
    wrong = Stubs(guarded.target, grpc.intercept_channel(guarded.as_("").channel))
    metadata = (("authorization", "Bearer reader-tokem"),)
    assert error_of(lambda: wrong.corpus.ListNamespaces(pb.ListNamespacesRequest(), metadata=metadata))[0] == "UNAUTHENTICATED"


@pytest.mark.parametrize("principal", ["reader", "writer", "engine", "stranger", "admin"])
@pytest.mark.parametrize("namespace", ["a/x", "b/x", "nowhere"])
@pytest.mark.parametrize("name", CALLS)
def test_call_needs_its_right_in_its_namespace(guarded: Guarded, name: str, namespace: str, principal: str) -> None:
    needed, call = CALLS[name]
    rights, patterns = PRINCIPALS[principal]["rights"], PRINCIPALS[principal]["namespaces"]
    covered = any(pattern in ("*", namespace[:2] + "*") for pattern in patterns)
    if needed <= set(rights) and covered:
        # Where the service has no such namespace, whoever may know is told.
        assert outcome(lambda: call(guarded.as_(principal), namespace))[0] in ("OK", "NOT_FOUND")
        return
    code, message = error_of(lambda: call(guarded.as_(principal), namespace))
    assert code == "PERMISSION_DENIED"
    lacking = sorted(needed - set(rights))
    assert any(repr(right) in message for right in lacking or needed)
    # Whether the namespace exists is not told: the same words for one that does and one that does not.
    assert message.replace(f"{namespace}/none", "N").replace(namespace, "N") in {
        *(f"the token of {principal!r} lacks the right {right!r}" for right in lacking),
        f"the token of {principal!r} lacks {' and '.join(map(repr, ACCESS[name].rights))} in namespace 'N'",
    }


def test_empty_namespace_is_default_here_too(guarded: Guarded) -> None:
    assert guarded.as_("reader").draft(REFRAIN[:5])
    for call in (
        lambda s: s.draft([1]),
        lambda s: s.ingest("d", [1]),
        lambda s: s.namespace(""),
        lambda s: s.corpus.Explain(pb.ExplainRequest(tokens=[1])),
        lambda s: list(s.corpus.Export(pb.ExportRequest())),
        lambda s: s.corpus.Import(_import("")),
        lambda s: s.corpus.AdvanceGeneration(_generation("")),
        lambda s: s.attach("e"),
    ):
        code, message = error_of(lambda call=call: call(guarded.as_("stranger")))
        assert (code, "in namespace 'default'" in message) == ("PERMISSION_DENIED", True)


def test_every_row_counts_and_every_extra_namespace(guarded: Guarded) -> None:
    reader, engine = guarded.as_("reader"), guarded.as_("engine")
    rows = [pb.Row(tokens=[1], namespace="a/x"), pb.Row(tokens=[1], namespace="b/x")]
    assert "'b/x'" in error_of(lambda: reader.propose(rows))[1]
    # A private row draws from nothing; its namespace is checked all the same.
    assert error_of(lambda: reader.propose([pb.Row(tokens=[1], namespace="b/x", private=True)]))[0] == "PERMISSION_DENIED"
    assert error_of(lambda: engine.attach("extra", namespace="a/x", extra_namespaces=["b/x"]))[0] == "PERMISSION_DENIED"
    attached = engine.attach("extra", namespace="a/x").attachment_id
    heartbeat = pb.HeartbeatRequest(attachment_id=attached, extra_namespaces=["b/x"])
    assert error_of(lambda: engine.drafter.Heartbeat(heartbeat))[0] == "PERMISSION_DENIED"
    for row in (pb.Row(tokens=[1], namespace="b/x"), pb.Row(tokens=[1], namespace="nowhere")):
        assert error_of(lambda row=row: engine.propose([row], attached))[0] == "PERMISSION_DENIED"
    assert error_of(lambda: engine.ingest("d", [1], attached, namespace="b/x"))[0] == "PERMISSION_DENIED"
    engine.drafter.Detach(pb.DetachRequest(attachment_id=attached))


def test_list_shows_what_may_be_read(guarded: Guarded) -> None:
    def listed(principal: str) -> set[str]:
        return {n.name for n in guarded.as_(principal).corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces}

    assert listed("reader") == {"default", "a/x"}
    assert listed("stranger") == {"b/x"}
    assert listed("admin") >= {"default", "a/x", "b/x"}
    assert error_of(lambda: listed("writer"))[0] == "PERMISSION_DENIED"


def test_calls_at_the_same_time_are_each_their_own_callers(guarded: Guarded) -> None:
    expected = {"reader": {"default", "a/x"}, "stranger": {"b/x"}}
    calls = [(who, guarded.as_(who).corpus.ListNamespaces.future(pb.ListNamespacesRequest())) for _ in range(100) for who in expected]
    for who, call in calls:
        assert {n.name for n in call.result(timeout=30).namespaces} == expected[who]


def test_attachment_is_of_no_use_to_anybody_else(guarded: Guarded) -> None:
    mine = guarded.as_("engine").attach("mine").attachment_id
    row = pb.Row(document_id="row", tokens=[1, 2, 3], prompt_length=1)
    guarded.as_("engine").propose([row], mine)
    calls: list[Call] = [
        lambda s: s.propose([row], mine),
        lambda s: list(s.drafter.ProposeStream(iter([pb.ProposeStreamRequest(request=pb.ProposeRequest(attachment_id=mine, rows=[row]))]))),
        lambda s: s.ingest("d", [1], mine),
        lambda s: s.harvest(mine, "row", [4], 3),
        lambda s: s.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=mine)),
        lambda s: s.drafter.Detach(pb.DetachRequest(attachment_id=mine)),
    ]
    for call in calls:
        for other in ("twin", "admin"):
            try:
                answers = call(guarded.as_(other))
            except grpc.RpcError as error:
                code, message = error.code().name, error.details() or ""
            else:
                # On a stream an error is an answer.
                code, message = grpc.StatusCode.PERMISSION_DENIED.name if answers[0].code == 7 else "OK", answers[0].message
            assert (code, message) == ("PERMISSION_DENIED", f"attachment_id is not an attachment of {other!r}")
    # An attachment made without a token, on the Unix socket, is nobody's either.
    local = guarded.attach("local").attachment_id
    assert error_of(lambda: guarded.as_("engine").propose([row], local))[0] == "PERMISSION_DENIED"
    assert guarded.as_("engine").harvest(mine, "row", [4], 3).committed
    # The name is taken for its owner, and for nobody else.
    assert error_of(lambda: guarded.as_("engine").attach("mine"))[0] == "ALREADY_EXISTS"
    theirs = guarded.as_("twin").attach("mine").attachment_id
    for who, attached in (("engine", mine), ("twin", theirs)):
        guarded.as_(who).drafter.Detach(pb.DetachRequest(attachment_id=attached))
    guarded.drafter.Detach(pb.DetachRequest(attachment_id=local))


def test_harvest_needs_write(guarded: Guarded) -> None:
    assert "'write'" in error_of(lambda: guarded.as_("reader").harvest("x", "d", [1], 0))[1]


def test_unix_socket_needs_no_token_unless_told_so(guarded: Guarded, tmp_path: Path) -> None:
    assert guarded.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces
    strict = Guarded(tmp_path, require_token=True)
    try:
        assert error_of(lambda: strict.draft([1]))[0] == "UNAUTHENTICATED"
        secret = tmp_path / "engine"
        secret.write_text("engine-token")
        secret.chmod(0o600)
        with open_channel(f"unix:{strict.config.socket_path()}", Credentials(token_file=secret)) as channel:
            stubs = Stubs("", channel)
            stubs.ingest("d", [1], vocab_size=VOCAB)
            assert error_of(lambda: stubs.namespace("b/x"))[0] == "PERMISSION_DENIED"
    finally:
        strict.close()


def test_standard_services(guarded: Guarded) -> None:
    check = health_pb2.HealthCheckRequest()
    assert health_pb2_grpc.HealthStub(guarded.as_("").channel).Check(check).status == health_pb2.HealthCheckResponse.SERVING
    assert error_of(lambda: next(health_pb2_grpc.HealthStub(guarded.as_("").channel).Watch(check)))[0] == "UNAUTHENTICATED"
    watch = health_pb2_grpc.HealthStub(guarded.as_("reader").channel).Watch(check)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()

    def reflect(principal: str) -> Any:
        stub = reflection_pb2_grpc.ServerReflectionStub(guarded.as_(principal).channel)
        return next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))

    assert reflect("reader").list_services_response.service
    assert error_of(lambda: reflect(""))[0] == "UNAUTHENTICATED"

    def servers(principal: str) -> Any:
        return channelz_pb2_grpc.ChannelzStub(guarded.as_(principal).channel).GetServers(channelz_pb2.GetServersRequest()).server

    assert servers("admin")
    for principal, code in (("", "UNAUTHENTICATED"), ("reader", "PERMISSION_DENIED"), ("stranger", "PERMISSION_DENIED")):
        assert error_of(lambda principal=principal: servers(principal))[0] == code


def test_refused_before_the_message_is_read(guarded: Guarded) -> None:
    raw: Any = guarded.as_("").channel.unary_unary("/draftd.v1.DrafterService/Propose")
    assert error_of(lambda: raw(b"\xff" * 100_000))[0] == "UNAUTHENTICATED"
    never: Any = guarded.as_("").channel.stream_unary("/draftd.v1.CorpusService/Import")

    def silent() -> Iterator[bytes]:
        time.sleep(5)
        yield b""

    assert error_of(lambda: never(silent(), timeout=4))[0] == "UNAUTHENTICATED"
    unknown: Any = guarded.as_("").channel.unary_unary("/draftd.v1.DrafterService/NoSuchMethod")
    assert error_of(lambda: unknown(b""))[0] == "UNAUTHENTICATED"


def test_requests_a_second(guarded: Guarded) -> None:
    answers = [outcome(lambda: guarded.as_("limited").propose([pb.Row(tokens=[1], namespace="a/x")])) for _ in range(8)]
    assert answers[:3] == [("OK", "")] * 3
    refused = [message for code, message in answers if code == "RESOURCE_EXHAUSTED"]
    assert refused
    assert all(message.startswith("rate limit: 3 requests a second; try again in ") for message in refused)
    assert guarded.as_("engine").propose([pb.Row(tokens=[1], namespace="a/x")]).drafts, "the limit is each principal's own"


def test_tokens_a_second_for_all_forms_of_tokens(guarded: Guarded) -> None:
    slow = guarded.as_("slow")

    def until_let_through(call: Callable[[], Any]) -> None:
        def passed() -> bool:
            code, message = outcome(call)
            assert code == "OK" or message.startswith("rate limit: 100 tokens a second")
            return code == "OK"

        wait_until(passed, 30)

    large = [1] * 200
    for call in (
        lambda: slow.propose([pb.Row(tokens=large, namespace="a/x")]),
        lambda: slow.propose([pb.Row(packed_tokens=pack(large), namespace="a/x")]),
        lambda: slow.drafter.Ingest(
            pb.IngestRequest(namespace="a/x", documents=[pb.IngestDocument(document_id="s", packed_tokens=pack(large))])
        ),
        lambda: slow.corpus.Explain(pb.ExplainRequest(namespace="a/x", tokens=large)),
        lambda: slow.corpus.Import(
            iter([pb.ImportRequest(namespace="a/x", documents=[pb.StoredDocument(document_id="i", packed_tokens=pack(large))])])
        ),
    ):
        until_let_through(call)
        code, message = error_of(lambda: slow.propose([pb.Row(tokens=[1], namespace="a/x")]))
        assert (code, message.startswith("rate limit: 100 tokens a second")) == ("RESOURCE_EXHAUSTED", True)


def test_open_stream_is_checked_at_each_message(tmp_path: Path) -> None:
    running = Guarded(tmp_path)
    try:
        running.seed()
        go: list[pb.ProposeStreamRequest] = []

        def requests() -> Iterator[pb.ProposeStreamRequest]:
            while True:
                wait_until(lambda: go, 60)
                yield go.pop()

        request = pb.ProposeStreamRequest(request=pb.ProposeRequest(rows=[pb.Row(tokens=REFRAIN[:5])]))
        answers = running.as_("reader").drafter.ProposeStream(requests())
        go.append(request)
        assert next(answers).response.drafts
        # The token is taken out of the file; the service notices by itself.
        token_file(tmp_path, {name: fields for name, fields in PRINCIPALS.items() if name != "reader"})
        wait_until(lambda: running.metric('draftd_reloads_total{file="tokens",result="ok"}', "admin") >= 1)
        go.append(request)
        assert error_of(lambda: next(answers))[0] == "UNAUTHENTICATED"
        assert error_of(lambda: running.as_("reader").draft([1]))[0] == "UNAUTHENTICATED"
        # A scope that shrinks ends the use of attachments beyond it.
        attached = running.as_("engine").attach("shrinks").attachment_id
        token_file(tmp_path, PRINCIPALS | {"engine": {"rights": ["read", "write"], "namespaces": ["a/*"]}})
        running.on_loop(running.service.reload)
        code, message = error_of(lambda: running.as_("engine").drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=attached)))
        assert (code, "in namespace 'default'" in message) == ("PERMISSION_DENIED", True)
        # A file that turned bad is counted, and changes nothing.
        (tmp_path / "tokens.toml").write_text("nonsense")
        wait_until(lambda: running.metric('draftd_reloads_total{file="tokens",result="failed"}', "admin") >= 1)
        assert running.as_("reader").draft(REFRAIN[:5])
    finally:
        running.close()


@pytest.mark.usefixtures("json_logs")
def test_audit_log_has_each_call_that_administers(guarded: Guarded, capfd: pytest.CaptureFixture[str]) -> None:
    guarded.ingest("d", [1], namespace="a/dropped", vocab_size=VOCAB)
    # What calls before this test left to be written.
    for _ in range(2):
        guarded.on_loop(lambda: None)
    capfd.readouterr()
    drop = pb.DropNamespaceRequest(namespace="a/dropped")
    assert error_of(lambda: guarded.as_("engine").corpus.DropNamespace(drop))[0] == "PERMISSION_DENIED"
    guarded.as_("admin").corpus.DropNamespace(drop)
    assert error_of(lambda: guarded.as_("admin").corpus.DropNamespace(drop))[0] == "NOT_FOUND"
    guarded.corpus.AdvanceGeneration(_generation("a/x"))
    guarded.as_("writer").corpus.Import(_import("a/x"))
    list(guarded.as_("reader").corpus.Export(pb.ExportRequest(namespace="a/x")))
    guarded.as_("reader").draft([1])

    def lines() -> list[dict[str, str]]:
        captured = capfd.readouterr()
        seen.extend(json.loads(line) for line in captured.err.splitlines() if AUDIT_LOGGER in line)
        return seen

    seen: list[dict[str, str]] = []
    wait_until(lambda: len(lines()) >= 6)
    expected = [
        ("engine", "DropNamespace", "a/dropped", "PERMISSION_DENIED"),
        ("admin", "DropNamespace", "a/dropped", "OK"),
        ("admin", "DropNamespace", "a/dropped", "NOT_FOUND"),
        ("unix", "AdvanceGeneration", "a/x", "OK"),
        ("writer", "Import", "a/x", "OK"),
        ("reader", "Export", "a/x", "OK"),
    ]
    assert [tuple(line[key] for key in ("principal", "rpc", "namespace", "outcome")) for line in seen] == expected
    assert all(line["logger"] == AUDIT_LOGGER and line["peer"] for line in seen)
    assert guarded.metric('draftd_audited_calls_total{method="DropNamespace",outcome="NOT_FOUND"}', "admin") >= 1


def test_refusals_are_counted_by_reason(guarded: Guarded) -> None:
    def count(reason: str) -> float:
        return guarded.metric(f'draftd_refused_calls_total{{reason="{reason}"}}', "admin")

    before = {reason: count(reason) for reason in ("unauthenticated", "permission")}
    assert error_of(lambda: guarded.as_("").draft([1]))[0] == "UNAUTHENTICATED"
    assert error_of(lambda: guarded.as_("stranger").draft([1]))[0] == "PERMISSION_DENIED"
    assert {reason: count(reason) - before[reason] for reason in before} == {"unauthenticated": 1, "permission": 1}
    assert guarded.metric('draftd_rpc_errors_total{code="UNAUTHENTICATED",method="Propose"}', "admin") >= 1


def test_http_needs_a_token_that_may_read_everything(guarded: Guarded) -> None:
    def status(path: str, token: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{guarded.service.http_port}{path}")
        if token:
            request.add_header("Authorization", token)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            asked = error.headers["WWW-Authenticate"]
            return error.code if (error.code == 401) == (asked == "Bearer") else 0

    for path in ("/metrics", "/v1/status", "/openapi.json", "/nothing", "//healthz", "/healthz/", "/readyz/../metrics"):
        for token in ("", "Bearer wrong", "admin-token", "Basic admin-token"):
            assert status(path, token) == 401
        assert status(path, "Bearer reader-token") == 403
    assert [status(path, "Bearer admin-token") for path in ("/metrics", "/v1/status", "/nothing")] == [200, 200, 404]
    assert [status(path, "") for path in ("/healthz", "/readyz")] == [200, 200]


def test_empty_token_file_lets_nobody_in(tmp_path: Path) -> None:
    path = token_file(tmp_path, {})
    running = RunningService(listen="127.0.0.1:0", insecure=True, token_file=path)
    try:
        stubs = Stubs(f"127.0.0.1:{running.service.listen_port}")
        assert error_of(lambda: stubs.draft([1]))[0] == "UNAUTHENTICATED"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            running.get("/metrics")
        assert running.get("/readyz") == "ready\n"
    finally:
        running.close()


def test_without_tokens_all_callers_of_tcp_share_the_rates() -> None:
    running = RunningService(listen="127.0.0.1:0", insecure=True, rate_requests=2)
    try:
        stubs = Stubs(f"127.0.0.1:{running.service.listen_port}")
        for _ in range(2):
            stubs.draft([1])
        assert error_of(lambda: stubs.draft([1]))[0] == "RESOURCE_EXHAUSTED"
        for _ in range(5):
            running.draft([1])
    finally:
        running.close()
