"""The thread that launches drafts, with functions of this process in place of the driver's."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from draftd.drafter.stream_words import DONE, READY, WordPage
from draftd.server.launcher import DEPTH, Launcher, _learn, _nap_us

STREAM, STAMP, DONE_ON_DEVICE = 0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000
_GraphLaunch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
_WriteValue = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)


class Bench:
    """A launcher over a stand-in for the driver, which notes what it is called with and answers `error` to launches."""

    def __init__(self) -> None:
        self.called: list[tuple[int, ...]] = []
        self.error = 0
        self._functions = _GraphLaunch(self._graph_launch), _WriteValue(self._write_value)
        graph_launch, write_value = (int(ctypes.cast(f, ctypes.c_void_p).value or 0) for f in self._functions)
        self.prepared = 0
        self.launcher = Launcher(graph_launch, write_value, self._prepare)
        self.page = WordPage.create()

    def _prepare(self) -> None:
        self.prepared += 1

    def _graph_launch(self, graph: int, stream: int) -> int:
        self.called.append((graph, stream))
        return self.error

    def _write_value(self, stream: int, address: int, value: int, flags: int) -> int:
        self.called.append((stream, address, value, flags))
        if address == DONE_ON_DEVICE:
            self.page.write(DONE, value)
        return 0

    def add(self) -> int:
        return self.launcher.add(self.page, STREAM, STAMP, DONE_ON_DEVICE)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.launcher.close()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def _drafts(graph: int, sequence: int) -> list[tuple[int, ...]]:
    return [(graph, STREAM), (STREAM, STAMP, sequence, 0), (STREAM, DONE_ON_DEVICE, sequence, 0)]


def test_launches_when_the_stream_has_come_and_not_before(bench: Bench) -> None:
    slot = bench.add()
    assert bench.launcher.queue(slot, 1, 11, 60)
    assert bench.launcher.queue(slot, 2, 12, 60)
    time.sleep(0.02)
    assert bench.called == []
    bench.page.write(READY, 1)
    _wait(lambda: bench.launcher.counts(slot).launched == 1)
    assert bench.called == _drafts(11, 1)
    bench.page.write(READY, 2)
    _wait(lambda: bench.launcher.counts(slot).launched == 2)
    assert bench.called == _drafts(11, 1) + _drafts(12, 2)
    assert bench.prepared == 1


def test_engines_do_not_wait_for_one_another(bench: Bench) -> None:
    first = bench.add()
    other = WordPage.create()
    second = bench.launcher.add(other, STREAM + 1, STAMP, 0x77)
    bench.launcher.queue(first, 1, 11, 60)
    bench.launcher.queue(second, 1, 21, 60)
    other.write(READY, 1)
    _wait(lambda: bench.launcher.counts(second).launched == 1)
    assert bench.called[0] == (21, STREAM + 1)
    assert bench.launcher.counts(first).launched == 0


def test_engine_that_never_comes_expires(bench: Bench) -> None:
    slot = bench.add()
    bench.launcher.queue(slot, 1, 11, 0.01)
    bench.launcher.queue(slot, 2, 12, 60)
    _wait(lambda: bench.launcher.counts(slot).expired == 1)
    _wait(lambda: bench.page.read(DONE) == 1)
    bench.page.write(READY, 2)
    _wait(lambda: bench.launcher.counts(slot).launched == 1)
    assert bench.called == _drafts(12, 2)


def test_nobody_drafts_for_an_engine_that_has_given_up(bench: Bench) -> None:
    slot = bench.add()
    bench.page.write(READY, 3)
    bench.page.write(DONE, 3)
    bench.launcher.queue(slot, 3, 11, 60)
    _wait(lambda: bench.launcher.counts(slot).skipped == 1)
    assert bench.called == []


def test_failed_launch_ends_the_wait_and_writes_no_stamp(bench: Bench) -> None:
    slot = bench.add()
    bench.error = 700
    bench.page.write(READY, 5)
    bench.launcher.queue(slot, 5, 11, 60)
    _wait(lambda: bench.launcher.counts(slot).failed == 1)
    assert bench.launcher.counts(slot).error == 700
    assert bench.page.read(DONE) == 5
    assert bench.called == [(11, STREAM)]


def test_queue_is_bounded(bench: Bench) -> None:
    slot = bench.add()
    assert [bench.launcher.queue(slot, i, 11, 60) for i in range(1, DEPTH + 2)] == [True] * DEPTH + [False]


def test_removed_engine_is_launched_for_no_more(bench: Bench) -> None:
    slot = bench.add()
    bench.launcher.queue(slot, 1, 11, 60)
    assert bench.launcher.remove(slot).launched == 0
    bench.page.write(READY, 1)
    time.sleep(0.02)
    assert bench.called == []
    assert bench.add() == slot
    assert bench.launcher.counts(slot).launched == 0


def test_looks_all_the_time_only_about_when_the_stream_usually_comes() -> None:
    naps = [_nap_us(1_000_000, waited) for waited in (0, 400_000, 600_000, 950_000, 1_400_000, 1_600_000)]
    assert naps == [50, 50, 5, 0, 0, 5]
    assert _nap_us(0, 0) == 5


def test_usual_time_follows_the_shortest() -> None:
    words = np.zeros(16, np.int64)
    seen = []
    for took in (8000, 4000, 12_000, 12_000):
        _learn(words, took)
        seen.append(int(words.max()))
    assert seen == [8000, 4000, 5000, 5875]
