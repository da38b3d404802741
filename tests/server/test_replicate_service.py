"""Services that share documents through a real nats-server: what comes, what does not, and what they do while it is away."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, StreamConfig, StreamInfo, StreamState

from draftd.client import Drafter
from draftd.drafter.errors import FailedPrecondition
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.replicate.message import Message, Origin, packed
from draftd.server.replicate.receiving import longer_id
from draftd.server.replicate.stream import start_sequence
from draftd.server.security.files import FileRefused
from draftd.server.store.codec import Codec
from tests.server.certificates import Authority
from tests.server.harness import REFRAIN, VOCAB, RunningService, draftd, pack, wait_until
from tests.server.nats import NatsServer, nats_server

OTHER = Origin("elsewhere", "run-of-another")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A nats-server for all tests that leave it alone; each has a stream of its own."""
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def stream() -> str:
    """A stream that no other test has."""
    return f"TEST{next(_numbers)}"


@contextmanager
def _services(server: NatsServer, stream: str, *names: str, **settings: Any) -> Iterator[list[RunningService]]:
    running = []
    try:
        for name in names:
            running.append(RunningService(replicate=server.url, replicate_stream=stream, node_name=name, **settings))
        for service in running:
            wait_until(lambda service=service: _state(service).connected, 30)
        yield running
    finally:
        for service in running:
            service.close()


def _state(service: RunningService) -> pb.Replication:
    return service.corpus.ListNamespaces(pb.ListNamespacesRequest()).replication


def _held(service: RunningService, namespace: str = "default") -> dict[str, list[int]]:
    if not service.service.corpus.has_namespace(namespace):
        return {}
    answers = list(service.corpus.Export(pb.ExportRequest(namespace=namespace)))
    return {d.document_id: np.frombuffer(d.packed_tokens, "<i4").tolist() for answer in answers for d in answer.documents}


def _wait_held(service: RunningService, expected: dict[str, list[int]], namespace: str = "default") -> None:
    wait_until(lambda: _held(service, namespace) == expected, 30)


def _put(server: NatsServer, stream: str, *messages: tuple[str, dict[str, str] | None, bytes]) -> None:
    async def publish(js: JetStreamContext) -> None:
        for subject, headers, body in messages:
            await js.publish(subject, body, headers=headers)

    server.ask(publish)


def _message(stream: str, tokens: list[int], **fields: Any) -> tuple[str, dict[str, str], bytes]:
    given: dict[str, Any] = {"namespace": "default", "vocab_size": VOCAB, "fingerprint": "", "generation": 0, "document_id": "d"} | fields
    return packed(stream, Message(OTHER, tokens=np.array(tokens, np.int32), **given), Codec())


