"""Attaching: which transport an engine gets and why, what it is told, and how its lease ends."""

import time
from pathlib import Path

import numpy as np
import pytest

from draftd.drafter.layout import LAYOUT_VERSION, BlockSpec
from draftd.drafter.layout import ArraySpec as Array
from draftd.drafter.rows import RowBlock
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import REFRAIN, VOCAB, RunningService, Stubs, error_of, wait_until

_NAMES = {pb.DATA_TYPE_INT32: "int32", pb.DATA_TYPE_INT64: "int64", pb.DATA_TYPE_FLOAT32: "float32", pb.DATA_TYPE_UINT8: "uint8"}


def _spec(block: pb.BlockMap) -> BlockSpec:
    arrays = tuple(Array(a.name, a.offset, _NAMES[a.data_type], tuple(a.shape)) for a in block.arrays)
    return BlockSpec(block.handle, block.byte_size, block.layout_version, arrays)


def _detach(service: Stubs, attachment_id: str) -> int:
    return service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id)).committed_documents


@pytest.mark.parametrize("wanted", [pb.TRANSPORT_UNSPECIFIED, pb.TRANSPORT_MAPPED])
def test_an_engine_on_the_socket_maps(service: RunningService, wanted: pb.Transport) -> None:
    answer = service.attach("mapping", transport=wanted, layout_version=LAYOUT_VERSION, extra_namespaces=["map-extra"])
    assert (answer.transport, answer.fallback_reason) == (pb.TRANSPORT_MAPPED, "")
    assert answer.lease_ms == 10_000
    assert answer.instance == service.service.corpus.instance
    assert (answer.defaults.k, answer.defaults.spec_factor, answer.defaults.use_local) == (16, 2.0, True)
    assert [index.namespace for index in answer.indexes] == ["default", "map-extra"]
    for block in (answer.rows, answer.control, *(index.block for index in answer.indexes)):
        assert Path(block.handle).stat().st_size >= block.byte_size > 0
        assert block.layout_version == LAYOUT_VERSION
    _detach(service, answer.attachment_id)
    assert not Path(answer.rows.handle).exists()


def test_what_a_mapped_engine_writes_is_visible_to_others_and_committed_when_it_leaves(service: RunningService) -> None:
    answer = service.attach(
        "writer", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION, namespace="written", max_rows=2, max_length=64
    )
    rows = RowBlock.open(_spec(answer.rows))
    rows.start(0, "mapped-document", np.array([1, 2, *range(200, 220)], np.int32), 2, 0, False)
    wait_until(lambda: rows.visible_length(0) == 22)
    draft = service.propose([pb.Row(tokens=[1, *range(200, 205)], namespace="written")]).drafts[0]
    assert list(draft.tokens)[:5] == list(range(205, 210))
    assert draft.source == pb.SOURCE_CORPUS
    assert service.namespace("written").open_documents == 1
    assert _detach(service, answer.attachment_id) == 1
    state = service.namespace("written")
    assert (state.documents, state.open_documents, state.attachments) == (1, 0, 0)


def test_an_engine_that_does_not_know_the_layout_falls_back_to_inline(service: RunningService) -> None:
    answer = service.attach("old", transport=pb.TRANSPORT_UNSPECIFIED, layout_version=LAYOUT_VERSION + 1)
    assert answer.transport == pb.TRANSPORT_INLINE
    assert answer.fallback_reason == f"layout_version is {LAYOUT_VERSION + 1}; the service's is {LAYOUT_VERSION}"
    _detach(service, answer.attachment_id)


def _fallbacks(service: RunningService, reason: str) -> float:
    return service.metric(f'draftd_fallbacks_total{{reason="{reason}"}}')


def test_engines_that_would_map_and_do_not_are_counted_by_reason(service: RunningService) -> None:
    before = {reason: _fallbacks(service, reason) for reason in ("layout", "client")}
    old = service.attach("old", transport=pb.TRANSPORT_UNSPECIFIED, layout_version=LAYOUT_VERSION + 1)
    blind = service.attach("blind", unmapped_reason="it has another /dev/shm")
    content = service.attach("content")
    assert blind.fallback_reason == "it has another /dev/shm"
    assert content.fallback_reason == ""
    assert {reason: _fallbacks(service, reason) - n for reason, n in before.items()} == {"layout": 1, "client": 1}
    for answer in (old, blind, content):
        _detach(service, answer.attachment_id)
    code, message = error_of(lambda: service.attach("talkative", unmapped_reason="x" * 513))
    assert (code, message) == ("INVALID_ARGUMENT", "unmapped_reason has more than 512 bytes")


def test_an_engine_that_insists_on_mapping_another_layout_is_refused(service: RunningService) -> None:
    code, message = error_of(lambda: service.attach("old", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION + 1))
    assert (code, "layout_version" in message) == ("FAILED_PRECONDITION", True)


