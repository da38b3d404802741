"""Attachments that end: the service restarts, the lease is lost, the engine goes away. What was committed gets there all the same."""

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from draftd.client import Drafter
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

Attach = Callable[..., Drafter]
Eventually = Callable[[Callable[[], bool]], None]
TRANSPORTS = ("mapped", "handle", "inline")
WAIT_S = 60


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_restarted_service_is_told_of_everything(own_service: PrivateService, attach: Attach, transport: str) -> None:
    drafter = attach(transport, endpoint=own_service.endpoint)
    drafter.start(0, [1, 2], "goes on")
    drafter.append(0, [10, 11])
    drafter.propose([0])
    own_service.kill()
    drafter.append(0, [12])
    drafter.start(1, [1], "ends meanwhile")
    drafter.append(1, [20, 21, 22, 23])
    drafter.propose([0, 1])
    drafter.finish(1)
    own_service.spawn()
    own_service.wait_ready()
    assert drafter.wait_visible(WAIT_S)
    drafter.append(0, [13])
    assert drafter.wait_visible(WAIT_S)
    other = attach("inline", endpoint=own_service.endpoint)
    other.start(0, [9, 10, 11])
    other.start(1, [9, 20, 21])
    drafts = other.propose([0, 1])
    assert [drafts.row(0), drafts.row(1)] == [[12, 13], [22, 23]]
    assert drafter.stats.lost_tokens[0] == 0


def test_mapped_drafts_go_on_without_the_service(own_service: PrivateService, attach: Attach) -> None:
    drafter = attach("mapped", endpoint=own_service.endpoint, max_rows=2)
    drafter.start(0, [1])
    drafter.append(0, [10, 11, 12, 13, 14])
    drafter.finish(0)
    assert drafter.wait_visible(WAIT_S)
    own_service.kill()
    # More requests than there are slots: none of them is drained any more.
    for _ in range(10):
        drafter.start(1, [9, 10, 11])
        assert drafter.propose([1]).row(0) == [12, 13, 14]
        drafter.append(1, [500])
        drafter.finish(1)


def end_attachment(service: PrivateService, drafter: Drafter) -> None:
    """Does what the service does to an attachment whose lease has run out."""
    transport = drafter._connection.session.transport
    assert transport is not None
    with grpc.insecure_channel(service.endpoint) as channel:
        stub: draftd_pb2_grpc.DrafterServiceStub = draftd_pb2_grpc.DrafterServiceStub(channel)
        stub.Detach(pb.DetachRequest(attachment_id=transport.link.attachment_id))


def committed_tokens(service: PrivateService, namespace: str) -> set[int]:
    """All tokens of a namespace's committed documents."""
    with grpc.insecure_channel(service.endpoint) as channel:
        stub: draftd_pb2_grpc.CorpusServiceStub = draftd_pb2_grpc.CorpusServiceStub(channel)
        answers = list(stub.Export(pb.ExportRequest(namespace=namespace)))
    return {int(token) for answer in answers for one in answer.documents for token in np.frombuffer(one.packed_tokens, "<i4")}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_attachments_that_end_at_any_moment_cost_no_token(
    attach: Attach, service: PrivateService, namespace: str, eventually: Eventually, transport: str
) -> None:
    drafter = attach(transport, max_rows=4)
    token = iter(range(900))
    for _ in range(3):
        before = drafter._connection.session.transport
        for step in range(40):
            if step == 20:
                end_attachment(service, drafter)
            drafter.start(step % 4, [999])
            drafter.propose([step % 4])
            for _ in range(4):
                drafter.append(step % 4, [next(token)])
        # The session notices with its next heartbeat.
        eventually(lambda before=before: drafter._connection.session.transport is not before)  # type: ignore[misc]
    for row in range(4):
        drafter.finish(row)
    assert drafter.wait_visible(WAIT_S)
    assert committed_tokens(service, namespace) == set(range(480))
    assert drafter.stats.lost_tokens[0] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_attachment_goes_on_in_a_further_document(attach: Attach, service: PrivateService, transport: str) -> None:
    drafter, other = attach(transport), attach("inline")
    drafter.start(0, [1, 2], "long")
    drafter.append(0, [30, 31, 32])
    drafter.propose([0])
    assert drafter.wait_visible(WAIT_S)
    end_attachment(service, drafter)
    drafter.append(0, [33, 34, 35, 36])
    drafter.propose([0])
    assert drafter.wait_visible(WAIT_S)
    drafter.append(0, [37])
    drafter.finish(0)
    assert drafter.wait_visible(WAIT_S)
    other.start(0, [9, 30, 31])
    other.start(1, [9, 33, 34, 35])
    drafts = other.propose([0, 1])
    assert [drafts.row(0)[0], drafts.row(1)] == [32, [36, 37]]
    assert drafter.stats.lost_tokens[0] == 0


def test_an_engine_name_is_free_once_its_engine_has_detached(service: PrivateService, namespace: str, eventually: Eventually) -> None:
    def engine() -> Drafter:
        return Drafter(
            service.endpoint, engine="same-name", vocab_size=1000, max_rows=1, max_length=10, namespace=namespace, transport="inline"
        )

    with engine() as first, engine() as second:
        eventually(lambda: first.attached or second.attached)
        loser = second if first.attached else first
        winner = first if first.attached else second
        assert not loser.attached
        winner.detach()
        assert loser.wait_attached(WAIT_S)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_detach_leaves_nothing_behind(attach: Attach, eventually: Eventually, transport: str) -> None:
    drafter, other = attach(transport), attach("inline")
    drafter.start(0, [1])
    drafter.append(0, [40, 41, 42, 43])
    drafter.detach()
    assert not engine_files()
    other.start(0, [9, 40, 41])
    eventually(lambda: other.propose([0]).row(0) == [42, 43])


def engine_files() -> list[Path]:
    """Directories of this process's engine tensors."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps if "/engines/" in line}
    return [path for path in paths if path.exists()]
