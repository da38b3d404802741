"""A service with a store is killed with SIGKILL at random moments under load: what was answered as durable comes back, and only that.

DRAFTD_KILLS sets how often; `make test-kills` runs it 200 times.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import VOCAB, Process, Stubs, short_directory

KILLS = int(os.environ.get("DRAFTD_KILLS", "3"))
_LOAD_S = 0.6


def _tokens(document_id: str) -> list[int]:
    """What a document must hold: 1 to 60 tokens made from its id."""
    rng = random.Random(document_id)
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 61))]


class _Load:
    """Callers that add documents until the service goes away.

    Attributes:
        durable: Ids of documents that the service has answered for.
        failures: Errors other than that it is gone.
    """

    def __init__(self, target: str, cycle: int) -> None:
        self.durable: set[str] = set()
        self.failures: list[grpc.RpcError] = []
        self._stubs = Stubs(target)
        self._cycle = cycle
        kinds = (self._whole, self._in_parts, self._harvested, self._without_waiting)
        self._threads = [threading.Thread(target=self._until_gone, args=(kind,)) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def _until_gone(self, kind: Callable[[str], None]) -> None:
        number = 0
        while True:
            try:
                kind(f"{kind.__name__}-{self._cycle}-{number}")
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    self.failures.append(error)
                return
            number += 1

    def _whole(self, name: str) -> None:
        ids = [f"{name}-{i}" for i in range(random.randrange(1, 20))]
        documents = [pb.IngestDocument(document_id=one, tokens=_tokens(one), complete=True) for one in ids]
        self._stubs.drafter.Ingest(pb.IngestRequest(documents=documents, vocab_size=VOCAB, wait_durable=True))
        self.durable |= set(ids)

    def _in_parts(self, name: str) -> None:
        tokens = _tokens(name)
        half = len(tokens) // 2
        self._stubs.ingest(name, tokens[:half], vocab_size=VOCAB)
        self._stubs.ingest(name, tokens[half:], offset=half, complete=True, wait_durable=True)
        self.durable.add(name)

    def _harvested(self, name: str) -> None:
        attachment = self._stubs.attach(name).attachment_id
        tokens = _tokens(name)
        row = pb.Row(document_id=name, tokens=[7, *tokens[:1]], prompt_length=1)
        self._stubs.propose([row], attachment)
        rest = pb.HarvestRow(document_id=name, tokens=tokens[1:], offset=2)
        self._stubs.drafter.Harvest(pb.HarvestRequest(attachment_id=attachment, rows=[rest], wait_durable=True))
        self.durable.add(name)
        self._stubs.drafter.Detach(pb.DetachRequest(attachment_id=attachment))

    def _without_waiting(self, name: str) -> None:
        self._stubs.ingest(name, _tokens(name), complete=True, vocab_size=VOCAB)
        time.sleep(0.002)

    def join(self) -> set[str]:
        """Waits for the callers, and answers what the service has answered for."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not self.failures, self.failures
        self._stubs.channel.close()
        return self.durable


@pytest.fixture
def start() -> Iterator[Callable[[], Process]]:
    """Starts services on one data directory; the last one is stopped after the test."""
    started: list[Process] = []
    with short_directory() as directory:
        shm = Path(f"/dev/shm/{directory.name}")
        flags = ("--http", "off", "--shm-root", str(shm), "--data-dir", str(directory / "data"), "--quota-tokens", "8388608")

        def begin() -> Process:
            (directory / "log").unlink(missing_ok=True)
            started.append(Process(directory, *flags))
            return started[-1]

        yield begin
        started[-1].stop()
        shutil.rmtree(shm, ignore_errors=True)


def _exported(stubs: Stubs) -> dict[str, list[int]]:
    """The committed documents of the service."""
    documents: dict[str, list[int]] = {}
    for response in stubs.corpus.Export(pb.ExportRequest()):
        for document in response.documents:
            assert document.document_id not in documents
            documents[document.document_id] = np.frombuffer(document.packed_tokens, "<i4").tolist()
    return documents


def _kill(process: Process) -> None:
    process.process.kill()
    process.process.wait(30)


@pytest.mark.timeout(60 + 30 * KILLS)
def test_killed_at_random_moments_it_keeps_what_it_answered_for(start: Callable[[], Process]) -> None:
    durable: set[str] = set()
    kept = 0
    for cycle in range(KILLS):
        process = start()
        if cycle % 5 == 1:
            # While it starts and restores.
            time.sleep(random.uniform(0.1, 2.0))
        else:
            process.wait_ready()
            load = _Load(process.target, cycle)
            time.sleep(random.uniform(0.0, _LOAD_S))
        _kill(process)
        if cycle % 5 != 1:
            durable |= load.join()
        if cycle % 5 == 0 or cycle == KILLS - 1:
            process = start().wait_ready()
            stubs = Stubs(process.target)
            documents = _exported(stubs) if durable else {}
            stubs.channel.close()
            _kill(process)
            lost = durable - documents.keys()
            assert not lost, f"cycle {cycle}: {len(lost)} of {len(durable)} documents are lost"
            wrong = [one for one, tokens in documents.items() if tokens != _tokens(one)]
            assert not wrong
            kept = len(documents)
    print(f"{KILLS} kills: {len(durable)} documents answered for, {kept} kept")
    assert durable
