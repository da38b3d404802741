"""The client of HANDLE on a GPU against a real service, with a stand-in for the GPU: whatever the service does, the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftd.client import device_handle  # noqa: E402
from draftd.client.device_handle import DeviceHandle, FinishedRow  # noqa: E402
from draftd.drafter import cuda_memory  # noqa: E402
from draftd.drafter.errors import InvalidArgument  # noqa: E402
from draftd.drafter.stream_words import DONE  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2 as pb  # noqa: E402
from tests.client.fake_gpu import UUID, FakeDriver, FakeSharing, FakeStream, FakeTensors, buffer  # noqa: E402
from tests.server.harness import VOCAB, RunningService, wait_until  # noqa: E402


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    running = RunningService(http="off")
    running.seed()
    yield running
    running.close()


class Engine:
    """An engine with 6 rows, at most 4 a batch."""

    def __init__(self, service: RunningService, sharing: FakeSharing, driver: FakeDriver, timeout_ms: float = 10_000) -> None:
        self.service, self.driver, self._sharing = service, driver, sharing
        self.tokens, self.lengths = buffer(6, 32)
        self.handle = DeviceHandle(
            f"unix:{service.config.socket_path()}",
            engine="fake",
            vocab_size=VOCAB,
            tokens=self.tokens,
            lengths=self.lengths,
            k=3,
            max_batch=4,
            timeout_ms=timeout_ms,
        )
        wait_until(lambda: self.handle.attached)

    @property
    def shared(self) -> FakeTensors:
        return self._sharing.opened[-1]

    def draft(self, *rows: int) -> list[int]:
        """First tokens of the drafts."""
        drafts = self.handle.propose(torch.tensor(rows))
        assert drafts.tokens[:, 1:].eq(-1).all()
        return [int(token) for token in drafts.tokens[:, 0]]

    def lose_the_lease(self) -> None:
        """Ends the attachment at the service."""
        attachments = self.service.service.attachments

        def end() -> None:
            for attachment in attachments:
                attachment.deadline = 0.0

        self.service.on_loop(end)
        before = len(self._sharing.opened)
        wait_until(lambda: len(self._sharing.opened) > before and self.handle.attached)


@pytest.fixture
def engines(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    driver, sharing = FakeDriver(), FakeSharing()
    monkeypatch.setattr(device_handle, "_check_tensors", lambda tokens, lengths: None)
    monkeypatch.setattr(cuda_memory, "call", driver.call)
    monkeypatch.setattr(cuda_memory, "device_uuid", lambda device: UUID)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
    service.service.attachments.sharing = cast(Any, sharing)
    made: list[Engine] = []

    def make(timeout_ms: float = 10_000) -> Engine:
        made.append(Engine(service, sharing, driver, timeout_ms))
        return made[-1]

    yield make
    for engine in made:
        engine.handle.close()
    wait_until(lambda: all(tensors.closed for tensors in sharing.opened))
    assert driver.registered == []
    service.service.attachments.sharing = None
    sharing.close()


def test_drafts_for_the_rows_asked_for(engines: Any) -> None:
    engine = engines()
    assert engine.draft(5, 0, 2) == [54, 4, 24]
    assert engine.shared.row_indices.tolist() == [5, 0, 2, -1]
    engine.lengths[2] = 2
    assert engine.draft(2) == [22]
    assert engine.draft(1, 17, 3, 2) == [14, -1, 34, 22]
    drafts = engine.handle.propose(torch.tensor([4]))
    assert [column.tolist() for column in drafts[1:]] == [[[0.5] * 3], [1], [2], [3], [4]]
    assert engine.handle.given_up == 0


def test_too_many_rows_are_a_mistake_of_the_engine(engines: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_batch is 4"):
        engines().draft(0, 1, 2, 3, 4)


def test_refusal_ends_the_wait_at_once_and_is_counted(engines: Any) -> None:
    engine = engines()
    engine.shared.mode = "refuses"
    assert engine.draft(1) == [-1]
    assert engine.driver.waited_s < 5
    engine.shared.mode = "drafts"
    assert engine.draft(1) == [14]
    assert engine.handle.given_up == 0
    assert engine.handle.stats.fail_opens.sum() == 1


def test_silence_ends_the_wait_in_time_and_what_comes_late_does_not_count(engines: Any) -> None:
    engine = engines(timeout_ms=20)
    assert engine.draft(1) == [14]
    engine.shared.mode = "is silent"
    assert engine.draft(2) == [-1]
    assert engine.handle.given_up == 1
    engine.shared.draft(1)
    engine.shared.stamp[0] = 2
    engine.shared.words.write(DONE, 2)
    assert engine.draft(3) == [-1]
    assert engine.handle.given_up == 2
    engine.shared.mode = "drafts"
    assert engine.draft(3) == [34]


def test_new_attachment_after_a_lost_lease_has_words_of_its_own(engines: Any) -> None:
    engine = engines(timeout_ms=50)
    assert engine.draft(1) == [14]
    first = engine.shared
    engine.lose_the_lease()
    assert engine.draft(3) == [34]
    assert engine.shared is not first
    assert len(engine.driver.registered) == 1
    assert engine.handle.given_up == 0


def test_without_a_service_there_are_no_drafts_and_no_wait(service: RunningService, engines: Any) -> None:
    engine = engines()
    engine.handle._session.alive = False
    assert engine.draft(1, 2) == [-1, -1]
    assert engine.handle.harvest([FinishedRow(1, "nobody", 4)]) is None
    assert engine.driver.waited_s == 0
    assert engine.handle.stats.fail_opens.sum() == 2


def test_harvest_commits_rows_and_nobody_waits(service: RunningService, engines: Any) -> None:
    engine = engines(timeout_ms=20)
    answer = engine.handle.harvest([FinishedRow(4, "fake-a", 4, 1), FinishedRow(5, "fake-b", 3)], wait_visible=True)
    assert [(r.kept_tokens, r.committed) for r in answer.result(20).results] == [(3, True), (3, True)]
    exported = {d.document_id: d.packed_tokens for m in service.corpus.Export(pb.ExportRequest()) for d in m.documents}
    assert np.frombuffer(exported["fake-a"], "<i4").tolist() == [41, 42, 43]
    assert engine.handle.given_up == 0
    assert engine.draft(1) == [14]


def test_sequence_numbers_count_on_over_the_end(engines: Any) -> None:
    engine = engines(timeout_ms=1000)
    engine.draft(0)
    attachment = engine.handle._attachment
    for word in (0, DONE):
        engine.shared.words.write(word, 2**32 - 3)
    attachment.sequence = 2**32 - 3
    assert [engine.draft(i % 6) for i in range(6)] == [[10 * (i % 6) + 4] for i in range(6)]
    assert attachment.sequence == 3
    assert engine.handle.given_up == 0
