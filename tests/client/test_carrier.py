"""What the stream carries to the host, and what the engine's drafter is told of it; the kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from draftd.client import carrier as module  # noqa: E402
from draftd.client.carrier import Carrier  # noqa: E402
from draftd.client.device.collector import Collector  # noqa: E402
from draftd.client.drafter import Drafter  # noqa: E402
from draftd.drafter.device import DeviceDrafts  # noqa: E402
from draftd.drafter.device_calibrated import DeviceLessons  # noqa: E402
from draftd.drafter.drafts import Drafts, RowLessons  # noqa: E402
from draftd.drafter.lessons import Learned, warm_up  # noqa: E402
from draftd.drafter.ops.calibrated.cpu_learn import learn  # noqa: E402
from draftd.drafter.ops.calibrated.cpu_mixer import VOTE_COUNT  # noqa: E402
from draftd.drafter.ops.collect.ring import NEW_TOKENS, RING, SAMPLES, RingShape  # noqa: E402


class Told:
    """Stands in for a Drafter: what each request was told."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.lessons: list[tuple[list[int], RowLessons, Drafts]] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: list[tuple[int, bool, int | None, list[int]]] = []
        self.drafts: list[tuple[list[int], list[int]]] = []

    def append_rows(self, rows: Any, tokens: Any, counts: Any) -> None:
        for row, given, count in zip(rows.tolist(), tokens, counts.tolist(), strict=True):
            self.tokens.setdefault(row, []).extend(given[:count].tolist())

    def finish(self, row: int, discard: bool, *, length: int | None) -> None:
        self.finished.append((row, discard, length, self.tokens.pop(row, [])))

    def observe(self, rows: Any, drafts: Drafts) -> None:
        self.drafts.append((rows.tolist(), drafts.counts.tolist()))
        self.lessons += [(rows[of.rows].tolist(), of, drafts) for of in drafts.lessons]


def carrier_of(told: Told, collector: Collector, learned_of: Callable[[int], Learned | None] = lambda row: None) -> Carrier:
    """One that is told at once of what begins."""
    block = collector.block
    carrier = Carrier(cast(Drafter, told), block.ring, block.overruns, collector.newest, learned_of)
    carrier.carries = True
    return carrier


class Engine:
    """Three rows of 300 tokens, and their carrier, which the test drains by hand."""

    def __init__(self) -> None:
        self.told = Told()
        self.tokens = torch.arange(900, dtype=torch.int32).view(3, 300)
        self.lengths = torch.tensor([10, 20, 30], dtype=torch.int32)
        self.collector = Collector(self.tokens, self.lengths, RingShape(3, 5, teaching=False))
        self.carrier = carrier_of(self.told, self.collector)
        self.drafts = DeviceDrafts.empty(3, 5, "cpu")
        for row in range(3):
            self.begin(row, int(self.lengths[row]))

    @property
    def overruns(self) -> int:
        return int(self.collector.block.overruns[0])

    def begin(self, row: int, length: int) -> None:
        self.carrier.begin(row, self.collector.begin(row, length), length, lambda: self.told.started.append((row, length)))

    def step(self, rows: list[int], drain: bool = True) -> None:
        of_rows = torch.tensor(rows, dtype=torch.int32)
        self.collector.launch(of_rows, self.drafts.first(len(rows)))
        if drain:
            self.carrier.drain()


def test_new_tokens_come_once_and_in_order() -> None:
    engine = Engine()
    engine.lengths += torch.tensor([3, 0, 1])
    engine.step([2, 0, 1])
    engine.lengths[0] += 2
    engine.step([0])
    assert engine.told.tokens == {0: [10, 11, 12, 13, 14], 2: [630]}
    assert engine.told.drafts[0][0] == [2, 0, 1]


def test_more_tokens_than_a_launch_carries_come_with_the_next() -> None:
    engine = Engine()
    engine.lengths[0] = 10 + 2 * NEW_TOKENS + 5
    for _ in range(3):
        engine.step([0])
    assert engine.told.tokens[0] == list(range(10, 10 + 2 * NEW_TOKENS + 5))


