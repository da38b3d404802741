"""Every kind of bad input of issue 2 costs its sender a clear error, and nobody else anything."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import REFRAIN, VOCAB, RunningService, error_of, pack

_numbers = itertools.count()


class Bystander:
    """An engine in the middle of a request, which must not notice what others do wrong."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.id = service.attach(f"bystander-{next(_numbers)}").attachment_id
        self.document = f"{self.id}-row"
        self.length = 0

    def step(self) -> list[int]:
        """Commits one more token of the refrain and answers the draft."""
        new = REFRAIN[self.length : self.length + 1] if self.length else REFRAIN[:5]
        row = pb.Row(document_id=self.document, offset=self.length, tokens=new, prompt_length=5)
        self.length += len(new)
        return list(self.service.propose([row], self.id).drafts[0].tokens)


@pytest.fixture(autouse=True)
def bystander(service: RunningService) -> Iterator[None]:
    """Before and after each test, another engine gets exactly its drafts."""
    other = Bystander(service)
    assert other.step() == REFRAIN[5:13]
    yield
    assert other.step() == REFRAIN[6:14]
    assert service.harvest(other.id, other.document, REFRAIN[6:9], 6).total_tokens == 4
    service.drafter.Detach(pb.DetachRequest(attachment_id=other.id))


@pytest.fixture
def engine(service: RunningService) -> Iterator[str]:
    """An inline attachment: k 8, 4 rows of at most 256 tokens."""
    attachment_id = service.attach(f"engine-{next(_numbers)}").attachment_id
    yield attachment_id
    service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1])
def test_token_outside_the_vocabulary(service: RunningService, engine: str, bad: int, packed: bool) -> None:
    tokens = [1, 2, bad, 3]
    row = pb.Row(packed_tokens=pack(tokens)) if packed else pb.Row(tokens=tokens)
    for attachment_id in ("", engine):
        code, message = error_of(lambda a=attachment_id: service.propose([pb.Row(tokens=[1]), row], a))
        assert code == "INVALID_ARGUMENT"
        assert f"rows[1].tokens[2] is {bad}" in message
        assert f"[0, {VOCAB})" in message
    code, message = error_of(lambda: service.ingest("bad-token", tokens))
    assert (code, f"documents[0].tokens[2] is {bad}" in message) == ("INVALID_ARGUMENT", True)
    code, message = error_of(lambda: service.corpus.Explain(pb.ExplainRequest(tokens=tokens)))
    assert (code, f"tokens[2] is {bad}" in message) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("document_id", ["", "labelled"])
def test_label_of_a_group_that_is_too_long(service: RunningService, engine: str, document_id: str, attached: bool) -> None:
    row = pb.Row(document_id=document_id if attached else "", tokens=[1, 2], prompt_length=1 if attached else 0, group="x" * 129)
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1]), row], engine if attached else ""))
    assert (code, "rows[1].group has 129 bytes; it must have 1 to 128" in message) == ("INVALID_ARGUMENT", True)


def test_bad_token_in_a_row_keeps_nothing_of_its_batch(service: RunningService, engine: str) -> None:
    good = pb.Row(document_id="good", tokens=[1, 2, 3], prompt_length=1)
    bad = pb.Row(document_id="bad", tokens=[1, VOCAB], prompt_length=1)
    assert error_of(lambda: service.propose([good, bad], engine))[0] == "INVALID_ARGUMENT"
    code, message = error_of(lambda: service.propose([pb.Row(document_id="good", offset=3, tokens=[4])], engine))
    assert (code, "expected 0" in message) == ("FAILED_PRECONDITION", True)


def test_packed_tokens_that_are_no_whole_number_of_tokens(service: RunningService) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(packed_tokens=b"\0\0\0")]))
    assert (code, "rows[0].packed_tokens has 3 bytes" in message, "4" in message) == ("INVALID_ARGUMENT", True, True)


def test_empty_batch(service: RunningService, engine: str) -> None:
    for call in (lambda: service.propose([]), lambda: service.propose([], engine)):
        code, message = error_of(call)
        assert (code, message) == ("INVALID_ARGUMENT", "rows: 0 rows; a batch has 1 to 16")
    code, message = error_of(lambda: service.drafter.Ingest(pb.IngestRequest()))
    assert (code, "documents: 0 documents" in message) == ("INVALID_ARGUMENT", True)
    code, message = error_of(lambda: service.drafter.Harvest(pb.HarvestRequest(attachment_id=engine)))
    assert (code, "rows: 0 rows" in message) == ("INVALID_ARGUMENT", True)


