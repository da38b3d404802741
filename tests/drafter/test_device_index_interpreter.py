"""An index in device memory, its kernels in Triton's interpreter: the same lives of documents as on the host, and the oracle's drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.corpus import Corpus  # noqa: E402
from draftd.drafter.corpus_config import CorpusConfig  # noqa: E402
from draftd.drafter.device_indexes import DeviceIndexes  # noqa: E402
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
    assert third == first
    memory.give(second[0], 300, second[1])
    memory.give(third[0], 400, third[1])
    assert memory.free_bytes == 4 * 1024
    assert memory.take(1024)[0] == 0


def test_there_are_no_more_namespaces_than_headers() -> None:
    memory = DeviceMemory(4 * 1024, 1, "cpu")
    memory.take(32)
    with pytest.raises(ResourceExhausted):
        memory.take(32)


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