def test_rows_that_there_are_not_are_passed_over() -> None:
    engine = Engine()
    engine.lengths[1] += 1
    engine.step([-1, 1, 77])
    assert engine.told.tokens == {1: [320]}


def test_a_row_that_is_named_twice_is_told_once() -> None:
    engine = Engine()
    engine.lengths += torch.tensor([2, 1, 0])
    engine.step([1, 0, 1])
    assert engine.told.tokens == {0: [10, 11], 1: [320]}
    assert engine.told.drafts == [([1, 0], [0, 0])]


def test_request_ends_when_its_last_tokens_have_come() -> None:
    engine = Engine()
    engine.carrier.finish(0, 13, False)
    assert engine.told.finished == []
    engine.lengths[0] = 13
    engine.step([0])
    assert engine.told.finished == [(0, False, 13, [10, 11, 12])]


@pytest.mark.parametrize("length", [None, 12])
def test_last_tokens_come_although_the_row_has_been_given_on(length: int | None) -> None:
    """The row is given on while a launch of the request before it is not read yet."""
    engine = Engine()
    engine.lengths[0] = 12
    engine.step([0], drain=False)
    engine.carrier.finish(0, length, False)
    engine.lengths[0] = 50
    engine.begin(0, 50)
    engine.lengths[0] = 51
    assert (engine.told.started[3:], engine.told.finished) == ([], []), "the drafter's row is not free yet"
    engine.step([0])
    assert engine.told.finished == [(0, False, length, [10, 11])]
    assert engine.told.started[3:] == [(0, 50)]
    assert engine.told.tokens == {0: [50]}


@pytest.mark.parametrize("by", ["settle", "finish", "begin", "end"])
def test_request_that_waits_for_its_row_is_told_at_once_if_something_becomes_of_it(by: str) -> None:
    engine = Engine()
    engine.lengths[0] = 12
    engine.step([0], drain=False)
    engine.carrier.finish(0, None, False)
    engine.begin(0, 50)
    if by == "settle":
        engine.carrier.settle(0)
    elif by == "finish":
        engine.carrier.finish(0, 50, False)
    elif by == "begin":
        engine.begin(0, 60)
    else:
        engine.carrier.end(0)
    assert engine.told.finished[0] == (0, False, None, [])
    assert engine.told.started[3:] == [(0, 50), (0, 60)][: 2 if by == "begin" else 1]
    engine.step([1])
    assert 0 not in engine.told.tokens, "what comes late belongs to nobody"


def test_launches_that_were_overwritten_end_what_they_concerned() -> None:
    engine = Engine()
    for _ in range(RING + 2):
        engine.lengths[0] += 1
        engine.step([0], drain=False)
    engine.lengths[1] += 1
    engine.step([0, 1])
    assert engine.overruns > 0
    assert 0 not in engine.told.tokens, "tokens are missing in between: nothing more is told of it"
    engine.lengths[1] += 1
    engine.step([1])
    assert engine.told.tokens[1][-1] == 321


def test_launch_that_may_be_half_overwritten_is_not_read() -> None:
    engine = Engine()
    for _ in range(RING):
        engine.step([0], drain=False)
    engine.collector.block.ring.records[0, 0, 3] = 1
    engine.carrier.drain()
    assert engine.told.tokens == {}
    assert engine.overruns == RING // 2


def test_a_finished_row_is_told_of_no_more() -> None:
    engine = Engine()
    engine.carrier.finish(0, 10, True)
    engine.lengths[0] = 12
    engine.step([0])
    assert engine.told.finished == [(0, True, 10, [])]
    assert engine.told.tokens == {}