def test_batch_above_the_limit(service: RunningService, engine: str) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1])] * 17))
    assert (code, message) == ("INVALID_ARGUMENT", "rows: 17 rows; a batch has 1 to 16")
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1])] * 5, engine))
    assert (code, message) == ("INVALID_ARGUMENT", "rows: 5 rows; the attachment's max_rows is 4")


def test_row_without_tokens(service: RunningService, engine: str) -> None:
    for row in (pb.Row(), pb.Row(document_id="empty")):
        code, message = error_of(lambda row=row: service.propose([row], engine))
        assert (code, "rows[0]" in message, "1" in message) == ("INVALID_ARGUMENT", True, True)


@pytest.mark.parametrize(("field", "limit"), [("k", 32), ("max_rows", 64), ("max_length", 4096)])
@pytest.mark.parametrize("above", [False, True])
def test_attach_with_zero_or_too_many(service: RunningService, field: str, limit: int, above: bool) -> None:
    value = limit + 1 if above else 0
    code, message = error_of(lambda: service.attach("wrong-sizes", **{field: value}))
    assert code == "INVALID_ARGUMENT"
    assert message == f"{field} is {value}; it must be in [1, {limit}], the service's limit"


@pytest.mark.parametrize("k", [0, -1, 9])
def test_k_of_zero_or_above_the_attachments(service: RunningService, engine: str, k: int) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1])], engine, k=k))
    assert (code, message) == ("INVALID_ARGUMENT", f"parameters.k is {k}; it must be in [1, 8], the attachment's k")


@pytest.mark.parametrize("k", [0, 33])
def test_k_of_zero_or_above_the_services(service: RunningService, k: int) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1])], k=k))
    assert (code, message) == ("INVALID_ARGUMENT", f"parameters.k is {k}; it must be in [1, 32], the service's limit")


@pytest.mark.parametrize(
    ("name", "value"), [("max_depth", 1), ("max_depth", 65), ("spec_factor", -1.0), ("spec_offset", 2000.0), ("min_token_prob", 1.5)]
)
def test_parameter_outside_its_range(service: RunningService, name: str, value: Any) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1])], "", **{name: value}))
    assert (code, f"parameters.{name} is {value}" in message, "must be in [" in message) == ("INVALID_ARGUMENT", True, True)


def test_parameter_that_is_not_a_number(service: RunningService) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1])], min_token_prob=float("nan")))
    assert (code, "parameters.min_token_prob" in message) == ("INVALID_ARGUMENT", True)


def test_row_longer_than_the_maximum(service: RunningService, engine: str) -> None:
    long = [1] * 257
    for row in (pb.Row(tokens=long), pb.Row(tokens=long, document_id="long")):
        code, message = error_of(lambda row=row: service.propose([row], engine))
        assert (code, "rows[0] has 257 tokens" in message, "256" in message) == ("INVALID_ARGUMENT", True, True)
    code, message = error_of(lambda: service.propose([pb.Row(packed_tokens=pack([1] * 4097))]))
    assert (code, "rows[0] has 4097 tokens" in message, "max_length=4096" in message) == ("INVALID_ARGUMENT", True, True)


def test_row_that_grows_beyond_the_maximum(service: RunningService, engine: str) -> None:
    service.propose([pb.Row(tokens=[1] * 250, document_id="growing", prompt_length=250)], engine)
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1] * 7, document_id="growing", offset=250)], engine))
    assert (code, "257 tokens" in message, "max_length is 256" in message) == ("INVALID_ARGUMENT", True, True)
    service.propose([pb.Row(tokens=[1] * 6, document_id="growing", offset=250)], engine)


@pytest.mark.parametrize("offset", [-1, 4090, 2**31 - 1])
def test_document_longer_than_the_maximum(service: RunningService, offset: int) -> None:
    code, message = error_of(lambda: service.ingest("too-long", [1] * 10, offset=offset))
    assert (code, f"documents[0].offset is {offset}" in message, "max_length=4096" in message) == ("INVALID_ARGUMENT", True, True)


