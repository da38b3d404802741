"""The gate's words, where the driver is a stand-in; tests/gpu/test_gate.py has streams wait for them."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftd.drafter import cuda_memory
from draftd.drafter.stream_gate import StreamGate
from draftd.drafter.stream_words import DONE


class Driver:
    """Notes what a stream is told to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[int, int, int]] = []
        monkeypatch.setattr(cuda_memory, "call", self.call)

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuStreamWaitValue32":
            self.waits.append(arguments[:3])
        return 4096 if name == "cuMemHostGetDevicePointer" else None


def test_what_is_launched_behind_a_shut_gate_waits_until_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    gate = StreamGate(7)
    for sequence in (1, 2):
        gate.shut()
        gate.shut()
        assert driver.waits == [(7, 4096 + DONE, n) for n in range(1, sequence + 1)], "a second shut adds no wait"
        assert not gate._page.reached(DONE, sequence)
        gate.open()
        assert gate._page.reached(DONE, sequence)
    assert gate.opened_late == 0


def test_gate_opens_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    gate = StreamGate(7)
    gate.shut()
    deadline = time.monotonic() + 60
    while not gate._page.reached(DONE, 1) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gate._page.reached(DONE, 1)
    assert gate.opened_late == 1