def test_lessons_of_some_rows_of_each_batch_are_carried() -> None:
    """Of other rows each time; those of private rows, which learn into nothing, are left out."""
    rows, k = SAMPLES + 5, 5
    told, learned = Told(), Learned.in_process()
    tokens, lengths = torch.zeros((rows, 300), dtype=torch.int32), torch.full((rows,), 10, dtype=torch.int32)
    collector = Collector(tokens, lengths, RingShape(rows, k, teaching=True))
    carrier = carrier_of(told, collector, lambda row: None if row == 2 else learned)
    for row in range(rows):
        carrier.begin(row, collector.begin(row, 10), 10, lambda: None)
    drafts, lessons = DeviceDrafts.empty(rows, k, "cpu"), DeviceLessons.empty(rows, k, "cpu")
    for i, of in enumerate((drafts.tokens, drafts.probabilities, lessons.ints, lessons.floats)):
        of.copy_(torch.arange(of.numel()).view(of.shape) + i)
    order = torch.arange(rows, dtype=torch.int32).flip(0)
    seen = []
    for _ in range(3):
        told.lessons.clear()
        collector.launch(order, drafts, lessons)
        carrier.drain()
        ((taught, of, told_drafts),) = told.lessons
        seen.append(taught)
        places, lesson = rows - 1 - np.array(taught), of.lesson
        assert (of.rows.tolist(), of.places.tolist(), lesson.learned) == (places.tolist(), list(range(len(taught))), learned)
        assert (lesson.ints == lessons.ints.numpy()[places]).all()
        assert (lesson.floats == lessons.floats.numpy()[places]).all()
        assert (lesson.drafts.tokens == drafts.tokens.numpy()[places]).all()
        for of_places in (lesson.drafts.probabilities, told_drafts.probabilities[places]):
            assert (of_places == drafts.probabilities.numpy()[places]).all()
        assert lesson.parents.tolist() == [[-1, 0, 1, 2, 3]] * len(taught)
    warm_up(k)
    compiled = set(learn.signatures)
    lesson.ints[:, :, VOTE_COUNT] = -1
    lesson.learn(np.arange(len(taught)), np.zeros((len(taught), k + 1), np.int32), np.full(len(taught), k))
    assert set(learn.signatures) == compiled, "nothing is compiled while the ring fills"
    carried = [rows - 1 - i % rows for i in range(3 * SAMPLES)]
    assert seen == [[row for row in carried[i * SAMPLES : (i + 1) * SAMPLES] if row != 2] for i in range(3)]


def test_ring_waits_for_what_was_told_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told and what the GPU writes travel apart: a launch with a row's next request may be seen first."""
    engine = Engine()
    generation = engine.collector.begin(1, 40)
    engine.lengths[1] = 42
    engine.step([1])
    engine.step([0])
    assert engine.told.drafts == [], "what was launched later waits too"
    engine.carrier.begin(1, generation, 40, lambda: engine.told.started.append((1, 40)))
    engine.carrier.drain()
    assert (engine.told.started[3:], engine.told.tokens) == ([(1, 40)], {1: [340, 341]})
    engine.collector.begin(2, 50)
    engine.lengths[0] += 1
    engine.step([2])
    engine.step([0])
    assert 0 not in engine.told.tokens
    monkeypatch.setattr(module, "_AHEAD_S", 0.0)
    engine.carrier.drain()
    assert engine.told.tokens[0] == [10], "what is never told holds up nothing"
    monkeypatch.undo()
    generation = engine.collector.begin(1, 60)
    engine.lengths[1] = 61
    engine.step([1, 2])
    assert engine.carrier.launches == 4, "another row is waited for as the first was"
    engine.carrier.begin(1, generation, 60, lambda: None)
    engine.carrier.drain()
    assert engine.told.tokens[1][-1] == 360


def test_carrier_that_comes_later_tells_of_requests_that_begin_from_then_on() -> None:
    """As after a helper process has died."""
    engine = Engine()
    engine.lengths[0] = 12
    engine.step([0, 1])
    told = Told()
    engine.told, engine.carrier = told, carrier_of(told, engine.collector)
    engine.lengths += 1
    engine.step([0, 1])
    engine.begin(1, 21)
    engine.lengths += 1
    engine.step([0, 1])
    assert told.tokens == {1: [321]}


def test_engine_that_launches_nothing_ends_its_requests_at_once() -> None:
    engine = Engine()
    engine.carrier.carries = False
    engine.carrier.finish(0, 13, False)
    assert engine.told.finished == [(0, False, 13, [])]
