"""Requests made by hypothesis from the descriptors, and each field beyond its limit: clear errors, bounded, and nothing internal."""

import random
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from bench.hostile_calls import HostileCalls, methods, path
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.fuzz.conftest import fuzz_settings
from tests.server.harness import REFRAIN, VOCAB, RunningService, pack

METHODS = methods(pb)
INTERNAL = re.compile(r"Traceback|\.py\b|/dev/shm/\S*(index|rows|control)|0x[0-9a-f]{6,}|object at|incident")
HUGE = 100_000
CLEAR = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
}


def _send(service: RunningService, method: MethodDescriptor, messages: list[bytes]) -> tuple[str, str]:
    """Code and message of one call."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    multicallable: Any = getattr(service.channel, kind)(path(method))
    try:
        answer = multicallable(iter(messages) if method.client_streaming else messages[0], timeout=30)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def _check(service: RunningService, code: str, message: str) -> None:
    assert code in CLEAR, f"{code}: {message}"
    assert len(message) <= 1000
    assert not INTERNAL.search(message), message
    sentinel = pb.Row(tokens=REFRAIN[:5], namespace="sentinel")
    assert list(service.propose([sentinel], k=8).drafts[0].tokens) == REFRAIN[5:13]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@fuzz_settings
@given(data=st.binary(max_size=300))
def test_any_bytes(service: RunningService, method: MethodDescriptor, data: bytes) -> None:
    _check(service, *_send(service, method, [data]))


@fuzz_settings
@given(source=st.randoms(use_true_random=False), method=st.sampled_from(METHODS), broken=st.booleans())
def test_any_message(service: RunningService, source: random.Random, method: MethodDescriptor, broken: bool) -> None:
    calls = HostileCalls(0, handles=[str(service.shm_root)])
    calls._random = source
    calls._malice = source.choice((0.0, 0.1, 0.5))
    data = calls.message(method.input_type).SerializeToString()
    _check(service, *_send(service, method, [calls.broken(data) if broken else data]))


def _limited(descriptor: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all fields of a request that have a length: strings, bytes, and whatever is repeated."""
    for field in descriptor.fields:
        where = (*prefix, field.name)
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield where
        if field.message_type is not None:
            yield from _limited(field.message_type, where)


FIELDS = [(method, where) for method in METHODS for where in _limited(method.input_type)]


def _valid(name: str, service: RunningService) -> Any:
    """A request that is answered with OK, or refused for nothing but what a test puts into it."""
    attached = service.attach(f"limits-{random.random()}", max_rows=8).attachment_id if name in ("Detach", "Heartbeat", "Harvest") else ""
    packed = pack([1, 2, 3])
    files: dict[str, Any] = {
        name: pb.Tensor(handle="x", shape=[1])
        for name, field in pb.EngineTensors.DESCRIPTOR.fields_by_name.items()
        if field.message_type is pb.Tensor.DESCRIPTOR
    }
    tensors = pb.EngineTensors(**files)
    attach = pb.AttachRequest(
        engine=f"e-{random.random()}", vocab_size=VOCAB, k=4, max_rows=4, max_length=64, tensors=tensors, transport=pb.TRANSPORT_HANDLE
    )
    rows = [pb.Row(packed_tokens=packed)]
    requests: dict[str, Any] = {
        "Attach": attach,
        "Detach": pb.DetachRequest(attachment_id=attached),
        "Heartbeat": pb.HeartbeatRequest(attachment_id=attached),
        "Propose": pb.ProposeRequest(rows=rows),
        "ProposeStream": pb.ProposeStreamRequest(request=pb.ProposeRequest(rows=rows)),
        "Ingest": pb.IngestRequest(documents=[pb.IngestDocument(document_id="d", packed_tokens=packed)]),
        "Harvest": pb.HarvestRequest(attachment_id=attached, rows=[pb.HarvestRow(document_id="d", packed_tokens=packed)]),
        "GetNamespace": pb.GetNamespaceRequest(),
        "DropNamespace": pb.DropNamespaceRequest(namespace="none"),
        "AdvanceGeneration": pb.AdvanceGenerationRequest(keep_generations=100),
        "Explain": pb.ExplainRequest(packed_tokens=packed),
        "Export": pb.ExportRequest(),
        "Import": pb.ImportRequest(vocab_size=VOCAB, documents=[pb.StoredDocument(document_id="d", packed_tokens=packed)]),
    }
    return requests[name]


def _overfill(message: Any, where: tuple[str, ...]) -> None:
    for name in where[:-1]:
        inner = getattr(message, name)
        message = inner[0] if message.DESCRIPTOR.fields_by_name[name].is_repeated else inner
    name = where[-1]
    field = message.DESCRIPTOR.fields_by_name[name]
    if name == "tokens":
        message.ClearField("packed_tokens")
    if field.message_type is not None:
        # Small ones, so that it is their number that is too large and not the message.
        getattr(message, name).extend([GetMessageClass(field.message_type)()] * HUGE)
    elif field.is_repeated:
        getattr(message, name).extend(["x" if field.type == FieldDescriptor.TYPE_STRING else 1] * HUGE)
    else:
        setattr(message, name, "x" * HUGE if field.type == FieldDescriptor.TYPE_STRING else bytes(4 * HUGE))


@pytest.mark.parametrize(("method", "where"), FIELDS, ids=lambda v: v.name if isinstance(v, MethodDescriptor) else ".".join(v))
def test_every_field_with_a_length_has_a_limit(service: RunningService, method: MethodDescriptor, where: tuple[str, ...]) -> None:
    service.seed()
    message = _valid(method.name, service)
    attached = getattr(message, "attachment_id", "")
    _overfill(message, where)
    if method.name == "ProposeStream":
        answer = next(service.drafter.ProposeStream(iter([message])))
        code, said = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND"}.get(answer.code, str(answer.code)), answer.message
    else:
        code, said = _send(service, method, [message.SerializeToString()])
    assert code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "NOT_FOUND", "FAILED_PRECONDITION"), f"{code}: {said}"
    if attached:
        service.drafter.Detach(pb.DetachRequest(attachment_id=attached))
    _check(service, code, said)


def test_message_that_cannot_be_parsed_is_its_senders_fault(service: RunningService, capfd: pytest.CaptureFixture[str]) -> None:
    channel: Any = service.channel
    for method in METHODS:
        code, message = _send(service, method, [b"\xff\xff\xff"])
        assert (code, message) == ("INVALID_ARGUMENT", "the message cannot be parsed: it is not one of this method's requests")
    for standard in ("grpc.health.v1.Health/Check", "grpc.channelz.v1.Channelz/GetServers"):
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            channel.unary_unary(f"/{standard}")(b"\xff\xff\xff")
    for standard in ("grpc.health.v1.Health/Watch", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            list(channel.stream_stream(f"/{standard}")(iter([b"\xff\xff\xff"])))
    captured = capfd.readouterr()
    assert "rpc_failed" not in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err
