"""HANDLE with tensors on a GPU, over gRPC, with a stand-in for the GPU: what reaches it, what is refused, and what Harvest keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from draftd.drafter.errors import FailedPrecondition, ResourceExhausted
from draftd.drafter.stream_words import WordPage
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import REFRAIN, RunningService, error_of, wait_until

UUID = "ab" * 16


@dataclass
class FakeTensors:
    """An attachment's tensors: rows that a test fills, and notes of what was asked."""

    asked: dict[str, Any]
    buffer_rows: int = 6
    words: WordPage = field(default_factory=WordPage.create)
    queued: list[tuple[int, int]] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=dict)
    last: int = 1 << 31
    stopped: bool = False
    closed: bool = False

    def queue(self, sequence: int, batch: int, wait_s: float) -> None:
        if len(self.queued) == 4:
            raise ResourceExhausted("sequence: 4 batches wait", "sequence")
        self.queued.append((sequence, batch))

    async def reach(self, sequence: int, wait_s: float) -> None:
        if sequence > self.last:
            raise FailedPrecondition(f"sequence: the engine's stream has not come to {sequence}", "sequence")
        self.reached.append(sequence)

    async def read(self, row: int, length: int) -> NDArray[np.int32]:
        return np.array(self.rows[row][:length], np.int32)

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        assert self.stopped
        self.closed = True


@dataclass
class FakeSharing:
    """What the service shares."""

    opened: list[FakeTensors] = field(default_factory=list)
    abandoned: int = 0

    def open(self, message: pb.EngineTensors, **asked: Any) -> FakeTensors:
        self.opened.append(FakeTensors(asked | {"uuid": message.device_uuid}))
        return self.opened[-1]

    def counts(self) -> dict[str, int]:
        return {"launched": 5, "failed": 1}

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class Engine:
    """An attached engine."""

    service: RunningService
    id: str
    tensors: FakeTensors
    answer: pb.AttachResponse

    def propose(self, **fields: Any) -> pb.ProposeResponse:
        return self.service.drafter.Propose(pb.ProposeRequest(attachment_id=self.id, **fields))

    def harvest(self, *rows: pb.HarvestRow, sequence: int = 1, **fields: Any) -> list[pb.DocumentResult]:
        request = pb.HarvestRequest(attachment_id=self.id, rows=rows, sequence=sequence, **fields)
        return list(self.service.drafter.Harvest(request).results)


@pytest.fixture
def sharing(service: RunningService) -> Iterator[FakeSharing]:
    fake = FakeSharing()
    service.service.attachments.sharing = cast(Any, fake)
    yield fake
    for attachment in service.service.attachments:
        if attachment.device_tensors is not None:
            service.drafter.Detach(pb.DetachRequest(attachment_id=attachment.id))
    service.service.attachments.sharing = None


_attached = 0


def _attach(service: RunningService, sharing: FakeSharing, parameters: pb.DraftParameters | None = None, **fields: Any) -> Engine:
    global _attached
    _attached += 1
    tensors = pb.EngineTensors(device_uuid=UUID, parameters=parameters)
    answer = service.attach(f"gpu-{_attached}", transport=pb.TRANSPORT_HANDLE, tensors=tensors, **fields)
    return Engine(service, answer.attachment_id, sharing.opened[-1], answer)


def test_attach_opens_the_tensors_and_detach_closes_them(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing, pb.DraftParameters(min_token_prob=0.25))
    assert engine.answer.transport == pb.TRANSPORT_HANDLE
    assert engine.answer.sequence_words == engine.tensors.words.path
    asked = engine.tensors.asked
    assert (asked["uuid"], asked["max_rows"], asked["max_length"], asked["name"], asked["vocab_size"]) == (UUID, 4, 256, "default", 1000)
    assert (asked["params"].k, asked["params"].min_token_prob) == (8, 0.25)
    service.drafter.Detach(pb.DetachRequest(attachment_id=engine.id))
    assert engine.tensors.closed


