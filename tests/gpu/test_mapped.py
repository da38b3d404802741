"""Engines that map the service's index on a GPU: real processes, drafts as the CPU kernels' on the version that each read."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from bench import service as measured  # noqa: E402
from draftd.client.device import DeviceSession  # noqa: E402
from draftd.drafter.params import DraftParams, Policy  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2 as pb  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2_grpc  # noqa: E402
from draftd.server.replay.service import PrivateService  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    *("--device", "cuda", "--quota-tokens", "262144", "--recent-tokens", "16384", "--live-tokens", "16384", "--device-memory", "256"),
    *("--policy", "tree", "--lease-ms", "2000", "--log-level", "warning"),
)
VOCAB = 1000


@pytest.fixture(scope="module")
def service() -> Iterator[PrivateService]:
    with PrivateService(FLAGS, http=False) as running:
        yield running


def engine(service: PrivateService, name: str, *flags: str) -> subprocess.Popen[str]:
    traces = [str(ROOT / "samples" / f"{n}.jsonl.gz") for n in ("gsm8k", "humaneval")]
    command = [sys.executable, "-m", "bench.gpu_engine", *traces, "--endpoint", service.endpoint, "--engine", name, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    counted: dict[str, Any] = json.loads(out.splitlines()[-1])
    return counted


class _Engine:
    """An engine in this process: two rows, with what the test puts into them."""

    def __init__(self, service: PrivateService, name: str, policy: Policy = "tree", **options: Any) -> None:
        self.tokens = torch.zeros((2, 256), dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.order = torch.arange(2, dtype=torch.int32, device="cuda")
        params = DraftParams(k=8, max_depth=24, policy=policy, tau=0.0, use_local=options.pop("use_local", True))
        self.session = DeviceSession(
            service.endpoint, engine=name, vocab_size=VOCAB, tokens=self.tokens, lengths=self.lengths, max_batch=2, params=params,
            strict=True, **{"namespace": "small", **options},
        )  # fmt: skip
        assert self.session.wait_attached(30), self.session.trouble

    def put(self, row: int, tokens: list[int]) -> None:
        self.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.lengths[row] = len(tokens)

    def draft(self, row: int) -> list[int]:
        drafts = self.session.propose(self.order).numpy()
        return [int(token) for token in drafts.tokens[row, : drafts.counts[row]]]


def test_what_one_engine_commits_another_drafts(service: PrivateService) -> None:
    text = [(37 * i) % VOCAB for i in range(40)]
    first, second = _Engine(service, "first"), _Engine(service, "second")
    try:
        first.put(0, text[:10])
        first.session.start(0, text[:10], "document")
        for at in range(10, 40, 3):
            first.session.collect(first.order, first.session.propose(first.order))
            first.put(0, text[: at + 3])
        first.session.collect(first.order, first.session.propose(first.order))
        torch.cuda.synchronize()
        second.put(1, text[15:20])
        second.session.start(1, text[15:20], "asks")
        deadline = time.monotonic() + 10
        while second.draft(1) != text[20:28] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert second.draft(1) == text[20:28]
        first.session.finish(0, 30)
        assert first.session.stats.proposals[0] > 0
    finally:
        first.session.close()
        second.session.close()


def test_engine_drafts_calibrated_and_teaches_its_namespace(service: PrivateService) -> None:
    text = [(53 * i) % VOCAB for i in range(200)]
    _ingest(service, "lesson", text, "taught")
    engine = _Engine(service, "taught", "calibrated", namespace="taught", use_local=False)
    stub = draftd_pb2_grpc.CorpusServiceStub(grpc.insecure_channel(service.endpoint))

    def known() -> int:
        of = stub.GetNamespace(pb.GetNamespaceRequest(namespace="taught"), timeout=10).namespace
        return sum(decile.drafted for decile in of.calibration.deciles)

    try:
        engine.put(0, text[:10])
        engine.session.start(0, text[:10], "learns")
        for at in range(10, 190, 9):
            drafts = engine.session.propose(engine.order)
            engine.session.collect(engine.order, drafts)
            assert drafts.numpy().tokens[0].tolist() == text[at : at + 8]
            engine.put(0, text[: at + 9])
        engine.session.collect(engine.order, engine.session.propose(engine.order))
        deadline = time.monotonic() + 10
        while known() < 150 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert known() >= 150
    finally:
        engine.session.close()


def test_private_rows_and_unknown_rows_draft_from_nothing_of_others(service: PrivateService) -> None:
    text = [(37 * i) % VOCAB for i in range(40)]
    asks = _Engine(service, "private", use_local=False)
    try:
        asks.put(0, text[15:20])
        asks.session.start(0, text[15:20], "mine", private=True)
        assert asks.draft(0) == []
        drafts = asks.session.propose(torch.tensor([-1, 77], dtype=torch.int32, device="cuda")).numpy()
        assert drafts.counts.tolist() == [0, 0]
    finally:
        asks.session.close()


def test_captured_graph_outlives_the_service(tmp_path: Path) -> None:
    """The graph drafts from the index as it was, then from that of the next service, without being captured again."""
    text = [(41 * i) % VOCAB for i in range(40)]
    with PrivateService((*FLAGS, "--data-dir", str(tmp_path)), http=False) as own:
        _ingest(own, "before", text)
        asks = _Engine(own, "graph", use_local=False)
        asks.put(0, text[5:10])
        asks.session.start(0, text[5:10], "asks")
        out = asks.session.propose(asks.order)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            asks.session.propose(asks.order, out)

        def draft() -> list[int]:
            graph.replay()
            drafts = out.numpy()
            return [int(token) for token in drafts.tokens[0, : drafts.counts[0]]]

        assert draft() == text[10:18]
        own.kill()
        assert draft() == text[10:18]
        own.spawn()
        own.wait_ready()
        deadline = time.monotonic() + 20
        while not asks.session.attached and time.monotonic() < deadline:
            draft()
        other = [(43 * i + 7) % VOCAB for i in range(40)]
        _ingest(own, "after", other)
        asks.put(0, other[5:10])
        while draft() != other[10:18] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert draft() == other[10:18]
        asks.session.close()


def _ingest(service: PrivateService, name: str, tokens: list[int], namespace: str = "small") -> None:
    with measured.channel(service.endpoint) as opened:
        document = pb.IngestDocument(document_id=name, tokens=tokens, complete=True)
        request = pb.IngestRequest(namespace=namespace, documents=[document], vocab_size=VOCAB, wait_visible=True)
        draftd_pb2_grpc.DrafterServiceStub(opened).Ingest(request, timeout=30)


def test_drafts_of_two_processes_are_those_of_the_version_that_they_read(service: PrivateService) -> None:
    engines = [engine(service, f"replay-{i}", "--seconds", "8", "--first", str(i), "--stride", "2") for i in range(2)]
    for counted in map(outcome, engines):
        assert counted["differ"] == 0
        assert counted["checked"] > 100
        assert counted["tokens"] > counted["row_steps"]


def test_index_cannot_be_written_by_an_engine(service: PrivateService) -> None:
    code = f"""