def test_prompt_length_beyond_the_row(service: RunningService, engine: str) -> None:
    for prompt_length in (-1, 4):
        row = pb.Row(document_id="prompt", tokens=[1, 2, 3], prompt_length=prompt_length)
        code, message = error_of(lambda row=row: service.propose([row], engine))
        assert (code, f"rows[0].prompt_length is {prompt_length}" in message, "[0, 3]" in message) == ("INVALID_ARGUMENT", True, True)


def test_unknown_attachment(service: RunningService) -> None:
    for call in (
        lambda: service.propose([pb.Row(tokens=[1])], "no-such"),
        lambda: service.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id="no-such")),
        lambda: service.drafter.Detach(pb.DetachRequest()),
        lambda: service.harvest("no-such", "d", [1], 0),
        lambda: service.ingest("d", [1], "no-such"),
    ):
        code, message = error_of(call)
        assert (code, "attachment_id names no live attachment" in message) == ("NOT_FOUND", True)


def test_row_state_without_an_attachment(service: RunningService) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(tokens=[1], document_id="d")]))
    assert (code, message) == ("INVALID_ARGUMENT", "rows[0].document_id needs an attachment")


def test_namespace_that_does_not_exist(service: RunningService, engine: str) -> None:
    for call in (
        lambda: service.propose([pb.Row(tokens=[1], namespace="nowhere")]),
        lambda: service.propose([pb.Row(tokens=[1], namespace="nowhere")], engine),
        lambda: service.ingest("d", [1], namespace="nowhere"),
        lambda: service.namespace("nowhere"),
        lambda: service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="nowhere")),
        lambda: service.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="nowhere", keep_generations=1)),
        lambda: service.corpus.Explain(pb.ExplainRequest(namespace="nowhere", tokens=[1])),
        lambda: list(service.corpus.Export(pb.ExportRequest(namespace="nowhere"))),
    ):
        code, message = error_of(call)
        assert (code, "namespace 'nowhere' does not exist" in message) == ("NOT_FOUND", True)


def test_namespace_that_is_not_the_attachments(service: RunningService, engine: str) -> None:
    service.ingest("d", [1], namespace="somebody-elses", vocab_size=VOCAB)
    for call in (
        lambda: service.propose([pb.Row(tokens=[1], namespace="somebody-elses")], engine),
        lambda: service.ingest("d", [1], engine, namespace="somebody-elses"),
    ):
        code, message = error_of(call)
        assert (code, "is not one of the attachment's namespaces" in message) == ("FAILED_PRECONDITION", True)


@pytest.mark.parametrize("name", ["a b", "ü", "x" * 129, "a\n"])
def test_name_that_is_not_allowed(service: RunningService, name: str) -> None:
    code, message = error_of(lambda: service.attach(name))
    assert (code, message.startswith("engine must have 1 to 128 characters")) == ("INVALID_ARGUMENT", True)
    code, message = error_of(lambda: service.attach("fine", namespace=name))
    assert (code, message.startswith("namespace must have 1 to 128 characters")) == ("INVALID_ARGUMENT", True)


def test_message_above_the_size_limit(service: RunningService) -> None:
    code, message = error_of(lambda: service.propose([pb.Row(packed_tokens=bytes(2**17))]))
    assert (code, str(2**17) in message) == ("RESOURCE_EXHAUSTED", True)


def test_vocabulary_that_is_not_the_namespaces(service: RunningService) -> None:
    code, message = error_of(lambda: service.attach("other-vocabulary", vocab_size=VOCAB + 1))
    assert (code, f"vocab_size is {VOCAB + 1}" in message, str(VOCAB) in message) == ("FAILED_PRECONDITION", True, True)
    code, message = error_of(lambda: service.ingest("d", [1], vocab_size=VOCAB + 1))
    assert (code, f"vocab_size is {VOCAB + 1}" in message) == ("FAILED_PRECONDITION", True)


@pytest.mark.parametrize("vocab_size", [0, -1, 2**21])
def test_vocabulary_size_outside_its_range(service: RunningService, vocab_size: int) -> None:
    code, message = error_of(lambda: service.attach("no-vocabulary", vocab_size=vocab_size, namespace="new"))
    assert (code, message) == ("INVALID_ARGUMENT", f"vocab_size is {vocab_size}; it must be in [1, {2**21 - 1}]")


