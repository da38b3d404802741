"""Services that share over a real nats-server: one is cut off and comes back, one is killed, one is new. All converge, nothing is twice."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import VOCAB, Process, Stubs, short_directory, wait_until
from tests.server.nats import NatsServer, nats_server

SPACES = ("default", "llama/3.1:chat")
Held = Counter[tuple[str, str, tuple[int, ...]]]


class Proxy:
    """A way to a server that can be cut and mended."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._cut = False
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)

    def cut(self) -> None:
        """Ends all connections, and every new one at once."""
        self._cut = True
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def mend(self) -> None:
        """Lets connections through again."""
        self._cut = False

    def close(self) -> None:
        """Ends it."""
        self.cut()
        self._listener.close()


class Node(Process):
    """`draftd serve` that replicates, and calls to it."""

    def __init__(self, directory: Path, name: str, url: str, *flags: str) -> None:
        directory.mkdir(exist_ok=True)
        self.name = name
        self.flags = ("--http", "off", "--shm-root", f"/dev/shm/{directory.parent.name}-{name}", "--node-name", name, "--replicate", url)
        # What an earlier run printed must not look like this one's.
        (directory / "log").unlink(missing_ok=True)
        super().__init__(directory, *self.flags, *flags)
        self.wait_ready()
        self.stubs = Stubs(self.target)

    def say(self, rng: np.random.Generator, documents: int, *, durable: bool = False) -> Held:
        """Ingests documents, and answers what they were."""
        said: Held = Counter()
        for i in range(documents):
            space = SPACES[i % 2]
            document_id = f"{self.name} {rng.integers(2**40)}: \r\n{i}é"
            tokens = rng.integers(0, VOCAB, rng.integers(20, 90)).tolist()
            last = durable and i == documents - 1
            self.stubs.ingest(document_id, tokens, complete=True, namespace=space, vocab_size=VOCAB, wait_durable=last)
            said[space, document_id, tuple(tokens)] += 1
        return said

    def held(self) -> Held:
        """All that the service holds."""
        held: Held = Counter()
        for namespace in self.stubs.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces:
            for message in self.stubs.corpus.Export(pb.ExportRequest(namespace=namespace.name)):
                for document in message.documents:
                    tokens = tuple(np.frombuffer(document.packed_tokens, "<i4").tolist())
                    held[namespace.name, document.document_id, tokens] += 1
        return held

    def drafts(self, said: Held) -> list[tuple[int, ...]]:
        """What it drafts after the beginnings of documents."""
        rows = [pb.Row(tokens=tokens[:12], namespace=space) for space, _, tokens in sorted(said)]
        return [tuple(d.tokens) for first in range(0, len(rows), 32) for d in self.stubs.propose(rows[first : first + 32], k=8).drafts]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for sockets and stores."""
    with short_directory() as directory:
        yield directory
        for shared in Path("/dev/shm").glob(f"{directory.name}-*"):
            shutil.rmtree(shared)


@pytest.fixture
def server(place: Path) -> Iterator[NatsServer]:
    """A nats-server."""
    (place / "nats").mkdir()
    with nats_server(place / "nats") as running:
        yield running


def _converge(nodes: list[Node], said: Held) -> None:
    for node in nodes:
        wait_until(lambda node=node: node.held() == said, 60)


def test_cut_off_killed_and_new_services_converge_and_hold_nothing_twice(place: Path, server: NatsServer) -> None:
    rng = np.random.default_rng(7)
    proxy = Proxy(server.port)
    nodes: list[Node] = []
    try:
        a = Node(place / "a", "a", server.url, "--data-dir", str(place / "a" / "data"))
        b = Node(place / "b", "b", proxy.url)
        c = Node(place / "c", "c", server.url, "--data-dir", str(place / "c" / "data"))
        nodes += [a, b, c]
        said: Held = Counter()
        for node in nodes:
            said += node.say(rng, 40)
        _converge(nodes, said)

        proxy.cut()
        reachable = said + a.say(rng, 40) + c.say(rng, 40)
        cut_off = b.say(rng, 40)
        _converge([a, c], reachable)
        assert b.held() == said + cut_off
        said = reachable + cut_off + c.say(rng, 40, durable=True)
        c.process.kill()
        c.process.wait(30)
        said += a.say(rng, 40)
        proxy.mend()
        c = nodes[2] = Node(place / "c", "c", server.url, "--data-dir", str(place / "c" / "data"))
        began = time.monotonic()
        nodes.append(Node(place / "d", "d", server.url))
        ready = time.monotonic()
        _converge(nodes[3:], said)
        print(f"\na fresh service: ready after {ready - began:.2f} s, the same corpus {time.monotonic() - ready:.2f} s later")
        _converge(nodes, said)
        assert set(said.values()) == {1}
        for node in nodes:
            assert node.stubs.corpus.ListNamespaces(pb.ListNamespacesRequest()).replication.connected
            wait_until(lambda node=node: node.drafts(said) == a.drafts(said), 30)
        assert sum(len(draft) == 8 for draft in a.drafts(said)) > 0.9 * len(said)
    finally:
        for node in nodes:
            node.stop()
        proxy.close()


def test_a_service_that_was_killed_while_nats_was_away_publishes_what_its_store_has(place: Path, server: NatsServer) -> None:
    rng = np.random.default_rng(8)
    nodes: list[Node] = []
    try:
        nodes.append(Node(place / "a", "a", server.url, "--data-dir", str(place / "a" / "data")))
        said = nodes[0].say(rng, 10, durable=True)
        server.kill()
        said += nodes[0].say(rng, 10, durable=True)
        nodes[0].process.kill()
        nodes[0].process.wait(30)
        server.start()
        nodes[0] = Node(place / "a", "a", server.url, "--data-dir", str(place / "a" / "data"))
        nodes.append(Node(place / "b", "b", server.url))
        _converge(nodes, said)
    finally:
        for node in nodes:
            node.stop()