import torch
from draftd.client.device import DeviceSession
tokens = torch.zeros((1, 64), dtype=torch.int32, device="cuda")
lengths = torch.zeros(1, dtype=torch.int32, device="cuda")
session = DeviceSession({service.endpoint!r}, engine="writer", vocab_size={VOCAB}, tokens=tokens, lengths=lengths, max_batch=1,
                        namespace="small")
assert session.wait_attached(30)
session.memory.words[:64].fill_(7)
try:
    torch.cuda.synchronize()
except Exception as error:
    print("refused", type(error).__name__)
import os; os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "refused" in done.stdout, done.stderr[-1000:]
    _ingest(service, "afterwards", [(53 * i) % VOCAB for i in range(40)])
    asks = _Engine(service, "reader", use_local=False)
    try:
        asks.put(0, [(53 * i) % VOCAB for i in range(5, 10)])
        asks.session.start(0, [1], "asks")
        assert asks.draft(0) == [(53 * i) % VOCAB for i in range(10, 18)]
    finally:
        asks.session.close()


@pytest.mark.parametrize("what", ["nonsense", "no descriptor", "wrong descriptor"])
def test_memory_socket_hands_out_nothing_to_who_has_no_ticket(service: PrivateService, what: str) -> None:
    asks = _Engine(service, "honest")
    directory = next(p for p in Path("/dev/shm").rglob("memory") if p.is_socket())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(directory))
        ticket = b"0" * 32
        body = b"\xff" * 100 if what == "nonsense" else struct.pack("<I", len(ticket)) + ticket
        fds = [os.open("/dev/null", os.O_RDONLY)] if what == "wrong descriptor" else []
        socket.send_fds(connection, [body], fds) if fds else connection.sendall(body)
        try:
            answer = connection.recv(16)
        except ConnectionResetError:
            answer = b""
        assert answer == b""
    assert asks.session.attached
    asks.session.close()


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_killed_engine_leaves_service_and_others_unharmed(service: PrivateService, when: str) -> None:
    bystander = engine(service, f"bystander-{when}", "--seconds", "12")
    victim = engine(service, f"victim-{when}", "--seconds", "60", *(["--rows", "1", "--quiet"] if when == "idle" else []))
    assert victim.stderr is not None
    assert "attached" in victim.stderr.readline()
    time.sleep(1)
    victim.kill()
    victim.wait()
    counted = outcome(bystander)
    assert counted["differ"] == 0
    assert counted["attachments"] == 1
    again = _Engine(service, f"again-{when}")
    again.session.close()