def test_second_attach_under_the_same_name(service: RunningService) -> None:
    first = service.attach("twin").attachment_id
    code, message = error_of(lambda: service.attach("twin"))
    assert (code, "engine 'twin' is attached" in message, "10000 ms" in message) == ("ALREADY_EXISTS", True, True)
    assert service.propose([pb.Row(tokens=[1])], first).drafts
    service.drafter.Detach(pb.DetachRequest(attachment_id=first))
    again = service.attach("twin").attachment_id
    assert again != first
    service.drafter.Detach(pb.DetachRequest(attachment_id=again))


def test_finish_twice(service: RunningService, engine: str) -> None:
    service.propose([pb.Row(document_id="finished", tokens=[1, 2, 3, 4], prompt_length=1)], engine)
    first = service.harvest(engine, "finished", [5, 6], 4)
    assert (first.kept_tokens, first.total_tokens, first.committed) == (2, 5, True)
    before = service.namespace().documents
    again = service.harvest(engine, "finished", [5, 6], 4)
    assert (again.kept_tokens, again.total_tokens, again.committed) == (0, 5, True)
    assert service.namespace().documents == before


def test_finish_a_row_that_never_was(service: RunningService, engine: str) -> None:
    code, message = error_of(lambda: service.harvest(engine, "never", [1], 0))
    assert (code, "rows[0].document_id" in message) == ("NOT_FOUND", True)


def test_append_after_finish(service: RunningService, engine: str) -> None:
    service.ingest("closed", [1, 2, 3], complete=True)
    code, message = error_of(lambda: service.ingest("closed", [4], offset=3))
    assert (code, "'closed' is committed with 3 tokens" in message) == ("FAILED_PRECONDITION", True)
    assert service.ingest("closed", [1, 2, 3], complete=True).kept_tokens == 0

    service.propose([pb.Row(document_id="closed-row", tokens=[1, 2, 3], prompt_length=1)], engine)
    assert service.harvest(engine, "closed-row", [], 3).committed
    row = pb.Row(document_id="closed-row", tokens=[1, 2, 3, 4], prompt_length=1)
    code, message = error_of(lambda: service.propose([row], engine))
    assert (code, "is committed with 2 tokens" in message) == ("FAILED_PRECONDITION", True)


def test_gap_before_a_document(service: RunningService) -> None:
    code, message = error_of(lambda: service.ingest("gap", [1], offset=5))
    assert (code, "offset is 5" in message) == ("INVALID_ARGUMENT", True)


def test_gap_in_a_row_names_the_offset_expected(service: RunningService, engine: str) -> None:
    service.propose([pb.Row(document_id="gap-row", tokens=[1, 2, 3], prompt_length=1)], engine)
    code, message = error_of(lambda: service.propose([pb.Row(document_id="gap-row", offset=5, tokens=[6])], engine))
    assert (code, "rows[0].offset is 5" in message, "expected 3" in message) == ("FAILED_PRECONDITION", True, True)


def test_tokens_sent_again_that_differ(service: RunningService, engine: str) -> None:
    service.propose([pb.Row(document_id="changed", tokens=[1, 2, 3], prompt_length=1)], engine)
    code, message = error_of(lambda: service.propose([pb.Row(document_id="changed", offset=1, tokens=[2, 9, 4])], engine))
    assert (code, "must be the same" in message) == ("FAILED_PRECONDITION", True)


def test_preempted_request_comes_back(service: RunningService, engine: str) -> None:
    service.propose([pb.Row(document_id="preempted", tokens=REFRAIN[:8], prompt_length=5)], engine)
    # The engine recomputes it from the start: its output so far is sent again, as if it were prompt.
    back = pb.Row(document_id="preempted", tokens=REFRAIN[:9], prompt_length=8)
    assert list(service.propose([back], engine).drafts[0].tokens) == REFRAIN[9:17]
    result = service.harvest(engine, "preempted", REFRAIN[9:11], 9)
    assert (result.total_tokens, result.committed) == (6, True)


def test_same_document_twice_in_a_batch(service: RunningService, engine: str) -> None:
    row = pb.Row(document_id="double", tokens=[1, 2])
    code, message = error_of(lambda: service.propose([row, row], engine))
    assert (code, "rows[1].document_id 'double'" in message) == ("INVALID_ARGUMENT", True)


def test_more_unfinished_rows_than_fit(service: RunningService, engine: str) -> None:
    for i in range(8):
        service.propose([pb.Row(document_id=f"row-{i}", tokens=[1])], engine)
    code, message = error_of(lambda: service.propose([pb.Row(document_id="row-8", tokens=[1])], engine))
    assert (code, "the limit is 8" in message) == ("RESOURCE_EXHAUSTED", True)
    service.harvest(engine, "row-0", [], 1)
    service.propose([pb.Row(document_id="row-8", tokens=[1])], engine)


