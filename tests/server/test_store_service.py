"""The store behind a running service: what its answers promise, what it says about itself, and namespaces that sleep."""

from __future__ import annotations

import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftd.client import Drafter
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server import service as service_module
from draftd.server.store.restore import restore_all
from tests.server.harness import REFRAIN, VOCAB, RunningService, Stubs, draftd, error_of, pack, wait_until


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    """A service with a store that holds the refrain."""
    made = RunningService(data_dir=tmp_path / "data", store_lag_ms=20)
    made.seed()
    yield made
    made.close()


def _stored(running: RunningService) -> list[str]:
    """Ids of the documents on disk."""
    store = running.service._store
    assert store is not None
    return [row.document_id for kept in store.database.namespaces() for row in store.database.newest_first(kept.key)]


def _settle(running: RunningService) -> None:
    store = running.service._store
    assert store is not None
    wait_until(lambda: store.settled)


def _limit_pages(running: RunningService, more: int) -> None:
    """Lets the store's file grow by so many pages, as on a disk that is nearly full."""
    store = running.service._store
    assert store is not None
    pages = store.database._db.execute("PRAGMA page_count").fetchone()[0]
    store.database._db.execute(f"PRAGMA max_page_count = {pages + more}")


def test_durable_answers_come_when_documents_are_on_disk(running: RunningService) -> None:
    running.ingest("now", [1, 2, 3], complete=True, wait_durable=True)
    assert "now" in _stored(running)
    running.ingest("open", [4, 5, 6], wait_durable=True)
    assert "open" not in _stored(running)
    engine = running.attach("durable").attachment_id
    running.propose([pb.Row(document_id="row", tokens=[9, 8, 7], prompt_length=1)], engine)
    harvest = pb.HarvestRequest(attachment_id=engine, rows=[pb.HarvestRow(document_id="row", offset=3, tokens=[6])], wait_durable=True)
    assert running.drafter.Harvest(harvest).results[0].committed
    assert "row" in _stored(running)
    stored = pb.StoredDocument(document_id="imported", packed_tokens=pack([1]), generation=3)
    answer = running.corpus.Import(iter([pb.ImportRequest(documents=[stored])]))
    assert (answer.documents, answer.durable) == (1, True)
    assert "imported" in _stored(running)


def test_what_nobody_waits_for_is_written_soon(running: RunningService) -> None:
    running.ingest("soon", [1, 2, 3], complete=True)
    wait_until(lambda: "soon" in _stored(running))


def test_without_a_store_durability_is_refused_and_nothing_is_taken(service: RunningService) -> None:
    code, message = error_of(lambda: service.ingest("durable", [1, 2], complete=True, wait_durable=True, namespace="durable", vocab_size=9))
    assert (code, "the service has no store" in message) == ("FAILED_PRECONDITION", True)
    assert error_of(lambda: service.namespace("durable"))[0] == "NOT_FOUND"
    engine = service.attach("durable").attachment_id
    service.propose([pb.Row(document_id="row", tokens=[1, 2])], engine)
    request = pb.HarvestRequest(attachment_id=engine, rows=[pb.HarvestRow(document_id="row", offset=2)], wait_durable=True)
    assert error_of(lambda: service.drafter.Harvest(request))[0] == "FAILED_PRECONDITION"
    assert service.harvest(engine, "row", [], 2).committed
    assert not service.corpus.ListNamespaces(pb.ListNamespacesRequest()).HasField("store")
    assert json.loads(service.get("/v1/status"))["store"] is None


