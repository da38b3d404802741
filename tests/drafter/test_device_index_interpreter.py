"""An index in device memory, its kernels in Triton's interpreter: the same lives of documents as on the host, and the oracle's drafts."""

from __future__ import annotations

import threading
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.corpus import Corpus  # noqa: E402
from draftd.drafter.corpus_config import CorpusConfig  # noqa: E402
from draftd.drafter.device import DeviceDrafter, DeviceDrafts  # noqa: E402
from draftd.drafter.device_fleet import DeviceFleet, FleetIndex  # noqa: E402
from draftd.drafter.device_index import DeviceIndex, DeviceShape  # noqa: E402
from draftd.drafter.device_indexes import DeviceIndexes  # noqa: E402
from draftd.drafter.device_layout import DEVICE_RECLAIMED, DEVICE_VERSION, PIN_EPOCH, PIN_MAPPED, PIN_ROWS, TORN  # noqa: E402
from draftd.drafter.device_memory import DeviceMemory  # noqa: E402
from draftd.drafter.errors import InvalidArgument, ResourceExhausted  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from draftd.drafter.records import RowContext  # noqa: E402
from tests.drafter.bench import LaterExecutor  # noqa: E402
from tests.drafter.test_segments import IndexMachine  # noqa: E402
from tests.gpu.device_bench import DeviceBench  # noqa: E402


class DeviceIndexMachine(IndexMachine):
    """Random lives of documents over an index in device memory."""

    make_bench = DeviceBench


DeviceIndexMachine.TestCase.settings = settings(
    max_examples=5,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # An example takes seconds in the interpreter: shrinking one would take hours.
    phases=(Phase.explicit, Phase.generate),
)
TestDeviceIndexMachine = DeviceIndexMachine.TestCase

CONFIG = CorpusConfig(quota_tokens=256, depth=8, recent_tokens=64, live_tokens=64, max_namespaces=3, device_memory_bytes=2**20)


def test_corpus_on_a_device_answers_what_one_on_the_host_does() -> None:
    """Several namespaces in one batch, private rows, eviction, dropping, and explanations."""
    device, host = Corpus(CONFIG, indexes=DeviceIndexes(CONFIG, "cpu")), Corpus(CONFIG)
    rng = np.random.default_rng(0)
    documents = [(str(i), "ab"[i % 2], rng.integers(0, 4, 30).astype(np.int32)) for i in range(24)]
    rows = [
        RowContext(rng.integers(0, 4, 12).astype(np.int32), name, private) for name, private in (("a", False), ("b", False), ("a", True))
    ]
    for corpus in (device, host):
        for name in "ab":
            corpus.ensure_namespace(name, 10)
            # Merges end when they begin, so that both corpora evict the same.
            executor = LaterExecutor()
            executor.eager = True
            corpus._namespaces[name].segments._executor = executor
        for document_id, name, tokens in documents:
            corpus.ingest(name, document_id, 0, tokens, True)
            corpus.refresh()
        while not all(space.segments.settled for space in corpus._namespaces.values()):
            corpus.refresh()
    assert device.namespace("a").evicted_tokens > 0
    params = DraftParams(k=4, max_depth=8, policy="tree")
    got, expected = device.propose(rows, params), host.propose(rows, params)
    assert (got.tokens.tolist(), got.source.tolist()) == (expected.tokens.tolist(), expected.source.tolist())
    assert (got.probabilities == expected.probabilities).all()
    assert 2 in got.source
    for row in rows[:2]:
        assert device.explain(row.namespace, row.tokens, params).matches == host.explain(row.namespace, row.tokens, params).matches
    assert [d.tokens.tolist() for d in device.documents("a")] == [d.tokens.tolist() for d in host.documents("a")]
    for corpus in (device, host):
        corpus.drop_namespace("a")
        corpus.ensure_namespace("c", 10)
    assert device.propose([RowContext(rows[0].tokens, "c", False)], params).source[0] in (0, 1)
    for corpus in (device, host):
        corpus.close()