def test_tensors_are_closed_when_the_attachment_cannot_be_made(service: RunningService, sharing: FakeSharing) -> None:
    with pytest.raises(AssertionError, match="did not fail"):
        error_of(lambda: _attach(service, sharing))
    code, message = error_of(lambda: _attach(service, sharing, vocab_size=999))
    assert code == "FAILED_PRECONDITION"
    assert "vocab_size" in message
    wait_until(lambda: sharing.opened[-1].closed)
    assert not sharing.opened[0].closed


@pytest.mark.parametrize(
    ("parameters", "fields", "named"),
    [
        (pb.DraftParameters(k=4), {}, "tensors.parameters.k"),
        (pb.DraftParameters(branches=2), {}, "tensors.parameters.branches"),
        (None, {"extra_namespaces": ["other"]}, "extra_namespaces"),
    ],
)
def test_attach_refuses_what_tensors_cannot_hold(
    service: RunningService, sharing: FakeSharing, parameters: pb.DraftParameters | None, fields: dict[str, Any], named: str
) -> None:
    code, message = error_of(lambda: _attach(service, sharing, parameters, **fields))
    assert (code, named in message) == ("INVALID_ARGUMENT", True)
    assert not sharing.opened


def test_service_on_the_host_refuses_tensors_on_a_gpu(service: RunningService) -> None:
    code, message = error_of(lambda: service.attach("no-gpu", transport=pb.TRANSPORT_HANDLE, tensors=pb.EngineTensors(device_uuid=UUID)))
    assert code == "FAILED_PRECONDITION"
    assert message == "tensors.device_uuid: the service's index is in host memory, and so must the tensors be"


def test_propose_queues_and_answers_at_once(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing)
    assert engine.propose(sequence=2**32 - 1, batch=3) == pb.ProposeResponse()
    assert engine.tensors.queued == [(2**32 - 1, 3)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sequence": 1}, "batch is 0"),
        ({"sequence": 1, "batch": 5}, "batch is 5; it must be in [1, 4]"),
        ({"sequence": 1, "batch": -1}, "batch is -1"),
        ({"sequence": 1, "batch": 1, "rows": [pb.Row(tokens=[1])]}, "rows"),
        ({"sequence": 1, "batch": 1, "parameters": pb.DraftParameters(k=2)}, "parameters"),
    ],
)
def test_propose_refuses(service: RunningService, sharing: FakeSharing, fields: dict[str, Any], named: str) -> None:
    engine = _attach(service, sharing)
    code, message = error_of(lambda: engine.propose(**fields))
    assert (code, named in message) == ("INVALID_ARGUMENT", True)
    assert engine.tensors.queued == []


def test_too_many_batches_are_refused(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing)
    for sequence in range(4):
        engine.propose(sequence=sequence, batch=1)
    assert error_of(lambda: engine.propose(sequence=4, batch=1))[0] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("field", ["sequence", "batch"])
def test_others_may_not_give_sequence_numbers(service: RunningService, field: str) -> None:
    given: dict[str, Any] = {field: 1}
    code, message = error_of(lambda: service.drafter.Propose(pb.ProposeRequest(rows=[pb.Row(tokens=[1])], **given)))
    assert (code, message) == ("INVALID_ARGUMENT", f"{field} is for HANDLE on a GPU")


def test_harvest_keeps_the_output_of_rows(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing)
    engine.tensors.rows = {5: [*range(700, 710), 1, 2, 3, 999], 0: [5, 6]}
    results = engine.harvest(
        pb.HarvestRow(document_id="gpu-a", row_index=5, length=13, prompt_length=10),
        pb.HarvestRow(document_id="gpu-b", row_index=0, length=2),
        sequence=7,
        wait_visible=True,
    )
    assert engine.tensors.reached == [7]
    assert [(r.kept_tokens, r.total_tokens, r.committed) for r in results] == [(3, 3, True), (2, 2, True)]
    again = engine.harvest(pb.HarvestRow(document_id="gpu-a", row_index=5, length=13, prompt_length=10))
    assert [(r.kept_tokens, r.total_tokens, r.committed) for r in again] == [(0, 3, True)]
    exported = {d.document_id: d.packed_tokens for m in service.corpus.Export(pb.ExportRequest()) for d in m.documents}
    assert np.frombuffer(exported["gpu-a"], "<i4").tolist() == [1, 2, 3]
    assert np.frombuffer(exported["refrain"], "<i4").tolist() == REFRAIN


