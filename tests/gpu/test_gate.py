"""A stream's gate holds what is launched behind it, and opens by itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftd.drafter.stream_gate import StreamGate  # noqa: E402


def _done(event: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.0005)
    return bool(event.query())


def test_gate_holds_a_stream_until_it_is_opened_or_opens_by_itself() -> None:
    stream = torch.cuda.Stream()
    value = torch.zeros(1, device="cuda")
    with torch.cuda.stream(stream):
        # What loads a kernel for the first time waits for the stream itself.
        value.zero_().add_(1).sub_(1)
    torch.cuda.synchronize()
    gate = StreamGate(stream.cuda_stream)
    held = []
    for opens in (True, True, False):
        gate.shut()
        with torch.cuda.stream(stream):
            value.add_(1)
            event = stream.record_event()
        held.append(not event.query())
        if opens:
            gate.open()
        assert _done(event, 10)
    assert value.item() == 3
    assert held == [True, True, True]
    assert gate.opened_late == 1