def test_private_requests_never_reach_the_store(running: RunningService) -> None:
    secret = [777, 778, 779]
    running.propose([pb.Row(tokens=secret, private=True)])
    engine = running.attach("private").attachment_id
    running.propose([pb.Row(document_id="secret", tokens=secret, private=True)], engine)
    running.harvest(engine, "secret", [780], 3)
    with Drafter(
        f"unix:{running.config.socket_path()}", engine="mapped", vocab_size=VOCAB, max_rows=2, max_length=64, transport="mapped"
    ) as drafter:
        wait_until(lambda: drafter.transport == "mapped")
        drafter.start(0, np.array(secret, np.int32), prompt_length=1, document_id="mapped-secret", private=True)
        drafter.append(0, np.array([780], np.int32))
        drafter.finish(0)
        drafter.start(1, np.array([1, 2], np.int32), prompt_length=1, document_id="mapped-public")
        drafter.finish(1)
        wait_until(lambda: "mapped-public" in _stored(running))
    _settle(running)
    assert set(_stored(running)) == {"refrain", "mapped-public"}


def test_restart_brings_everything_back(tmp_path: Path) -> None:
    first = RunningService(data_dir=tmp_path / "data")
    first.seed()
    first.ingest("other", [5, 6, 7, 8], complete=True, namespace="space", vocab_size=50)
    first.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="space", keep_generations=5))
    exported = list(first.corpus.Export(pb.ExportRequest(namespace="space")))
    instance = first.service.corpus.instance
    first.close()
    second = RunningService(data_dir=tmp_path / "data")
    assert second.service.corpus.instance != instance
    assert second.draft(REFRAIN[:5], k=4) == REFRAIN[5:9]
    assert list(second.corpus.Export(pb.ExportRequest(namespace="space"))) == exported
    space = second.namespace("space")
    assert (space.vocab_size, space.generation, space.documents, space.tokens) == (50, 1, 1, 4)
    assert second.metric("draftd_store_restored_documents") == 2
    assert second.metric("draftd_store_restored_tokens") == len(REFRAIN) + 4
    store = second.corpus.ListNamespaces(pb.ListNamespacesRequest()).store
    assert (store.restored_documents, store.failure, store.pending_documents) == (2, "", 0)
    assert store.bytes > 0
    assert json.loads(second.get("/v1/status"))["store"]["restored_documents"] == 2
    shown = draftd("status", "--endpoint", f"unix:{second.config.socket_path()}").stdout
    assert "2 documents restored at the start" in shown
    said = json.loads(draftd("status", "--json", "--endpoint", f"unix:{second.config.socket_path()}").stdout)
    assert said["store"]["restored_documents"] == 2
    second.close()


def test_stop_writes_what_attachments_hold_open(tmp_path: Path) -> None:
    first = RunningService(data_dir=tmp_path / "data", store_lag_ms=60_000)
    engine = first.attach("engine").attachment_id
    first.propose([pb.Row(document_id="open", tokens=[1, 2, 3], prompt_length=1)], engine)
    first.ingest("done", [4, 5], complete=True)
    first.close()
    second = RunningService(data_dir=tmp_path / "data")
    (message,) = second.corpus.Export(pb.ExportRequest())
    assert {document.document_id for document in message.documents} == {"open", "done"}
    second.close()