def test_an_engine_on_a_gpu_does_not_map_an_index_in_host_memory(service: RunningService) -> None:
    code, message = error_of(lambda: service.attach("gpu", device_uuid="0" * 32, transport=pb.TRANSPORT_MAPPED))
    assert (code, message) == ("FAILED_PRECONDITION", "transport MAPPED: the index is in host memory, not on the engine's GPU")
    answer = service.attach("gpu", device_uuid="0" * 32, transport=pb.TRANSPORT_UNSPECIFIED)
    assert answer.transport == pb.TRANSPORT_INLINE
    assert "host memory" in answer.fallback_reason


def test_tensors_are_for_handle_only(service: RunningService) -> None:
    code, message = error_of(lambda: service.attach("tensors", tensors=pb.EngineTensors()))
    assert (code, message) == ("INVALID_ARGUMENT", "tensors are for HANDLE only")


def test_more_namespaces_than_an_attachment_may_have(service: RunningService) -> None:
    code, message = error_of(lambda: service.attach("many", extra_namespaces=[f"n{i}" for i in range(65)]))
    assert (code, "the limit is 64" in message) == ("RESOURCE_EXHAUSTED", True)


def test_heartbeat_maps_further_namespaces_once(service: RunningService) -> None:
    answer = service.attach("beating", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION)
    request = pb.HeartbeatRequest(attachment_id=answer.attachment_id, extra_namespaces=["beat-extra"])
    assert [index.namespace for index in service.drafter.Heartbeat(request).indexes] == ["beat-extra"]
    later = service.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=answer.attachment_id))
    assert (later.lease_ms, list(later.indexes)) == (10_000, [])
    assert service.namespace("beat-extra").attachments == 1
    _detach(service, answer.attachment_id)


def test_a_namespace_that_is_made_anew_is_mapped_anew(service: RunningService) -> None:
    answer = service.attach("remapping", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION, namespace="renewed")
    service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="renewed", force=True))
    assert not service.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=answer.attachment_id)).indexes
    service.ingest("d", [1, 2], namespace="renewed", vocab_size=VOCAB)
    (index,) = service.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=answer.attachment_id)).indexes
    assert index.namespace == "renewed"
    assert index.block.handle != answer.indexes[0].block.handle
    _detach(service, answer.attachment_id)


def test_an_engine_on_tcp_gets_inline_with_the_reason() -> None:
    running = RunningService(listen="127.0.0.1:0", insecure=True, http="off", max_attachments=2)
    try:
        remote = Stubs(f"127.0.0.1:{running.service.listen_port}")
        answer = remote.attach("remote", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION)
        assert answer.transport == pb.TRANSPORT_INLINE
        assert answer.fallback_reason.startswith("MAPPED needs the Unix socket")
        assert running.service.metrics.value("draftd_fallbacks_total", "host") == 1
        code, message = error_of(lambda: remote.attach("remote-handle", transport=pb.TRANSPORT_HANDLE))
        assert (code, message.startswith("transport HANDLE needs the Unix socket")) == ("FAILED_PRECONDITION", True)
        running.attach("second")
        code, message = error_of(lambda: running.attach("third"))
        assert (code, "max_attachments=2" in message) == ("RESOURCE_EXHAUSTED", True)
        remote.channel.close()
    finally:
        running.close()


def test_lease_that_runs_out_commits_what_was_open_and_frees_the_name() -> None:
    running = RunningService(lease_ms=400)
    try:
        running.seed()
        mapped = running.attach("lost-mapped", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION)
        lost = running.attach("lost").attachment_id
        alive = running.attach("alive").attachment_id
        running.propose([pb.Row(document_id="open", tokens=[1, 2, 3], prompt_length=1)], lost)
        started = time.monotonic()
        while time.monotonic() - started < 1.2:
            running.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=alive))
            time.sleep(0.05)
        assert running.metric("draftd_lease_losses_total") == 2
        assert running.metric('draftd_attachments{transport="inline"}') == 1
        code, message = error_of(lambda: running.propose([pb.Row(tokens=[1])], lost))
        assert (code, "attach again" in message) == ("NOT_FOUND", True)
        assert not Path(mapped.rows.handle).exists()
        state = running.namespace()
        assert (state.documents, state.open_documents, state.attachments) == (2, 0, 1)
        assert list(running.propose([pb.Row(tokens=REFRAIN[:5])], alive).drafts[0].tokens) == REFRAIN[5:13]
        assert running.attach("lost").attachment_id != lost
    finally:
        running.close()


def test_service_that_was_held_up_does_not_end_leases() -> None:
    running = RunningService(lease_ms=400, http="off")
    try:
        engine = running.attach("patient").attachment_id
        running.hold_up(1.5)
        # Heartbeats that were sent meanwhile were not read; that is not the engine's fault.
        assert running.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=engine)).lease_ms == 400
        wait_until(lambda: not len(running.service.attachments))
    finally:
        running.close()