def _tensors(service: RunningService, name: str, length: int = 256) -> pb.EngineTensors:
    """Tensors of 4 rows and k 8 in one file each."""
    directory = service.shm_root / f"engine-{name}"
    directory.mkdir(exist_ok=True)
    shapes = {
        "tokens": (pb.DATA_TYPE_INT32, [4, length]),
        "lengths": (pb.DATA_TYPE_INT32, [4]),
        "draft_tokens": (pb.DATA_TYPE_INT32, [4, 8]),
        "draft_probabilities": (pb.DATA_TYPE_FLOAT32, [4, 8]),
        "draft_info": (pb.DATA_TYPE_INT32, [4, 4]),
    }
    tensors: dict[str, Any] = {}
    for field, (data_type, shape) in shapes.items():
        path = directory / field
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        path.write_bytes(bytes(size))
        tensors[field] = pb.Tensor(handle=str(path), data_type=data_type, shape=shape)
    return pb.EngineTensors(**tensors)


def _attach_error(service: RunningService, tensors: pb.EngineTensors) -> tuple[str, str]:
    return error_of(lambda: service.attach("tensor-engine", transport=pb.TRANSPORT_HANDLE, tensors=tensors))


def test_tensor_handle_that_is_too_small(service: RunningService) -> None:
    tensors = _tensors(service, "small")
    os.truncate(tensors.tokens.handle, 4 * 4 * 256 - 1)
    code, message = _attach_error(service, tensors)
    assert code == "INVALID_ARGUMENT"
    assert message == "tensors.tokens.handle has 4095 bytes; offset and shape need 4096"


def test_tensor_offset_beyond_its_file(service: RunningService) -> None:
    tensors = _tensors(service, "offset")
    tensors.draft_tokens.offset = 4
    code, message = _attach_error(service, tensors)
    assert (code, message) == ("INVALID_ARGUMENT", "tensors.draft_tokens.handle has 128 bytes; offset and shape need 132")


@pytest.mark.parametrize("shape", [[2**32, 2**31], [2**62, 2], [2**63 - 1, 2**63 - 1], [3037000500, 3037000500]])
def test_shape_whose_product_overflows(service: RunningService, shape: list[int]) -> None:
    tensors = _tensors(service, "overflow")
    del tensors.tokens.shape[:]
    tensors.tokens.shape.extend(shape)
    code, message = _attach_error(service, tensors)
    assert (code, "tensors.tokens.shape" in message, "2^63 - 1" in message) == ("INVALID_ARGUMENT", True, True)


@pytest.mark.parametrize("offset", [-4, 2, 2**63 - 4])
def test_tensor_offset_outside_its_range(service: RunningService, offset: int) -> None:
    tensors = _tensors(service, "range")
    tensors.lengths.offset = offset
    code, message = _attach_error(service, tensors)
    assert (code, "tensors.lengths" in message) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("shape", [[0, 256], [-4, 256], [4], [256, 4], [4, 256, 1], []])
def test_shape_that_is_not_the_attachments(service: RunningService, shape: list[int]) -> None:
    tensors = _tensors(service, "shape")
    del tensors.tokens.shape[:]
    tensors.tokens.shape.extend(shape)
    code, message = _attach_error(service, tensors)
    assert (code, "tensors.tokens.shape" in message) == ("INVALID_ARGUMENT", True)


def test_tensor_of_another_type(service: RunningService) -> None:
    tensors = _tensors(service, "type")
    tensors.draft_probabilities.data_type = pb.DATA_TYPE_INT32
    code, message = _attach_error(service, tensors)
    assert (code, message) == ("INVALID_ARGUMENT", "tensors.draft_probabilities.data_type must be DATA_TYPE_FLOAT32")


def test_tensor_that_is_not_given(service: RunningService) -> None:
    tensors = _tensors(service, "missing")
    tensors.ClearField("draft_info")
    assert _attach_error(service, tensors) == ("INVALID_ARGUMENT", "tensors.draft_info is missing; HANDLE needs it")