def test_every_copy_of_a_fleet_drafts_as_the_host_does() -> None:
    """With eviction, merges, and a namespace that goes and leaves its memory to another."""
    fleet = DeviceFleet(CONFIG, ["cpu", "cpu"])
    several, host = Corpus(CONFIG, indexes=fleet), Corpus(CONFIG)
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 4, 30).astype(np.int32) for _ in range(14)]
    rows = [rng.integers(0, 4, 12).astype(np.int32) for _ in range(3)]
    params = DraftParams(k=4, max_depth=8, policy="tree")
    for corpus in (several, host):
        corpus.ensure_namespace("gone", 10)
        corpus.drop_namespace("gone")
        corpus.ensure_namespace("a", 10)
        executor = LaterExecutor()
        executor.eager = True
        corpus._namespaces["a"].segments._executor = executor
        for i, tokens in enumerate(documents):
            corpus.ingest("a", str(i), 0, tokens, True)
            corpus.refresh()
        while not all(space.segments.settled for space in corpus._namespaces.values()):
            corpus.refresh()
        assert corpus.namespace("a").evicted_tokens > 0
    expected = host.propose([RowContext(row, "a", False) for row in rows], params)
    assert 2 in expected.source
    for member in fleet.members:
        got = member.draft(rows, ["a"] * 3, params)
        assert (got.tokens.tolist(), got.probabilities.tolist()) == (expected.tokens.tolist(), expected.probabilities.tolist())
    sizes = [copy.byte_size for copy in cast(FleetIndex, several._namespaces["a"].index).copies]
    assert several.namespace("a").bytes == sum(sizes)
    for corpus in (several, host):
        corpus.close()


def test_namespace_that_slept_comes_back_by_the_bulk_load() -> None:
    device, host = Corpus(CONFIG, indexes=DeviceIndexes(CONFIG, "cpu")), Corpus(CONFIG)
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 4, 25).astype(np.int32) for _ in range(6)]
    rows = [RowContext(rng.integers(0, 4, 12).astype(np.int32), "a", False) for _ in range(3)]
    params = DraftParams(k=4, max_depth=8, policy="tree")
    answers = []
    for corpus in (device, host):
        corpus.ensure_namespace("a", 10)
        for i, tokens in enumerate(documents):
            corpus.ingest("a", str(i), 0, tokens, True)
        corpus.refresh()
        kept = list(corpus.documents("a"))
        state, info = corpus.put_to_sleep("a")
        assert (info.documents, len(kept)) == (6, 6)
        assert corpus.restore(state, reversed(kept)).main == 6 * 25
        answers.append(corpus.propose(rows, params))
        corpus.close()
    got, expected = answers
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert (got.probabilities == expected.probabilities).all()
    assert 2 in got.source


def test_memory_is_dealt_out_and_taken_back() -> None:
    memory = DeviceMemory(4 * 1024, 3, "cpu")
    first, second = memory.take(500), memory.take(300)
    with pytest.raises(ResourceExhausted, match=r"needs 0\.0 MiB of device memory.*lower quota_tokens"):
        memory.take(400)
    memory.give(first[0], 500, first[1])
    third = memory.take(400)
    assert third[0] == first[0]
    assert third[1] not in (first[1], second[1]), "the header that is free for longest goes first"
    memory.give(second[0], 300, second[1])
    memory.give(third[0], 400, third[1])
    assert memory.free_bytes == 4 * 1024
    assert memory.take(1024)[0] == first[0]


def test_there_are_no_more_namespaces_than_headers() -> None:
    memory = DeviceMemory(4 * 1024, 1, "cpu")
    memory.take(32)
    with pytest.raises(ResourceExhausted):
        memory.take(32)


class _Reader:
    """A reader as another process is one: it pins, and nobody orders its work."""

    def __init__(self, index: DeviceIndex, tokens: list[int], batch: int) -> None:
        memory = index.memory
        self.pin = memory.readers.add("reader")
        self.pin[PIN_MAPPED] = 1
        params = DraftParams(k=4, max_depth=8, policy="tree", use_local=False)
        self._drafter = DeviceDrafter(
            index.arena, index.headers, max_batch=batch, max_row_tokens=16, params=params, control=memory.control, pins=self.pin
        )
        self._row = torch.tensor(tokens + [0] * (16 - len(tokens)), dtype=torch.int32).repeat(batch, 1)
        self._lengths = torch.full((batch,), len(tokens))
        self._order = torch.arange(batch, dtype=torch.int32)
        self._namespaces = torch.full((batch,), index.slot, dtype=torch.int32)
        self.out = DeviceDrafts.empty(batch, 4, "cpu")

    def draft(self) -> DeviceDrafts:
        self._drafter.propose(self._row, self._lengths, self._order, self._namespaces, self.out)
        return self.out


def _index_with_text() -> DeviceIndex:
    index = DeviceIndex(DeviceShape(256, 64, 64, 100, 16), "cpu")
    text = np.array([5, 6, 7, 8, 9, 10, -1], np.int32)
    index.write_text(0, text)
    index.publish(index.add_recent(index.current, np.arange(6, dtype=np.int32)))
    return index


def test_reader_is_told_of_a_version_that_was_overwritten_meanwhile() -> None:
    index = _index_with_text()
    reader = _Reader(index, [5, 6, 7], 3)
    out = reader.draft()
    assert out.tokens[:, :3].tolist() == [[8, 9, 10]] * 3
    assert out.version.tolist() == [index.current.number] * 3
    assert (reader.pin[PIN_EPOCH], reader.pin[PIN_ROWS]) == (0, 0), "the pin is gone, and its count of rows"
    index.headers[index.slot, DEVICE_RECLAIMED] = index.current.number
    out = reader.draft()
    assert out.counts.tolist() == [0] * 3
    assert out.version.tolist() == [TORN] * 3
    index.headers[index.slot, DEVICE_RECLAIMED] = index.current.number - 1
    assert reader.draft().counts.tolist() == [3] * 3


