"""Single writer, many readers: every draft is the oracle's on the version that it was drafted from, whoever is stopped or killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from draftd.drafter.corpus import Corpus
from draftd.drafter.layout import BlockSpec
from draftd.drafter.ops.draft.oracle import propose
from draftd.drafter.shm import ShmDir
from tests.drafter.processes import CONFIG, NAME, PARAMS, Feeder, Part, Record, read, stretches, write

CONTEXT = multiprocessing.get_context("spawn")


class Reader:
    """A reader process and what it has noted."""

    def __init__(self, folder: Path, name: str, specs: tuple[BlockSpec, BlockSpec, BlockSpec], last: Any, wanted: int) -> None:
        self._out = folder / name
        self._stop, self._ready = CONTEXT.Event(), CONTEXT.Event()
        arguments = (*specs, hash(name) % 1000, last, self._stop, self._ready, str(self._out), wanted)
        self.process: SpawnProcess = CONTEXT.Process(target=read, args=arguments, daemon=True)
        self.process.start()

    @property
    def is_ready(self) -> bool:
        """It has drafted."""
        assert self.process.is_alive()
        return self._ready.is_set()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def result(self) -> tuple[list[Record], int, int]:
        """Ends it and answers its records, how many drafts it made, and how many reads were torn."""
        self._stop.set()
        self.process.join(60)
        assert self.process.exitcode == 0
        records: tuple[list[Record], int, int] = pickle.loads(self._out.read_bytes())
        return records


def _assert_exact(records: list[Record], versions: dict[int, list[Part]]) -> None:
    """Every draft is the oracle's on the version it was drafted from."""
    for record in records:
        expected = propose(record.row, stretches(versions[record.version]), PARAMS[record.params])
        assert (record.tokens, record.probabilities, record.source, record.match_length, record.occurrences) == (
            expected.chain.tokens, expected.chain.probabilities, expected.source, expected.match_length, expected.occurrences,
        ), record  # fmt: skip


@pytest.fixture
def corpus() -> Iterator[Corpus]:
    made = Corpus(CONFIG)
    yield made
    made.close()


def _start(corpus: Corpus, folder: Path, count: int, wanted: int) -> tuple[Feeder, dict[int, list[Part]], list[Reader], Any]:
    """A writer here and `count` readers that are drafting."""
    versions: dict[int, list[Part]] = {}
    feeder = Feeder(corpus, versions.__setitem__)
    last = CONTEXT.Value("q", 1, lock=False)
    readers = [
        Reader(
            folder,
            f"reader-{i}",
            (corpus.control_spec(), corpus.index_spec(NAME), corpus.rows.attach(f"r{i}", 4, 64, [NAME])),
            last,
            wanted,
        )
        for i in range(count)
    ]
    while not all(r.is_ready for r in readers):
        feeder.step()
        time.sleep(0.01)
    return feeder, versions, readers, last


def test_readers_beside_a_writer_that_never_pauses(corpus: Corpus, tmp_path: Path) -> None:
    """Three readers for 30 seconds, over many evictions and merges."""
    feeder, versions, readers, last = _start(corpus, tmp_path, 3, wanted=1000)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        feeder.step()
        last.value = feeder.last_document
    results = [r.result() for r in readers]
    drafts, torn = sum(r[1] for r in results), sum(r[2] for r in results)
    records = [record for r in results for record in r[0]]
    assert len(records) > 2000
    assert len({r.version for r in records}) > 500
    assert feeder.documents.evicted_tokens > 20 * CONFIG.quota_tokens
    assert sum(s.kind == "merge" for s in corpus.refresh_stats()) > 50
    assert sum(r.source == 2 for r in records) > len(records) // 4
    assert torn < drafts // 100, "readers hardly ever got a whole version"
    _assert_exact(records, versions)


def test_reader_that_is_stopped_or_killed(corpus: Corpus, tmp_path: Path) -> None:
    """A stopped reader costs the writer a grace at most, and never drafts from what was overwritten meanwhile; a killed one neither."""
    feeder, versions, readers, last = _start(corpus, tmp_path, 3, wanted=4000)
    stopped, killed, other = readers

    def advance(by: int) -> None:
        goal = feeder.index.current.number + by
        while feeder.index.current.number < goal:
            feeder.step()
            last.value = feeder.last_document

    for _ in range(30):
        stopped.signal(signal.SIGSTOP)
        advance(12)
        stopped.signal(signal.SIGCONT)
        advance(3)
    killed.signal(signal.SIGKILL)
    killed.process.join(60)
    advance(200)
    for reader in (stopped, other):
        records, drafts, _ = reader.result()
        assert drafts > 100
        _assert_exact(records[-300:], versions)


def test_readers_go_on_when_the_writer_is_killed(tmp_path: Path) -> None:
    """They keep drafting from the last version, exactly."""
    specs, specs_there = CONTEXT.Pipe(duplex=False)
    told, told_there = CONTEXT.Pipe(duplex=False)
    last = CONTEXT.Value("q", 1, lock=False)
    writer = CONTEXT.Process(target=write, args=(specs_there, told_there, last), daemon=True)
    writer.start()
    told_there.close()
    versions: dict[int, list[Part]] = {}

    def listen() -> None:
        while True:
            try:
                number, parts = told.recv()
            except EOFError:
                return
            versions[number] = parts

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert specs.poll(240)
    reader = Reader(tmp_path, "reader", specs.recv(), last, wanted=6000)
    while not reader.is_ready or len(versions) < 300:
        assert writer.is_alive()
        time.sleep(0.02)
    writer.kill()
    writer.join(60)
    listener.join(60)
    newest = max(versions)
    time.sleep(1)
    records, _, _ = reader.result()
    after = [r for r in records if r.version >= newest - 1]
    assert len(after) > 50
    assert len({r.version for r in after[-50:]}) == 1
    _assert_exact(records[-300:], versions)
    ShmDir.create().close()