@pytest.mark.parametrize(("who", "attachments"), [("engine", 1), ("helper", 2)])
def test_suspended_process_goes_on_exactly(service: PrivateService, who: str, attachments: int) -> None:
    """It stands still for longer than the lease; neither the service nor another engine waits for it.

    An engine keeps its attachment, since its helper goes on; where that stands still, there is another one afterwards.
    """
    bystander = engine(service, f"beside-{who}", "--seconds", "12")
    sleeper = engine(service, f"sleeper-{who}", "--seconds", "12", "--first", "1")
    assert sleeper.stderr is not None
    assert "attached" in sleeper.stderr.readline()
    time.sleep(1)
    suspended = sleeper.pid if who == "engine" else helper_of(sleeper)
    os.kill(suspended, signal.SIGSTOP)
    time.sleep(4)
    os.kill(suspended, signal.SIGCONT)
    beside, slept = outcome(bystander), outcome(sleeper)
    assert (beside["differ"], slept["differ"]) == (0, 0)
    assert beside["attachments"] == 1
    assert slept["attachments"] == attachments
    assert slept["checked"] > 100


def test_engine_whose_helper_is_killed_gets_another(service: PrivateService) -> None:
    """Meanwhile it drafts on, and what it drafts is exact."""
    victim = engine(service, "helpless", "--seconds", "14")
    assert victim.stderr is not None
    assert "attached" in victim.stderr.readline()
    time.sleep(1)
    os.kill(helper_of(victim), signal.SIGKILL)
    counted = outcome(victim)
    assert counted["differ"] == 0
    assert counted["attachments"] == 2
    assert counted["checked"] > 100


def helper_of(process: subprocess.Popen[str]) -> int:
    """The process id of an engine's helper."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == process.pid and b"draftd.client.helper" in command:
            return int(path.name)
    raise AssertionError("the engine has no helper")


def test_device_memory_is_given_back_by_engines_that_detach(service: PrivateService) -> None:
    used = []
    for i in range(6):
        _Engine(service, f"cycle-{i}").session.close()
        torch.cuda.synchronize()
        used.append(measured.device_mib(measured.process_id(service.endpoint)))
    assert 0 < used[-1] <= used[1], used


def test_engine_without_a_gpu_is_told_why_it_does_not_map(service: PrivateService) -> None:
    with measured.channel(service.endpoint) as opened:
        stub = draftd_pb2_grpc.DrafterServiceStub(opened)
        request = pb.AttachRequest(engine="host", vocab_size=VOCAB, k=4, max_rows=1, max_length=64, namespace="small")
        answer = stub.Attach(request, timeout=30)
        assert answer.transport == pb.TRANSPORT_INLINE
        assert "the engine on none" in answer.fallback_reason
        stub.Detach(pb.DetachRequest(attachment_id=answer.attachment_id), timeout=30)


def test_session_without_a_service_drafts_from_own_tokens() -> None:
    tokens = torch.zeros((1, 64), dtype=torch.int32, device="cuda")
    lengths = torch.zeros(1, dtype=torch.int32, device="cuda")
    with DeviceSession(
        "unix:/tmp/nobody.sock",
        engine="alone",
        vocab_size=VOCAB,
        tokens=tokens,
        lengths=lengths,
        max_batch=1,
        params=DraftParams(k=4, tau=0.0),
    ) as session:
        row = np.array([5, 6, 7, 8, 9, 5, 6, 7], np.int32)
        tokens[0, :8] = torch.from_numpy(row)
        lengths[0] = 8
        session.start(0, row, "alone")
        drafts = session.propose(torch.zeros(1, dtype=torch.int32, device="cuda")).numpy()
        assert drafts.tokens[0, : drafts.counts[0]].tolist() == [8, 9, 5, 6]
        assert not session.attached