def test_handle_that_leads_elsewhere(service: RunningService, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(4096))
    inside = _tensors(service, "elsewhere")
    link = service.shm_root / "engine-elsewhere" / "link"
    link.symlink_to(outside)
    fifo = service.shm_root / "engine-elsewhere" / "fifo"
    os.mkfifo(fifo)
    own = Path(service.service.corpus.control_spec().handle)
    for handle in (str(outside), str(link), str(fifo), f"{service.shm_root}/../..{outside}", str(own), "", "x" * 513, "/dev/shm/a\0b"):
        inside.tokens.handle = handle
        code, message = _attach_error(service, inside)
        assert (code, message.startswith("tensors.tokens.handle must be")) == ("INVALID_ARGUMENT", True)
        assert str(outside) not in message


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file to another user needs root")
def test_handle_of_another_user(service: RunningService) -> None:
    tensors = _tensors(service, "foreign")
    os.chown(tensors.tokens.handle, 12345, 12345)
    code, message = _attach_error(service, tensors)
    assert (code, "of the service's user" in message) == ("INVALID_ARGUMENT", True)


def test_engine_that_truncates_its_tensor(service: RunningService) -> None:
    tensors = _tensors(service, "truncated")
    attachment_id = service.attach("truncating", transport=pb.TRANSPORT_HANDLE, tensors=tensors).attachment_id
    Path(tensors.lengths.handle).write_bytes(pack([200, 0, 0, 0]))
    row = pb.Row(row_index=0)
    service.propose([row], attachment_id)
    os.truncate(tensors.tokens.handle, 100)
    code, message = error_of(lambda: service.propose([row], attachment_id))
    assert (code, "tensors.tokens" in message) == ("FAILED_PRECONDITION", True)
    os.truncate(tensors.tokens.handle, 4096)
    os.truncate(tensors.draft_tokens.handle, 0)
    code, message = error_of(lambda: service.propose([row], attachment_id))
    assert (code, "tensors.draft_tokens" in message) == ("FAILED_PRECONDITION", True)
    assert os.path.getsize(tensors.draft_tokens.handle) == 0
    service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id))


@pytest.mark.parametrize("length", [-1, 257, 2**31 - 1])
def test_length_in_a_tensor_that_is_not_possible(service: RunningService, length: int) -> None:
    tensors = _tensors(service, "length")
    attachment_id = service.attach("wrong-length", transport=pb.TRANSPORT_HANDLE, tensors=tensors).attachment_id
    Path(tensors.lengths.handle).write_bytes(pack([length, 0, 0, 0]))
    code, message = error_of(lambda: service.propose([pb.Row(row_index=0)], attachment_id))
    assert (code, f"tensors.lengths[0] is {length}" in message, "256" in message) == ("FAILED_PRECONDITION", True, True)
    service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id))


@pytest.mark.parametrize("index", [-1, 4])
def test_row_index_outside_its_range(service: RunningService, index: int) -> None:
    attachment_id = service.attach("row-index", transport=pb.TRANSPORT_HANDLE, tensors=_tensors(service, "index")).attachment_id
    code, message = error_of(lambda: service.propose([pb.Row(row_index=index)], attachment_id))
    assert (code, f"rows[0].row_index is {index}" in message, "[0, 4)" in message) == ("INVALID_ARGUMENT", True, True)
    service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id))


def test_invalid_request_on_a_stream_is_answered_and_the_stream_goes_on(service: RunningService) -> None:
    good = pb.ProposeRequest(rows=[pb.Row(tokens=REFRAIN[:5])])
    bad = pb.ProposeRequest(rows=[pb.Row(tokens=[-5])])
    requests = [pb.ProposeStreamRequest(sequence=i, request=bad if i == 1 else good) for i in range(3)]
    answers = list(service.drafter.ProposeStream(iter(requests)))
    assert [answer.sequence for answer in answers] == [0, 1, 2]
    assert answers[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "rows[0].tokens[0] is -5" in answers[1].message
    assert not answers[1].HasField("response")
    for answer in (answers[0], answers[2]):
        assert (answer.code, list(answer.response.drafts[0].tokens)) == (0, REFRAIN[5:13])


def test_defect_of_the_service_is_answered_without_internal_text(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret internals")

    with monkeypatch.context() as patch:
        patch.setattr(service.service.corpus, "namespaces", broken)
        code, message = error_of(lambda: service.corpus.ListNamespaces(pb.ListNamespacesRequest()))
    assert code == "INTERNAL"
    assert "secret" not in message
    incident = message.rpartition(" ")[2]
    output = capfd.readouterr()
    assert incident in output.out + output.err