def test_while_it_restores_it_says_so_and_takes_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunningService(data_dir=tmp_path / "data")
    first.seed()
    first.close()
    goes_on, made = threading.Event(), []

    def restore(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return restore_all(*arguments)

    monkeypatch.setattr(service_module, "restore_all", restore)
    socket = tmp_path / "d.sock"
    starter = threading.Thread(
        target=lambda: made.append(RunningService(data_dir=tmp_path / "data", socket=str(socket), http="127.0.0.1:0"))
    )
    starter.start()
    wait_until(socket.exists, 60)
    stubs = Stubs(f"unix:{socket}")
    grpc.channel_ready_future(stubs.channel).result(60)
    health = health_pb2_grpc.HealthStub(stubs.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    for call in (
        lambda: stubs.draft(REFRAIN[:5]),
        lambda: stubs.attach("early"),
        lambda: stubs.ingest("early", [1], complete=True, vocab_size=VOCAB),
        lambda: stubs.corpus.ListNamespaces(pb.ListNamespacesRequest()),
        lambda: list(stubs.corpus.Export(pb.ExportRequest())),
        lambda: stubs.corpus.Import(iter([pb.ImportRequest(vocab_size=VOCAB)])),
    ):
        code, message = error_of(call)
        assert (code, "is starting" in message) == ("UNAVAILABLE", True)
    result = draftd("status", "--endpoint", f"unix:{socket}")
    assert (result.returncode, "NOT_SERVING" in result.stderr) == (1, True)
    result = draftd("explain", "-t", "1", "--endpoint", f"unix:{socket}")
    assert (result.returncode, "draftd: UNAVAILABLE: the service is starting" in result.stderr) == (1, True), result.stderr
    goes_on.set()
    starter.join(60)
    (second,) = made
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    assert stubs.draft(REFRAIN[:5], k=2) == REFRAIN[5:7]
    second.close()


def test_full_disk_is_said_everywhere_and_drafting_goes_on(running: RunningService, tmp_path: Path) -> None:
    _settle(running)
    _limit_pages(running, 0)
    text = np.random.default_rng(0).integers(0, VOCAB, 5000).tolist()
    running.ingest("large", text, complete=True, wait_visible=True)
    code, message = error_of(lambda: running.ingest("next", [1, 2, 3], complete=True, wait_durable=True))
    assert (code, "database or disk is full" in message, "kept in memory" in message) == ("UNAVAILABLE", True, True)
    assert running.draft(text[:20], k=4) == text[20:24]
    assert running.get("/readyz") == "ready\nthe store cannot be written: database or disk is full\n"
    assert running.metric("draftd_store_failing") == 1
    assert running.metric("draftd_store_errors_total") >= 1
    assert running.metric("draftd_store_pending_documents") == 2
    assert running.metric("draftd_store_lag_seconds") > 0
    endpoint = ("--endpoint", f"unix:{running.config.socket_path()}")
    assert "CANNOT BE WRITTEN: database or disk is full" in draftd("status", *endpoint).stdout
    (tmp_path / "more").write_text("4,5,6")
    # Fault: it said that no service answers.
    refused = draftd("import", str(tmp_path / "more"), *endpoint)
    assert (refused.returncode, "draftd: UNAVAILABLE: not on disk (database or disk is full)" in refused.stderr) == (1, True), (
        refused.stderr
    )
    _limit_pages(running, 2**20)
    # Sent again, it is known, and durable.
    assert running.ingest("next", [1, 2, 3], complete=True, wait_durable=True).kept_tokens == 0
    assert {name.partition(":")[0] for name in _stored(running)} == {"refrain", "large", "next", "more"}
    assert running.get("/readyz") == "ready\n"
    assert running.metric("draftd_store_failing") == 0


def test_disk_that_is_too_slow_is_a_deadline(tmp_path: Path) -> None:
    running = RunningService(data_dir=tmp_path / "data", durable_timeout_ms=50)
    running.seed()
    _settle(running)
    store = running.service._store
    assert store is not None
    with store.database._lock:
        code, message = error_of(lambda: running.ingest("slow", [1, 2, 3], complete=True, wait_durable=True))
        assert (code, "not on disk within 50 ms; what was sent is kept" in message) == ("DEADLINE_EXCEEDED", True)
        assert running.draft(REFRAIN[:5], k=1) == REFRAIN[5:6]
    running.ingest("slow", [1, 2, 3], complete=True, wait_durable=True)
    running.close()


def test_import_honours_generations(running: RunningService) -> None:
    documents = [pb.StoredDocument(document_id=str(g), packed_tokens=pack([g, 5, 6]), generation=g) for g in (2, 4, 3)]
    request = pb.ImportRequest(namespace="imported", vocab_size=VOCAB, documents=documents)
    assert running.corpus.Import(iter([request])).documents == 3
    assert running.namespace("imported").generation == 4
    advanced = running.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="imported", keep_generations=2))
    assert advanced.generation == 5
    old = pb.StoredDocument(document_id="old", packed_tokens=pack([1]), generation=3)
    answer = running.corpus.Import(iter([pb.ImportRequest(namespace="imported", documents=[old])]))
    assert (answer.documents, answer.skipped_documents) == (0, 1)
    for generation in (-1, 2**31):
        bad = pb.StoredDocument(document_id="bad", packed_tokens=pack([1]), generation=generation)
        code, message = error_of(lambda bad=bad: running.corpus.Import(iter([pb.ImportRequest(namespace="imported", documents=[bad])])))
        assert (code, f"documents[0].generation is {generation}" in message) == ("INVALID_ARGUMENT", True)