def test_writer_waits_for_a_reader_that_moves_and_passes_over_one_that_does_not() -> None:
    index = _index_with_text()
    memory = index.memory
    pin = memory.readers.add("slow")
    pin[PIN_EPOCH] = 1
    released = threading.Timer(0.02, pin.zero_)
    released.start()
    index.publish(index.add_recent(index.current, np.empty(0, np.int32)))
    number = index.current.number
    index.publish(index.add_recent(index.current, np.empty(0, np.int32)))
    assert pin[PIN_EPOCH] == 0, "the copy was overwritten while it was pinned"
    assert memory.readers.passed_over == 0
    assert index.headers[index.slot, DEVICE_RECLAIMED] == number - 1
    pin[PIN_EPOCH] = 1
    for _ in range(3):
        index.publish(index.add_recent(index.current, np.empty(0, np.int32)))
    assert memory.readers.passed_over == 1, "waited for once, and never again"
    memory.readers.remove("slow")
    assert len(memory.readers) == 0


def test_header_goes_on_counting_when_another_index_has_it() -> None:
    shape = DeviceShape(64, 32, 32, 100, 8)
    memory = DeviceMemory(4 * shape.elements, 1, "cpu")
    first = DeviceIndex(shape, memory=memory)
    number = first.current.number
    first.close()
    assert first.headers[first.slot, DEVICE_VERSION] == 0
    assert DeviceIndex(shape, memory=memory).current.number == number + 1


def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="finds no CUDA GPU"):
        DeviceIndexes(CONFIG, "cuda")


def test_memory_that_holds_no_namespace_is_refused() -> None:
    config = CorpusConfig(quota_tokens=1 << 20, device_memory_bytes=2**20)
    with pytest.raises(InvalidArgument, match=r"device_memory is 1 MiB; one namespace of quota_tokens=1048576 needs \d+"):
        DeviceIndexes(config, "cpu")


def test_index_that_is_closed_is_in_force_no_more() -> None:
    bench = DeviceBench(vocab=4, depth=4, quota=64, recent=16, live=16)
    bench.ingest("a", [1, 2, 3] * 3, True)
    bench.refresh()
    params = DraftParams(k=2, max_depth=4, use_local=False, policy="tree")
    assert bench.draft([[1, 2]], params).counts[0] > 0
    bench.close()
    assert bench.draft([[1, 2]], params).counts[0] == 0


def test_calibrated_rule_drafts_and_learns_on_a_device_as_on_the_host() -> None:
    """The same first token with the same survival (later ones see less on a device), and what came after teaches its namespace only."""
    device, host = Corpus(CONFIG, indexes=DeviceIndexes(CONFIG, "cpu")), Corpus(CONFIG)
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 9, 20).astype(np.int32) for _ in range(3)]
    rows = [RowContext(documents[i][: 8 + i].copy(), name, False) for i, name in enumerate(("a", "a", "b"))]
    params = DraftParams(k=3, tau=0.0, max_depth=8)
    drafts = []
    for corpus in (device, host):
        for name in "ab":
            corpus.ensure_namespace(name, 10)
        for i, tokens in enumerate(documents):
            corpus.ingest("a", str(i), 0, tokens, True)
        corpus.refresh()
        drafts.append(corpus.propose(rows, params))
        assert sum(len(of.rows) for of in drafts[-1].lessons) == 3
        for of in drafts[-1].lessons:
            if 0 in of.rows:
                truth = np.stack([documents[0][8:11], documents[1][9:12]])
                of.lesson.learn(of.places[:2], truth, np.array([3, 3]))
        corpus.refresh()
    got, expected = drafts
    assert got.tokens[:, 0].tolist() == expected.tokens[:, 0].tolist()
    np.testing.assert_allclose(got.probabilities[:, 0], expected.probabilities[:, 0], atol=1e-4)
    for corpus in (device, host):
        assert sum(decile.drafted for decile in corpus.namespace("a").deciles) > 0
        assert sum(decile.drafted for decile in corpus.namespace("b").deciles) == 0
    after = [corpus.propose(rows, params) for corpus in (device, host)]
    np.testing.assert_allclose(after[0].probabilities[:, 0], after[1].probabilities[:, 0], atol=0.05)
    assert (after[0].probabilities[:2] != got.probabilities[:2]).any(), "what was learned is in force"
    assert (after[0].probabilities[2] == got.probabilities[2]).all()
    for corpus in (device, host):
        corpus.close()
