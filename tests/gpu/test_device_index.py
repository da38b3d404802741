"""An index in device memory, refreshed on side streams by compiled kernels: the same lives of documents as on the host."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.corpus import Corpus  # noqa: E402
from draftd.drafter.corpus_config import CorpusConfig  # noqa: E402
from draftd.drafter.device import DeviceDrafter, DeviceDrafts  # noqa: E402
from draftd.drafter.device_index import DeviceIndex  # noqa: E402
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
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDeviceIndexMachine = DeviceIndexMachine.TestCase


def _documents(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    units = [rng.integers(0, 500, int(rng.integers(3, 30))) for _ in range(40)]
    return [np.concatenate([units[int(u)] for u in rng.integers(0, 40, 8)]).astype(np.int32) for _ in range(count)]


def test_corpus_drafts_as_one_on_the_host_while_it_grows_and_forgets() -> None:
    """Two namespaces, a ring that is full several times over, batches of all sizes, mixed with private rows."""
    config = CorpusConfig(quota_tokens=40_000, depth=64, recent_tokens=8192, live_tokens=4096, max_namespaces=4)
    device, host = Corpus(config, indexes=DeviceIndexes(config, "cuda")), Corpus(config)
    rng = np.random.default_rng(1)
    params = DraftParams(k=16, max_depth=24, spec_factor=4, policy="tree")
    for corpus in (device, host):
        for name in ("a", "b"):
            corpus.ensure_namespace(name, 500)
            # Merges end when they begin, so that both corpora evict the same.
            executor = LaterExecutor()
            executor.eager = True
            corpus._namespaces[name].segments._executor = executor
    for turn, batch in enumerate((1, 3, 40, 130, 300)):
        documents = _documents(rng, 200)
        for corpus in (device, host):
            for i, tokens in enumerate(documents):
                corpus.ingest("ab"[i % 2], f"{turn}-{i}", 0, tokens, i % 7 != 0)
                if i % 20 == 0:
                    corpus.refresh()
            while not all(space.segments.settled for space in corpus._namespaces.values()):
                corpus.refresh()
        rows = []
        for _ in range(batch):
            document = documents[int(rng.integers(0, 200))]
            end = int(rng.integers(2, len(document)))
            rows.append(RowContext(document[max(0, end - 90) : end], "ab"[int(rng.integers(0, 2))], bool(rng.random() < 0.1)))
        got, expected = device.propose(rows, params), host.propose(rows, params)
        for name in ("tokens", "probabilities", "counts", "source", "match_length", "occurrences"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)
        assert (got.source == 2).any()
    assert device.namespace("a").evicted_tokens == host.namespace("a").evicted_tokens > 0
    for corpus in (device, host):
        corpus.close()


def test_first_draft_of_a_size_waits_for_no_other_stream() -> None:
    """Whatever keeps the default stream busy, the workspace that a new batch size or row length needs is clean before it is used."""
    config = CorpusConfig(quota_tokens=20_000, depth=64, max_namespaces=1)
    corpus = Corpus(config, indexes=DeviceIndexes(config, "cuda"))
    corpus.ensure_namespace("a", 500)
    text = np.random.default_rng(0).integers(0, 500, 4000).astype(np.int32)
    corpus.ingest("a", "text", 0, text, True)
    corpus.refresh()
    params = DraftParams(k=8, max_depth=24, policy="tree", use_local=False)
    for width in (200, 500, 900):
        for batch in (1, 2, 4, 8, 16, 32):
            torch.cuda._sleep(20_000_000)
            drafts = corpus.propose([RowContext(text[i : i + width], "a", False) for i in range(batch)], params)
            for i in range(batch):
                assert drafts.tokens[i, : drafts.counts[i]].tolist() == text[i + width : i + width + 8].tolist(), (width, batch, i)
    corpus.close()


def test_drafts_are_exact_while_refreshes_run_beside_them() -> None:
    """Each draft is that of the version it names, or of one that was in force when it was made: rows occur once, whatever is merged."""
    config = CorpusConfig(quota_tokens=60_000, depth=16, recent_tokens=4096, live_tokens=4096, max_namespaces=1)
    indexes = DeviceIndexes(config, "cuda")
    corpus = Corpus(config, indexes=indexes)
    corpus.start()
    corpus.ensure_namespace("a", 100_000)
    stop = threading.Event()

    def feed() -> None:
        at = 0
        while not stop.is_set():
            # Every token is followed by its successor, everywhere and always.
            start = (at * 37) % 50_000
            corpus.ingest("a", str(at), 0, np.arange(start, start + 300, dtype=np.int32), True)
            at += 1
            time.sleep(0.001)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        index = corpus._namespaces["a"].index
        assert isinstance(index, DeviceIndex)
        n = 64
        tokens = torch.zeros((n, 64), dtype=torch.int32, device="cuda")
        lengths = torch.full((n,), 8, dtype=torch.int32, device="cuda")
        order = torch.arange(n, dtype=torch.int32, device="cuda")
        spaces = torch.full((n,), index.slot, dtype=torch.int32, device="cuda")
        params = DraftParams(k=8, max_depth=16, spec_factor=4, use_local=False, policy="tree")
        drafter = DeviceDrafter(indexes.memory.words, indexes.memory.headers, max_batch=n, max_row_tokens=64, params=params)
        out = DeviceDrafts.empty(n, params.k, "cuda")
        rng = np.random.default_rng(0)
        seen, drafted = set(), 0
        for _ in range(1000):
            starts = rng.integers(0, 50_000, n).astype(np.int32)
            tokens[:, :8] = torch.from_numpy(starts[:, None] + np.arange(8, dtype=np.int32)).cuda()
            with indexes.memory.launching():
                drafter.propose(tokens, lengths, order, spaces, out)
            drafts = out.numpy()
            for i in range(n):
                count = int(drafts.counts[i])
                assert drafts.tokens[i, :count].tolist() == list(range(int(starts[i]) + 8, int(starts[i]) + 8 + count))
                drafted += count
            seen |= set(drafts.version.tolist())
        assert len(seen) > 20, "no refresh came in between"
        assert drafted > 1000
    finally:
        stop.set()
        feeder.join()
        corpus.close()
    assert corpus.refresh_errors == 0


def test_memory_beyond_the_device_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match=r"device_memory is \d+ MiB; cuda:0 has \d+ MiB free"):
        DeviceMemory(1 << 42, 1, "cuda:0")
    with pytest.raises(InvalidArgument, match=r"there are \d+ CUDA GPUs"):
        DeviceIndexes(CorpusConfig(), "cuda:99")