def test_generations_to_keep_default_to_the_configuration(tmp_path: Path) -> None:
    running = RunningService(data_dir=tmp_path / "data", keep_generations=1)
    running.ingest("a", [1, 2, 3], complete=True, wait_visible=True, vocab_size=VOCAB)
    answer = running.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest())
    assert (answer.generation, answer.evicted_tokens) == (1, 3)
    running.close()


# -- namespaces that sleep ---------------------------------------------------------------------------------------------------


@pytest.fixture
def drowsy(tmp_path: Path) -> Iterator[RunningService]:
    """A service whose namespaces sleep after 0.3 seconds, with one that does."""
    made = RunningService(data_dir=tmp_path / "data", store_lag_ms=20, idle_namespace_s=0.3, lease_ms=400)
    made.ingest("d", [1, 2, 3, 4, 5], complete=True, namespace="quiet", vocab_size=VOCAB)
    wait_until(lambda: _asleep(made) == ["quiet"])
    yield made
    made.close()


def _asleep(running: RunningService) -> list[str]:
    return [n.name for n in running.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces if n.asleep]


def _blocks(running: RunningService) -> int:
    return len(list(running.shm_root.glob("*/index-*")))


def test_unused_namespace_gives_its_memory_back_and_is_still_listed(drowsy: RunningService) -> None:
    assert _blocks(drowsy) == 0
    state = drowsy.namespace("quiet")
    assert (state.documents, state.tokens, state.asleep, state.bytes) == (1, 5, True, 0)
    assert _asleep(drowsy) == ["quiet"]
    assert drowsy.metric("draftd_namespaces_asleep") == 1
    assert [one["name"] for one in json.loads(drowsy.get("/v1/status"))["asleep"]] == ["quiet"]
    assert "quiet (asleep)" in draftd("status", "--endpoint", f"unix:{drowsy.config.socket_path()}").stdout


@pytest.mark.parametrize("call", ["propose", "stream", "ingest", "import", "export", "explain", "attach", "heartbeat", "generation"])
def test_the_next_call_wakes_it(drowsy: RunningService, call: str) -> None:
    row = pb.ProposeRequest(rows=[pb.Row(tokens=[1, 2, 3], namespace="quiet")])
    if call == "propose":
        assert list(drowsy.drafter.Propose(row).drafts[0].tokens) == [4, 5]
    elif call == "stream":
        (answer,) = drowsy.drafter.ProposeStream(iter([pb.ProposeStreamRequest(sequence=1, request=row)]))
        assert list(answer.response.drafts[0].tokens) == [4, 5]
    elif call == "ingest":
        assert drowsy.ingest("d", [1, 2, 3, 4, 5], complete=True, namespace="quiet").kept_tokens == 0
    elif call == "import":
        stored = pb.StoredDocument(document_id="d", packed_tokens=pack([9]))
        assert drowsy.corpus.Import(iter([pb.ImportRequest(namespace="quiet", documents=[stored])])).skipped_documents == 1
    elif call == "export":
        (message,) = drowsy.corpus.Export(pb.ExportRequest(namespace="quiet"))
        assert message.documents[0].document_id == "d"
    elif call == "explain":
        assert drowsy.corpus.Explain(pb.ExplainRequest(namespace="quiet", tokens=[1, 2])).draft.tokens
    elif call == "attach":
        engine = drowsy.attach("engine", namespace="quiet", max_length=16)
        assert list(drowsy.propose([pb.Row(tokens=[1, 2, 3])], engine.attachment_id).drafts[0].tokens) == [4, 5]
    elif call == "heartbeat":
        engine = drowsy.attach("engine", namespace="awake", max_length=16)
        request = pb.HeartbeatRequest(attachment_id=engine.attachment_id, extra_namespaces=["quiet"])
        drowsy.drafter.Heartbeat(request)
    else:
        assert drowsy.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="quiet", keep_generations=3)).generation == 1
    assert not drowsy.namespace("quiet").asleep