def test_harvest_goes_on_with_what_was_ingested(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing)
    service.ingest("gpu-c", [11, 12], engine.id)
    engine.tensors.rows = {1: [4, 11, 12, 13]}
    (result,) = engine.harvest(pb.HarvestRow(document_id="gpu-c", row_index=1, length=4, prompt_length=1))
    assert (result.kept_tokens, result.total_tokens, result.committed) == (1, 3, True)


ROW: dict[str, Any] = {"document_id": "d", "row_index": 1, "length": 3, "prompt_length": 1}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"row_index": 6}, "rows[0].row_index must be in [0, 6)"),
        ({"row_index": -1}, "rows[0].row_index must be"),
        ({"row_index": None}, "rows[0].row_index must be"),
        ({"length": 0}, "rows[0].length is 0; it must be in [1, 256]"),
        ({"length": 257}, "rows[0].length is 257"),
        ({"prompt_length": 4}, "rows[0].prompt_length is 4; it must be in [0, 3]"),
        ({"tokens": [1]}, "rows[0].tokens"),
        ({"offset": 1}, "rows[0].tokens"),
        ({"document_id": ""}, "rows[0].document_id"),
    ],
)
def test_harvest_refuses_before_it_waits(service: RunningService, sharing: FakeSharing, changed: dict[str, Any], named: str) -> None:
    engine = _attach(service, sharing)
    code, message = error_of(lambda: engine.harvest(pb.HarvestRow(**(ROW | changed))))
    assert (code, named in message) == ("INVALID_ARGUMENT", True)
    assert engine.tensors.reached == []


def test_harvest_takes_nothing_of_a_batch_with_a_wrong_token(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing)
    engine.tensors.rows = {1: [1, 2, 3], 2: [1, 1000, 3]}
    good, bad = pb.HarvestRow(**(ROW | {"document_id": "good"})), pb.HarvestRow(**(ROW | {"row_index": 2, "document_id": "bad"}))
    code, message = error_of(lambda: engine.harvest(good, bad))
    assert (code, message) == ("INVALID_ARGUMENT", "rows[1].tokens[1] is 1000; it must be in [0, 1000), the vocabulary")
    assert engine.harvest(good)[0].kept_tokens == 2


def test_harvest_of_a_stream_that_does_not_come_takes_nothing(service: RunningService, sharing: FakeSharing) -> None:
    engine = _attach(service, sharing)
    engine.tensors.rows, engine.tensors.last = {1: [1, 2, 3]}, 8
    code, message = error_of(lambda: engine.harvest(pb.HarvestRow(**(ROW | {"document_id": "late"})), sequence=9))
    assert (code, "sequence" in message) == ("FAILED_PRECONDITION", True)
    assert engine.harvest(pb.HarvestRow(**(ROW | {"document_id": "late"})), sequence=8)[0].kept_tokens == 2


def test_others_may_not_harvest_by_sequence(service: RunningService) -> None:
    attached = service.attach("inline-harvest").attachment_id
    request = pb.HarvestRequest(attachment_id=attached, rows=[pb.HarvestRow(document_id="x", tokens=[1])], sequence=3)
    assert error_of(lambda: service.drafter.Harvest(request)) == ("INVALID_ARGUMENT", "sequence is for HANDLE on a GPU")


def test_what_became_of_batches_is_counted(service: RunningService, sharing: FakeSharing) -> None:
    assert service.metric('draftd_handle_batches_total{outcome="launched"}') == 5
    assert service.metric('draftd_handle_batches_total{outcome="failed"}') == 1
