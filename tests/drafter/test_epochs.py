"""Reclamation by epochs, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from draftd.drafter import epochs as module
from draftd.drafter.epochs import Epochs
from draftd.drafter.layout import CONTROL_EPOCH, CONTROL_HEARTBEAT_NS, CONTROL_WORDS, ROWS_HEADER_WORDS, ROWS_PIN


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def _epochs(readers: int = 1) -> tuple[Epochs, list[NDArray[np.int64]]]:
    epochs = Epochs(np.zeros(CONTROL_WORDS, np.int64))
    headers = [np.zeros(ROWS_HEADER_WORDS, np.int64) for _ in range(readers)]
    for i, header in enumerate(headers):
        epochs.add_reader(str(i), header)
    return epochs, headers


def test_readers_that_do_not_draft_are_not_waited_for(clock: Clock) -> None:
    epochs, _ = _epochs(3)
    epochs.wait_for_readers(epochs.advance())
    assert clock.now == 100.0
    assert epochs.passed_over == 0


def test_reader_of_the_newest_epoch_is_not_waited_for(clock: Clock) -> None:
    epochs, (header,) = _epochs()
    epoch = epochs.advance()
    header[ROWS_PIN] = epoch
    epochs.wait_for_readers(epoch)
    assert clock.now == 100.0


def test_reader_that_moves_is_waited_for(clock: Clock) -> None:
    epochs, (header,) = _epochs()
    header[ROWS_PIN] = epochs.advance()
    epoch = epochs.advance()
    sleeps = []

    def move() -> None:
        sleeps.append(clock.now)
        if len(sleeps) == 5:
            header[ROWS_PIN] = 0

    clock.on_sleep = move
    epochs.wait_for_readers(epoch)
    assert len(sleeps) == 5
    assert epochs.passed_over == 0


def test_stuck_reader_costs_one_grace_and_then_nothing(clock: Clock) -> None:
    epochs, (header,) = _epochs()
    header[ROWS_PIN] = epochs.advance()
    epochs.wait_for_readers(epochs.advance())
    assert clock.now == pytest.approx(100.0 + module._GRACE_S, abs=2 * module._POLL_S)
    assert epochs.passed_over == 1
    after = clock.now
    for _ in range(10):
        epochs.wait_for_readers(epochs.advance())
    assert clock.now == after
    assert epochs.passed_over == 1


def test_several_stuck_readers_share_the_grace(clock: Clock) -> None:
    epochs, headers = _epochs(4)
    for header in headers:
        header[ROWS_PIN] = 1
    epochs.advance()
    epochs.wait_for_readers(epochs.advance())
    assert clock.now == pytest.approx(100.0 + module._GRACE_S, abs=5 * module._POLL_S)
    assert epochs.passed_over == 4


def test_reader_that_moves_on_is_waited_for_again(clock: Clock) -> None:
    epochs, (header,) = _epochs()
    header[ROWS_PIN] = epochs.advance()
    epochs.wait_for_readers(epochs.advance())
    header[ROWS_PIN] = int(epochs.control[CONTROL_EPOCH])
    before = clock.now
    epochs.wait_for_readers(epochs.advance())
    assert clock.now > before
    assert epochs.passed_over == 2


def test_stuck_reader_does_not_hide_one_that_moves(clock: Clock) -> None:
    epochs, (stuck, moving) = _epochs(2)
    stuck[ROWS_PIN] = moving[ROWS_PIN] = epochs.advance()
    moving[ROWS_PIN] = 0
    epochs.wait_for_readers(epochs.advance())
    moving[ROWS_PIN] = int(epochs.control[CONTROL_EPOCH])
    epoch = epochs.advance()
    clock.on_sleep = lambda: moving.__setitem__(ROWS_PIN, epoch)
    epochs.wait_for_readers(epoch)
    assert moving[ROWS_PIN] == epoch, "it returned before the moving reader had passed"
    assert epochs.passed_over == 1


def test_forgotten_reader_is_not_waited_for(clock: Clock) -> None:
    epochs, (header,) = _epochs()
    header[ROWS_PIN] = epochs.advance()
    epochs.remove_reader("0")
    epochs.remove_reader("never added")
    epochs.wait_for_readers(epochs.advance())
    assert clock.now == 100.0
    assert epochs.passed_over == 0


def test_epochs_and_heartbeat_are_in_the_control_block(clock: Clock) -> None:
    epochs, _ = _epochs()
    assert [epochs.advance() for _ in range(3)] == [1, 2, 3]
    assert epochs.control[CONTROL_EPOCH] == 3
    epochs.beat()
    assert epochs.control[CONTROL_HEARTBEAT_NS] == clock.monotonic_ns()