def test_many_callers_wake_it_once(drowsy: RunningService) -> None:
    futures = [drowsy.drafter.Propose.future(pb.ProposeRequest(rows=[pb.Row(tokens=[1, 2, 3], namespace="quiet")])) for _ in range(20)]
    assert all(list(future.result(30).drafts[0].tokens) == [4, 5] for future in futures)
    assert _blocks(drowsy) == 1


def test_it_sleeps_again_with_what_came_meanwhile(drowsy: RunningService) -> None:
    drowsy.ingest("e", [6, 7, 8], complete=True, namespace="quiet")
    wait_until(lambda: _asleep(drowsy) == ["quiet"])
    assert drowsy.namespace("quiet").documents == 2
    row = pb.Row(tokens=[6, 7], namespace="quiet")
    assert list(drowsy.propose([row]).drafts[0].tokens) == [8]


def test_import_that_pauses_goes_on_in_the_namespace_that_fell_asleep_meanwhile(drowsy: RunningService) -> None:
    """Fault: the next message of the stream was refused, since the namespace did not exist."""

    def requests() -> Iterator[pb.ImportRequest]:
        for i in range(2):
            wait_until(lambda: _asleep(drowsy) == ["quiet"])
            yield pb.ImportRequest(namespace="quiet", documents=[pb.StoredDocument(document_id=f"i{i}", packed_tokens=pack([7, 8]))])

    assert drowsy.corpus.Import(requests()).documents == 2
    exported = drowsy.corpus.Export(pb.ExportRequest(namespace="quiet"))
    assert [document.document_id for answer in exported for document in answer.documents] == ["d", "i0", "i1"]


def test_namespace_of_an_attachment_stays_awake(drowsy: RunningService) -> None:
    with Drafter(
        f"unix:{drowsy.config.socket_path()}",
        engine="e",
        namespace="quiet",
        vocab_size=VOCAB,
        max_rows=2,
        max_length=64,
        transport="mapped",
    ) as drafter:
        wait_until(lambda: drafter.transport == "mapped")
        with pytest.raises(AssertionError, match="waited in vain"):
            wait_until(lambda: _asleep(drowsy), 1.5)
    wait_until(lambda: _asleep(drowsy) == ["quiet"])


def test_sleeping_namespace_is_dropped_without_waking(drowsy: RunningService, tmp_path: Path) -> None:
    answer = drowsy.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="quiet"))
    assert (answer.documents, answer.tokens) == (1, 5)
    assert error_of(lambda: drowsy.namespace("quiet"))[0] == "NOT_FOUND"
    wait_until(lambda: _stored(drowsy) == [])
    drowsy.ingest("d", [7], complete=True, namespace="quiet", vocab_size=9)
    assert drowsy.namespace("quiet").vocab_size == 9


def test_namespace_that_cannot_wake_is_an_error_and_tried_again(drowsy: RunningService) -> None:
    config = drowsy.service.corpus.config
    object.__setattr__(config, "max_namespaces", 0)
    row = pb.Row(tokens=[1, 2, 3], namespace="quiet")
    code, message = error_of(lambda: drowsy.propose([row]))
    assert (code, "'quiet' is asleep and cannot be restored now" in message) == ("UNAVAILABLE", True)
    object.__setattr__(config, "max_namespaces", 4)
    assert list(drowsy.propose([row]).drafts[0].tokens) == [4, 5]


def test_ready_is_503_before_it_is(running: RunningService) -> None:
    running.service._ready = False
    with pytest.raises(urllib.error.HTTPError, match="503"):
        running.get("/readyz")
    running.service._ready = True