def test_documents_travel_with_their_id_namespace_generation_and_vocabulary(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", "b") as (a, b):
        a.seed()
        a.ingest("id with blank é", [5, 6, 7, 8], complete=True, namespace="llama/3.1:x", vocab_size=50)
        _wait_held(b, {"refrain": REFRAIN})
        _wait_held(b, {"id with blank é": [5, 6, 7, 8]}, "llama/3.1:x")
        assert b.namespace("llama/3.1:x").vocab_size == 50
        wait_until(lambda: b.draft(REFRAIN[:5], k=4) == REFRAIN[5:9])
        b.ingest("back", [9, 9, 1], complete=True)
        _wait_held(a, {"refrain": REFRAIN, "back": [9, 9, 1]})
        assert (_state(a).published_documents, _state(a).consumed_documents) == (2, 1)
        assert (_state(b).published_documents, _state(b).consumed_documents) == (1, 2)
        wait_until(lambda: _state(a).lag_messages == 0 == _state(b).lag_messages)
        assert a.metric("draftd_replication_connected") == 1
        assert a.metric("draftd_replication_published_documents_total") == 2
        assert b.metric("draftd_replication_consumed_tokens_total") == len(REFRAIN) + 4
        assert json.loads(b.get("/v1/status"))["replication"]["consumed_documents"] == 2
        endpoint = f"unix:{b.config.socket_path()}"
        assert f"stream {stream} as b, 1 documents published, 2 taken, 0 messages behind" in draftd("status", "--endpoint", endpoint).stdout
        assert json.loads(draftd("status", "--json", "--endpoint", endpoint).stdout)["replication"]["node"] == "b"
        assert b.get("/readyz") == "ready\n"


def test_without_it_nothing_is_said_of_it(service: RunningService) -> None:
    assert not service.corpus.ListNamespaces(pb.ListNamespacesRequest()).HasField("replication")
    assert json.loads(service.get("/v1/status"))["replication"] is None
    assert "\ndraftd_replication_connected" not in service.get("/metrics")
    assert "replication" not in draftd("status", "--endpoint", f"unix:{service.config.socket_path()}").stdout


def test_private_rows_and_other_namespaces_are_never_published(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", replicate_namespaces="default, team-*") as (a,):
        endpoint = f"unix:{a.config.socket_path()}"
        with Drafter(endpoint, engine="e", vocab_size=VOCAB, max_rows=2, max_length=64, transport="mapped") as drafter:
            wait_until(lambda: drafter.transport == "mapped")
            drafter.start(0, np.array([7, 7, 7], np.int32), prompt_length=1, document_id="secret", private=True)
            drafter.finish(0)
            drafter.start(1, np.array([1, 2], np.int32), prompt_length=1, document_id="public")
            drafter.finish(1)
        a.ingest("kept here", [1, 2, 3], complete=True, namespace="other", vocab_size=VOCAB)
        a.ingest("shared", [1, 2, 3], complete=True, namespace="team-a", vocab_size=VOCAB)
        wait_until(lambda: _state(a).published_documents == 2)
        found = server.ask(lambda js: js.stream_info(stream, subjects_filter=">"))
        assert found.state.subjects == {f"{stream}.default": 1, f"{stream}.team-a": 1}
        _put(
            server, stream, _message(stream, [1, 2], namespace="other", document_id="foreign"), _message(stream, [4, 5], namespace="team-b")
        )
        _wait_held(a, {"d": [4, 5]}, "team-b")
        assert list(_held(a, "other")) == ["kept here"]


@pytest.mark.parametrize("how", ["killed", "stands still"])
def test_while_nats_is_away_drafting_and_ingest_go_on(tmp_path: Path, stream: str, how: str) -> None:
    with nats_server(tmp_path) as server, _services(server, stream, "a", "b", visible_timeout_ms=5000) as (a, b):
        a.seed()
        _wait_held(b, {"refrain": REFRAIN})
        server.kill() if how == "killed" else server.stand_still()
        expected = {"refrain": REFRAIN}
        for i in range(200):
            expected[f"{i}"] = [i, i + 1, i + 2, 500 + i]
            a.ingest(f"{i}", expected[f"{i}"], complete=True, wait_visible=i % 50 == 0)
            assert a.draft(REFRAIN[:5], k=4) == REFRAIN[5:9]
        wait_until(lambda: not _state(a).connected and not _state(b).connected, 60)
        assert _state(a).failure
        assert _state(a).outbox_documents == 200
        assert a.metric("draftd_replication_outbox_age_seconds") > 0
        assert a.get("/readyz").startswith("ready\nreplication is not connected: ")
        assert "NOT CONNECTED" in draftd("status", "--endpoint", f"unix:{a.config.socket_path()}").stdout
        server.start() if how == "killed" else server.go_on()
        _wait_held(b, expected)
        wait_until(lambda: _state(a).connected and _state(a).outbox_documents == 0, 30)
        assert a.metric("draftd_replication_connections_total") >= 2
        assert len(_held(a)) == len(expected)
        assert a.metric("draftd_background_errors_total") == b.metric("draftd_background_errors_total") == 0


def test_what_is_evicted_while_nats_is_away_is_counted_and_never_sent(tmp_path: Path, stream: str) -> None:
    with nats_server(tmp_path) as server, _services(server, stream, "a", quota_tokens=4096, recent_tokens=1024, live_tokens=1024) as (a,):
        a.ingest("first", [1, 2, 3], complete=True, vocab_size=VOCAB)
        wait_until(lambda: _state(a).published_documents == 1)
        server.kill()
        rng = np.random.default_rng(0)
        for i in range(300):
            a.ingest(f"{i}", rng.integers(0, VOCAB, 100).tolist(), complete=True, wait_visible=True)
        wait_until(lambda: a.service.corpus.settle())
        wait_until(lambda: a.metric('draftd_replication_unsent_documents_total{reason="evicted"}') > 200)
        server.start()
        wait_until(lambda: _state(a).outbox_documents == 0 and _state(a).connected, 30)
        unsent = a.metric('draftd_replication_unsent_documents_total{reason="evicted"}')
        assert _state(a).published_documents + unsent == 301
        assert 0 < _state(a).published_documents < 60


def test_garbage_in_the_stream_is_counted_and_harms_nobody(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", max_length=100) as (a,):
        a.seed()
        good = _message(stream, [1, 2, 3])
        subject, headers, body = good
        bomb = zstandard.ZstdCompressor(level=19).compress(bytes(2**28))
        garbage: list[tuple[str, dict[str, str] | None, bytes]] = [
            (subject, None, b""),
            (subject, None, b"garbage" * 1000),
            (subject, {"Draftd-Format": "1"}, body),
            (subject, headers | {"Draftd-Format": "99", "Nats-Msg-Id": "1"}, body),
            (subject, headers | {"Draftd-Tokens": "2147483647", "Nats-Msg-Id": "2"}, body),
            (subject, headers | {"Draftd-Tokens": "4", "Nats-Msg-Id": "3"}, bomb),
            (subject, headers | {"Draftd-Document": "%0d%0a" * 60, "Nats-Msg-Id": "4"}, body),
            (subject, headers | {"Draftd-Vocabulary": "5000000000", "Nats-Msg-Id": "5"}, body),
            (f"{stream}.=zz", headers | {"Nats-Msg-Id": "6"}, body),
            (f"{stream}.{'a' * 200}", headers | {"Nats-Msg-Id": "7"}, body),
            _message(stream, list(range(101)), document_id="too long"),
            _message(stream, [1, 2], document_id="other vocabulary", vocab_size=VOCAB - 1),
        ]
        _put(server, stream, *garbage, good)
        _wait_held(a, {"refrain": REFRAIN, "d": [1, 2, 3]})
        assert _state(a).refused_messages == len(garbage)
        assert a.metric('draftd_replication_refused_messages_total{reason="size"}') == 2
        assert a.metric('draftd_replication_refused_messages_total{reason="format"}') == 1
        assert a.metric('draftd_replication_refused_messages_total{reason="vocabulary"}') == 1
        # None of them is delivered again.
        wait_until(lambda: _consumer(server, stream, "a").num_ack_pending == 0)
        assert a.draft(REFRAIN[:5], k=4) == REFRAIN[5:9]
        assert a.metric("draftd_background_errors_total") == 0
        assert a.metric("draftd_replication_errors_total") == 0


def _consumer(server: NatsServer, stream: str, node: str) -> ConsumerInfo:
    info: ConsumerInfo = server.ask(lambda js: js.consumer_info(stream, f"draftd-{node}"))
    return info


def test_another_tokenizer_is_refused(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a") as (a,):
        stored = pb.StoredDocument(document_id="x", packed_tokens=pack([1, 2]))
        a.corpus.Import(iter([pb.ImportRequest(vocab_size=VOCAB, tokenizer_fingerprint="one", documents=[stored])]))
        _put(server, stream, _message(stream, [1, 2, 3], fingerprint="two"), _message(stream, [4, 5], fingerprint="one", document_id="e"))
        _wait_held(a, {"x": [1, 2], "e": [4, 5]})
        assert a.metric('draftd_replication_refused_messages_total{reason="tokenizer"}') == 1


def test_no_room_for_a_namespace_is_counted(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", max_namespaces=1) as (a,):
        a.seed()
        _put(server, stream, _message(stream, [1], namespace="second"), _message(stream, [2]))
        _wait_held(a, {"refrain": REFRAIN, "d": [2]})
        assert a.metric('draftd_replication_refused_messages_total{reason="room"}') == 1


def test_the_same_document_of_two_nodes_is_one_also_beyond_the_window(server: NatsServer, stream: str) -> None:
    server.ask(lambda js: js.add_stream(StreamConfig(name=stream, subjects=[f"{stream}.*"], duplicate_window=0.1)))
    with _services(server, stream, "a", "b", "c") as (a, b, c):
        a.ingest("same", [1, 2, 3], complete=True, vocab_size=VOCAB)
        _wait_held(b, {"same": [1, 2, 3]})
        # As when the same file is imported on every node.
        stored = pb.StoredDocument(document_id="same", packed_tokens=pack([1, 2, 3]))
        assert b.corpus.Import(iter([pb.ImportRequest(documents=[stored])])).skipped_documents == 1
        time.sleep(0.2)
        again = _message(stream, [1, 2, 3], document_id="same")
        _put(server, stream, again, _message(stream, [9], document_id="last"))
        assert server.ask(lambda js: js.stream_info(stream)).state.messages == 3
        for service in (a, b, c):
            _wait_held(service, {"same": [1, 2, 3], "last": [9]})
        assert (c.metric('draftd_replication_duplicate_documents_total{at="corpus"}'), _state(c).consumed_documents) == (1, 2)


def test_the_same_document_within_the_window_is_one_message(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a") as (a,):
        _put(server, stream, _message(stream, [1, 2, 3], document_id="same", namespace="n"))
        _wait_held(a, {"same": [1, 2, 3]}, "n")
        a.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="n"))
        a.ingest("same", [1, 2, 3], complete=True, namespace="n", vocab_size=VOCAB)
        wait_until(lambda: a.metric('draftd_replication_duplicate_documents_total{at="stream"}') == 1)
        assert server.ask(lambda js: js.stream_info(stream)).state.messages == 1


def test_documents_of_one_id_and_other_content_are_all_kept_everywhere(server: NatsServer, stream: str) -> None:
    long = "é" * 64
    with _services(server, stream, "a", "b") as (a, b):
        foreign = [_message(stream, [n, n, n], document_id=document_id) for n in (1, 2) for document_id in ("7", long)]
        _put(server, stream, *foreign[:2])
        _wait_held(a, {"7": [1, 1, 1], long: [1, 1, 1]})
        _put(server, stream, *foreign[2:], _message(stream, [2, 2, 2], document_id="7", vocab_size=VOCAB))
        ids = {
            (document_id, n): Message(OTHER, "default", VOCAB, "", 0, document_id, np.full(3, n, np.int32))
            for n in (2,)
            for document_id in ("7", long)
        }
        renamed = {longer_id(document_id, message.content_id()): [n] * 3 for (document_id, n), message in ids.items()}
        assert all(len(name.encode()) <= 128 for name in renamed)
        for service in (a, b):
            _wait_held(service, {"7": [1, 1, 1], long: [1, 1, 1], **renamed})
        assert a.metric("draftd_replication_renamed_documents_total") == 2


def test_document_whose_id_is_in_flight_waits_for_it(server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftd.server.replicate.receiving._IN_FLIGHT_AGAIN_S", 0.2)
    with _services(server, stream, "a") as (a,):
        a.ingest("same", [1, 2], vocab_size=VOCAB)
        a.ingest("other", [8, 8])
        _put(server, stream, _message(stream, [1, 2, 3], document_id="same"), _message(stream, [5, 5], document_id="other"))
        wait_until(lambda: _consumer(server, stream, "a").num_redelivered)
        a.ingest("same", [3], offset=2, complete=True)
        renamed = longer_id("other", Message(OTHER, "default", VOCAB, "", 0, "other", np.array([5, 5], np.int32)).content_id())
        # One that stays in flight is waited for a few times only.
        _wait_held(a, {"same": [1, 2, 3], renamed: [5, 5]})
        wait_until(lambda: a.metric('draftd_replication_duplicate_documents_total{at="corpus"}') == 1)
        a.ingest("other", [8], offset=2, complete=True)
        _wait_held(a, {"same": [1, 2, 3], renamed: [5, 5], "other": [8, 8, 8]})


def test_generations_are_advanced_once_for_all_nodes(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", "b") as (a, b):
        a.ingest("old", [1, 2, 3], complete=True, wait_visible=True, vocab_size=VOCAB)
        _wait_held(b, {"old": [1, 2, 3]})
        a.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="default", keep_generations=1))
        wait_until(lambda: b.namespace().generation == 1)
        for service in (a, b):
            _wait_held(service, {})
        b.ingest("new", [4, 5, 6], complete=True)
        _wait_held(a, {"new": [4, 5, 6]})
        _put(
            server,
            stream,
            _message(stream, [7, 8], document_id="late", generation=0),
            _message(stream, [9], document_id="on", generation=3),
        )
        for service in (a, b):
            _wait_held(service, {"new": [4, 5, 6], "on": [9]})
            assert service.namespace().generation == 3
            assert service.metric('draftd_replication_refused_messages_total{reason="generation"}') == 1
        with _services(server, stream, "c") as (c,):
            _wait_held(c, {"new": [4, 5, 6], "on": [9]})
        assert server.ask(lambda js: js.stream_info(stream)).state.messages == 5


def test_namespaces_given_by_name_are_all_that_nats_sends(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", replicate_namespaces="one, t/w.o") as (a,):
        _put(server, stream, *(_message(stream, [1, 2], namespace=name, document_id=name) for name in ("one", "other", "t/w.o")))
        _wait_held(a, {"one": [1, 2]}, "one")
        _wait_held(a, {"t/w.o": [1, 2]}, "t/w.o")
        delivered = _consumer(server, stream, "a").delivered
        assert delivered is not None
        assert delivered.consumer_seq == 2
    with _services(server, stream, "a", replicate_namespaces="other") as (a,):
        _wait_held(a, {"other": [1, 2]}, "other")


def test_dropping_a_namespace_is_of_one_node(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", "b") as (a, b):
        a.seed()
        _wait_held(b, {"refrain": REFRAIN})
        a.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="default"))
        b.ingest("next", [1, 2], complete=True)
        _wait_held(a, {"next": [1, 2]})
        assert set(_held(b)) == {"refrain", "next"}


def test_document_for_a_namespace_that_is_asleep_wakes_it(server: NatsServer, stream: str, tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "idle_namespace_s": 0.3, "lease_ms": 400, "store_lag_ms": 20}
    with _services(server, stream, "a", **settings) as (a,):
        a.seed()
        wait_until(lambda: [n.asleep for n in a.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces] == [True])
        _put(server, stream, _message(stream, [1, 2, 3]))
        wait_until(lambda: _state(a).consumed_documents == 1)
        wait_until(lambda: a.draft([1, 2]) == [3])
        assert set(_held(a)) == {"refrain", "d"}


def test_acknowledged_when_on_disk_and_after_a_restart_only_what_is_new_comes(server: NatsServer, stream: str, tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "store_lag_ms": 20}
    with _services(server, stream, "a", **settings) as (a,):
        store = a.service._store
        assert store is not None
        _put(server, stream, _message(stream, [1], document_id="1"))
        _wait_held(a, {"1": [1]})
        wait_until(lambda: _consumer(server, stream, "a").num_ack_pending == 0)
        with store.database._lock:
            _put(server, stream, _message(stream, [2], document_id="2"))
            _wait_held(a, {"1": [1], "2": [2]})
            time.sleep(0.3)
            assert _consumer(server, stream, "a").num_ack_pending == 1
        wait_until(lambda: _consumer(server, stream, "a").num_ack_pending == 0)
        a.ingest("own", [5, 5], complete=True, wait_durable=True)
        wait_until(lambda: _state(a).published_documents == 1)
        time.sleep(1.2)
    _put(server, stream, _message(stream, [3], document_id="3"))
    with _services(server, stream, "a", **settings) as (a,):
        _wait_held(a, {"1": [1], "2": [2], "own": [5, 5], "3": [3]})
        wait_until(lambda: _state(a).lag_messages == 0 == _state(a).outbox_documents)
        assert (_state(a).consumed_documents, _state(a).published_documents) == (1, 0)
    # Without its store it begins anew, its own earlier documents included.
    with _services(server, stream, "a") as (a,):
        _wait_held(a, {"1": [1], "2": [2], "own": [5, 5], "3": [3]})


def test_store_that_refuses_to_be_written_does_not_stop_replication(server: NatsServer, stream: str, tmp_path: Path) -> None:
    with _services(server, stream, "a", data_dir=tmp_path / "data", store_lag_ms=20) as (a,):
        store = a.service._store
        assert store is not None
        pages = store.database._db.execute("PRAGMA page_count").fetchone()[0]
        store.database._db.execute(f"PRAGMA max_page_count = {pages}")
        _put(server, stream, _message(stream, np.random.default_rng(0).integers(0, VOCAB, 20_000).tolist()))
        wait_until(lambda: store.failure and _consumer(server, stream, "a").num_ack_pending == 0, 30)
        assert list(_held(a)) == ["d"]


def test_stream_that_takes_other_subjects_is_said(server: NatsServer, stream: str) -> None:
    server.ask(lambda js: js.add_stream(StreamConfig(name=stream, subjects=[f"elsewhere{stream}"])))
    a = RunningService(replicate=server.url, replicate_stream=stream)
    wait_until(lambda: "does not take the subject" in _state(a).failure, 30)
    a.seed()
    assert a.draft(REFRAIN[:5], k=4) == REFRAIN[5:9]
    a.close()


def test_stream_is_made_with_the_limits_given_and_used_with_any(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", replicate_max_bytes=2**21, replicate_max_age_s=60):
        made: StreamInfo = server.ask(lambda js: js.stream_info(stream))
        assert (made.config.max_bytes, made.config.max_age, made.config.duplicate_window, made.config.discard) == (2**21, 60, 60, "old")
    with _services(server, stream, "b", replicate_max_bytes=2**22) as (b,):
        b.seed()
        wait_until(lambda: _state(b).published_documents == 1)
        assert server.ask(lambda js: js.stream_info(stream)).config.max_bytes == 2**21


def test_two_services_of_one_name_are_said(server: NatsServer, stream: str) -> None:
    with _services(server, stream, "a", "a") as (first, second):
        wait_until(lambda: "another service has the node name a too" in _state(first).warning, 30)
        assert "WARNING" in draftd("status", "--endpoint", f"unix:{first.config.socket_path()}").stdout
        assert "another service has the node name" in first.get("/readyz")
        assert _state(second).warning == ""


def test_document_too_large_for_nats_is_counted_and_the_others_go(tmp_path: Path, stream: str) -> None:
    with nats_server(tmp_path, config="max_payload: 4096") as server, _services(server, stream, "a", max_length=2**17) as (a,):
        a.ingest("large", np.random.default_rng(0).integers(0, VOCAB, 20_000).tolist(), complete=True, vocab_size=VOCAB)
        a.ingest("small", [1, 2], complete=True)
        wait_until(lambda: _state(a).published_documents == 1)
        assert a.metric('draftd_replication_unsent_documents_total{reason="too large"}') == 1
        assert _state(a).connected


def test_user_and_password_come_from_a_file_and_are_read_again(tmp_path: Path, stream: str) -> None:
    config = 'authorization { user: draftd, password: "hunter2" }'
    file = tmp_path / "credentials.toml"
    file.write_text('user = "draftd"\npassword = "wrong-secret"')
    file.chmod(0o600)
    with nats_server(tmp_path, config=config) as server:
        a = RunningService(replicate=server.url, replicate_stream=stream, replicate_credentials=file)
        wait_until(lambda: "authorization" in _state(a).failure.lower(), 30)
        a.seed()
        file.write_text('user = "draftd"\npassword = "hunter2"')
        wait_until(lambda: _state(a).published_documents == 1, 30)
        everything = a.get("/v1/status") + a.get("/readyz") + a.get("/metrics") + draftd("config", "--replicate", server.url).stdout
        assert "secret" not in everything
        assert "hunter2" not in everything
        a.close()


def test_servers_are_checked_and_this_service_shows_its_certificate(tmp_path: Path, stream: str) -> None:
    authority = Authority(tmp_path)
    server_cert, server_key = authority.sign("localhost")
    client_cert, client_key = authority.sign("client")
    config = f'tls {{ cert_file: "{server_cert}", key_file: "{server_key}", ca_file: "{authority.ca}", verify: true }}'
    with nats_server(tmp_path, scheme="tls", host="localhost", config=config) as server:
        tls = {"replicate_tls_ca": authority.ca, "replicate_tls_cert": client_cert, "replicate_tls_key": client_key}
        with _services(server, stream, "a", **tls) as (a,):
            a.seed()
            wait_until(lambda: _state(a).published_documents == 1)
        b = RunningService(replicate=server.url, replicate_stream=stream)
        wait_until(lambda: "certificate" in _state(b).failure.lower(), 30)
        assert not _state(b).connected
        b.close()


def test_what_cannot_be_used_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, error in (("replicate_credentials", FileRefused), ("replicate_tls_ca", FileRefused)):
        with pytest.raises(error):
            asyncio.run(_start(replicate="tls://127.0.0.1:9", **{setting: tmp_path / "missing"}))
    monkeypatch.setitem(sys.modules, "nats", None)
    monkeypatch.delitem(sys.modules, "draftd.server.replicate.replicator", raising=False)
    with pytest.raises(FailedPrecondition, match=r"draftd\[nats\]"):
        asyncio.run(_start(replicate="nats://127.0.0.1:9"))


async def _start(**settings: Any) -> None:
    from draftd.server.config import ServerConfig
    from draftd.server.service import Service

    await Service(ServerConfig(socket="off", listen="127.0.0.1:0", insecure=True, http="off", **settings)).start()


def test_new_node_begins_where_its_quota_begins() -> None:
    def state(subjects: dict[str, int], bytes_: int) -> StreamState:
        return StreamState(sum(subjects.values()), bytes_, 1001, 1000 + sum(subjects.values()), 0, subjects=subjects)

    # 1,000 tokens a document, reckoned low: 100 documents fill the quota, 150 are read.
    assert start_sequence(state({"S.a": 1000}, 1000 * 3450), lambda _: 100_000) == 1851
    assert start_sequence(state({"S.a": 100}, 100 * 3450), lambda _: 100_000) == 1001
    assert start_sequence(state({"S.a": 900, "S.b": 100}, 1000 * 3450), lambda subject: 100_000 if subject == "S.a" else 10_000) == 1834
    assert start_sequence(state({"S.a": 900, "S.b": 100}, 1000 * 3450), lambda subject: 100_000 if subject == "S.a" else 0) == 1834
    assert start_sequence(state({"S.a": 10}, 10), lambda _: 4096) == 1001
    assert start_sequence(state({}, 0), lambda _: 4096) == 1001
