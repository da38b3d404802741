"""What does it cost to share an index on a GPU, and what survives? Real processes, one service, engines that map its index.

Prints one table: the cost of a step against the same kernels on an index in the process, alone and while the service refreshes; engines
that replay traces and check every draft while services and engines are killed beside them; visibility; memory. Needs a CUDA GPU.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench import service as measured
from bench import workload
from bench.drafter import graph_us, row_choices, token_buffer
from bench.machine import parser, report
from draftd.client.device import DeviceSession
from draftd.drafter.device import DeviceDrafter, DeviceDrafts
from draftd.drafter.device_layout import DEVICE_CONTROL_WORDS, DEVICE_HEADER_WORDS
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

ROOT = Path(__file__).resolve().parents[1]
TRACES = [str(ROOT / "samples" / f"{name}.jsonl.gz") for name in ("gsm8k", "humaneval", "taubench")]
FLAGS = ("--device", "cuda", "--policy", "tree", "--log-level", "warning")
LARGE = (*FLAGS, "--quota-tokens", "4500000", "--device-memory", "256", "--refresh-interval-ms", "50", "--max-length", "131072")
SMALL = (*FLAGS, "--quota-tokens", "262144", "--recent-tokens", "16384", "--live-tokens", "16384", "--device-memory", "256")
PARAMS = DraftParams(k=16, max_depth=24, spec_factor=1, policy="tree")
FEED_TOKENS_S = 25_000
STEP_MS = 5.0
Row = list[object]


def attach(endpoint: str, name: str, buffer: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: int) -> DeviceSession:
    """A session over a buffer of contexts whose rows all draft from the namespace "default"."""
    tokens, lengths, _ = buffer
    session = DeviceSession(
        endpoint,
        engine=name,
        vocab_size=workload.VOCABULARY,
        tokens=tokens,
        lengths=lengths.to(torch.int32),
        max_batch=batch,
        params=PARAMS,
    )
    if not session.wait_attached(60):
        raise SystemExit(f"not attached: {session.trouble}")
    return session


class Contexts:
    """A buffer of contexts, a session that drafts for it, and the same kernels on a copy of the index in this process."""

    def __init__(self, endpoint: str, batch: int) -> None:
        contexts = workload.make(1, 512).contexts
        self.buffer = token_buffer(contexts, 4096)
        self.batch = batch
        self.session = attach(endpoint, f"step-{batch}", self.buffer, batch)
        self.rows = row_choices(self.buffer, batch)
        self.out = DeviceDrafts.empty(batch, PARAMS.k, "cuda")
        memory = self.session.memory
        self.header = self.session.headers["default"]
        for row in range(len(contexts)):
            self.session.start(row, contexts[row][:1])
        # Its only namespace's index lies right behind the head.
        copy = memory.words[: memory.mapped_bytes // 4].clone()
        start, words = DEVICE_CONTROL_WORDS, DEVICE_HEADER_WORDS
        headers = copy.view(torch.int64)[start : start + words * (self.header + 1)].view(-1, words)
        tokens = self.buffer[0]
        self.own = DeviceDrafter(copy, headers, max_batch=batch, max_row_tokens=tokens.shape[1], params=PARAMS)
        self.own_namespaces = torch.full((tokens.shape[0],), self.header, dtype=torch.int32, device="cuda")

    def mapped(self, i: int) -> None:
        """A draft from the mapped index."""
        self.session.propose(self.rows[i], self.out)

    def in_process(self, i: int) -> None:
        """A draft from the copy."""
        self.own.propose(self.buffer[0], self.buffer[1], self.rows[i], self.own_namespaces, self.out)


def step_cost(endpoint: str) -> list[Row]:
    """Microseconds of a draft, mapped and in process."""
    found: list[Row] = []
    for batch in (1, 256):
        contexts = Contexts(endpoint, batch)
        contexts.in_process(0)
        expected = contexts.out.numpy()
        contexts.mapped(0)
        same = (contexts.out.numpy().tokens == expected.tokens).all()
        pairs = [(graph_us(contexts.in_process), graph_us(contexts.mapped)) for _ in range(3)]
        own, mapped = (float(np.median([pair[i] for pair in pairs])) for i in (0, 1))
        found.append(
            [f"mapped, batch {batch}: a draft, us (in process {own:.1f}{'' if same else ', DRAFTS DIFFER'})", mapped, f"{own + 2:.1f}"]
        )
        contexts.session.close()
    return found


def feed(endpoint: str) -> None:
    """Ingests documents at FEED_TOKENS_S until it is ended; the process that `feeding` starts."""
    documents = workload.make(400_000, 1).documents
    with measured.channel(endpoint) as opened:
        stub = draftd_pb2_grpc.DrafterServiceStub(opened)
        number, due = 0, time.monotonic()
        while True:
            batch, tokens = [], 0
            while tokens < FEED_TOKENS_S / 20:
                document = documents[number % len(documents)]
                batch.append(pb.IngestDocument(document_id=f"fed-{number}", packed_tokens=document.astype("<i4").tobytes(), complete=True))
                number, tokens = number + 1, tokens + len(document)
            stub.Ingest(pb.IngestRequest(documents=batch, vocab_size=workload.VOCABULARY), timeout=30)
            due += tokens / FEED_TOKENS_S
            time.sleep(max(0, due - time.monotonic()))


@contextmanager
def feeding(endpoint: str) -> Iterator[None]:
    """Documents come in from another process meanwhile."""
    command = [sys.executable, "-c", f"from bench.sharing import feed; feed({endpoint!r})"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        time.sleep(6)
        assert process.poll() is None, "feeding failed"
        try:
            yield
        finally:
            process.kill()


def step_times(graph: torch.cuda.CUDAGraph, seconds: float) -> np.ndarray:
    """Milliseconds of each replay of a step."""
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        done.record()
        pairs.append((begin, done))
        if len(pairs) > 2:
            # Two steps are always on their way, so that the host is in no step's time.
            pairs[-3][1].synchronize()
    torch.cuda.synchronize()
    return np.array([begin.elapsed_time(done) for begin, done in pairs[8:]])


def under_refresh(endpoint: str) -> list[Row]:
    """How much longer a step takes while the service refreshes."""
    contexts = Contexts(endpoint, 64)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    c = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=c)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        products(200)
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        products(200)
        done.record()
        done.synchronize()
        count = max(1, round(STEP_MS / (begin.elapsed_time(done) / 200)))
        contexts.mapped(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            products(count)
            contexts.mapped(0)
        step_times(graph, 1)
        quiet = step_times(graph, 6)
        with feeding(endpoint):
            busy = step_times(graph, 8)
        again = step_times(graph, 4)
    contexts.session.close()
    base = np.concatenate([quiet, again])
    rows: list[Row] = []
    for name, q, must in (("median", 50, "2 %"), ("p99", 99, "10 %")):
        before, during = np.percentile(base, q), np.percentile(busy, q)
        rows.append(
            [f"step of {np.median(base):.2f} ms while the service refreshes: {name} longer by, %", 100 * (during / before - 1), must]
        )
    return rows


def engine(endpoint: str, name: str, *flags: str) -> subprocess.Popen[str]:
    """An engine process; see bench/gpu_engine.py."""
    command = [sys.executable, "-m", "bench.gpu_engine", *TRACES, "--endpoint", endpoint, "--engine", name, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def counted(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What an engine counted; fails if it failed."""
    out, err = process.communicate(timeout=120)
    if process.returncode != 0:
        raise SystemExit(f"an engine failed: {err[-3000:]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def kill_services(service: PrivateService, times: int, stop_at: float, back: list[float]) -> None:
    """Kills a service at random moments and starts it again, until it was killed so often; `back` gets how long each start took."""
    chance = random.Random(0)
    while len(back) < times and time.monotonic() < stop_at:
        time.sleep(chance.uniform(0.5, 2.5))
        service.kill()
        began = time.monotonic()
        service.spawn()
        service.wait_ready()
        back.append(time.monotonic() - began)
        time.sleep(3)


def kill_engines(endpoint: str, name: str, flags: list[str], times: int, stop_at: float, killed: list[bool]) -> None:
    """Starts engines and kills each once it is attached; `killed` gets whether it was alive until then."""
    chance = random.Random(1)
    while len(killed) < times and time.monotonic() < stop_at:
        victim = engine(endpoint, f"{name}-{len(killed)}", "--seconds", "600", "--no-check", *flags)
        assert victim.stderr is not None
        attached = any("attached" in line for line in victim.stderr)
        time.sleep(chance.uniform(0.2, 0.8))
        killed.append(attached and victim.poll() is None)
        victim.send_signal(signal.SIGKILL)
        victim.wait()


def replays(seconds: float, kills: int) -> list[Row]:
    """Engines that replay and check, while services and other engines are killed."""
    flags = (*SMALL, "--lease-ms", "3000", "--refresh-interval-ms", "2")
    with (
        PrivateService(flags, http=False) as busy,
        PrivateService(flags, http=False) as idle,
        PrivateService(flags, http=False) as steady,
    ):
        end = time.monotonic() + seconds
        for endpoint in (busy.endpoint, idle.endpoint, steady.endpoint):
            measured.fill(endpoint, workload.make(100_000, 1).documents)
        span = ["--seconds", str(seconds)]
        engines = {f"engine-{i}": engine(busy.endpoint, f"engine-{i}", *span, "--first", str(i), "--stride", "4") for i in range(4)}
        # A service of which nobody wants anything is killed while it is idle.
        engines["idle"] = engine(idle.endpoint, "idle", *span, "--quiet")
        engines["steady"] = engine(steady.endpoint, "steady", *span)
        back: dict[str, list[float]] = {"busy": [], "idle": []}
        killed: dict[str, list[bool]] = {"busy": [], "idle": []}
        time.sleep(8)
        threads = [
            threading.Thread(target=kill_services, args=(busy, kills, end - 15, back["busy"])),
            threading.Thread(target=kill_services, args=(idle, kills, end - 15, back["idle"])),
            threading.Thread(target=kill_engines, args=(steady.endpoint, "at-work", [], kills, end - 15, killed["busy"])),
            threading.Thread(
                target=kill_engines, args=(steady.endpoint, "at-rest", ["--rows", "1", "--quiet"], kills, end - 15, killed["idle"])
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {name: counted(process) for name, process in engines.items()}
    four = [found[f"engine-{i}"] for i in range(4)]
    total = {name: sum(one[name] for one in four) for name in ("checked", "not_whole", "differ", "torn", "row_steps", "tokens")}
    rows: list[Row] = [
        [f"4 engines x {seconds:.0f} s: drafts that differ, of {total['checked']:,} checked ({total['torn']} torn)", total["differ"], "0"],
        ["the same: tokens a step", total["tokens"] / total["row_steps"], "-"],
    ]
    for name, of in (("busy", four), ("idle", [found["idle"]])):
        starts = back[name]
        gap = max(one["longest_gap_s"] for one in of)
        rows.append([f"service killed {len(starts)} times, {name}: its slowest start, s", max(starts, default=0.0), "-"])
        rows.append(["the same: longest that an engine was unattached, beyond that, s", max(0.0, gap - max(starts, default=0.0)), "5"])
        rows.append(["the same: drafts that differ", sum(one["differ"] for one in of), "0"])
    for name in ("busy", "idle"):
        rows.append(
            [f"engine killed, {name}: times that it was alive until then", f"{sum(killed[name])} of {len(killed[name])}", str(kills)]
        )
    steady_found = found["steady"]
    rows.append(["engine beside them: drafts that differ", steady_found["differ"], "0"])
    rows.append(["engine beside them: attachments", steady_found["attachments"], "1"])
    return rows


def visibility(endpoint: str) -> list[Row]:
    """Milliseconds from a token that one engine commits until another drafts it."""
    buffers = []
    for _ in range(2):
        tokens = torch.zeros((1, 4096), dtype=torch.int32, device="cuda")
        buffers.append((tokens, torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1)))
    names = ("commits", "drafts")
    sessions = [
        DeviceSession(endpoint, engine=name, vocab_size=workload.VOCABULARY, tokens=b[0], lengths=b[1], max_batch=1, params=PARAMS)
        for name, b in zip(names, buffers, strict=True)
    ]
    order = torch.zeros(1, dtype=torch.int32, device="cuda")
    for session in sessions:
        if not session.wait_attached(30):
            raise SystemExit(f"not attached: {session.trouble}")
    chance = np.random.default_rng(0)
    lags = []
    with feeding(endpoint):
        for i in range(150):
            text = chance.integers(0, workload.VOCABULARY, 24).astype(np.int32)
            (a_tokens, a_lengths, _), (b_tokens, b_lengths, _) = buffers
            a_tokens[0, :24], b_tokens[0, :12] = torch.from_numpy(text), torch.from_numpy(text[4:16])
            a_lengths[0], b_lengths[0] = 4, 12
            sessions[0].start(0, text[:4], f"seen-{i}")
            sessions[1].start(0, text[4:16], f"asks-{i}", prompt_length=12)
            torch.cuda.synchronize()
            began = time.monotonic()
            a_lengths[0] = 24
            sessions[0].collect(order, sessions[0].propose(order))
            wanted = text[16:20].tolist()
            while sessions[1].propose(order).tokens[0, :4].tolist() != wanted and time.monotonic() < began + 2:
                pass
            lags.append(1000 * (time.monotonic() - began))
            for session in sessions:
                session.finish(0, discard=True)
    for session in sessions:
        session.close()
    return [["visible to another engine, p50 / p99, ms", f"{np.percentile(lags, 50):.1f} / {np.percentile(lags, 99):.1f}", "50"]]


def memory(endpoint: str, cycles: int) -> list[Row]:
    """Device memory of the service after engines came and went."""
    pid = measured.process_id(endpoint)
    used = []
    buffer = (torch.zeros((4, 256), dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(4))
    for i in range(cycles):
        attach(endpoint, f"cycle-{i}", buffer, 4).close()
        torch.cuda.synchronize()
        if i in (0, cycles - 1):
            used.append(measured.device_mib(pid))
    return [[f"device memory of the service after {cycles} attachments, MiB (after one: {used[0]})", used[-1], str(used[0])]]


@contextmanager
def under_mps() -> Iterator[dict[str, str] | None]:
    """An MPS daemon of its own, and the environment of its clients; None where there is no MPS."""
    control = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ['PATH']}:/usr/local/nvidia/bin")
    if control is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env=environment, check=True, timeout=20)
        if "CUDA_VISIBLE_DEVICES" in environment:
            # The daemon has numbered its own anew.
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        try:
            yield environment
        finally:
            subprocess.run([control], input=b"quit\n", env=environment, check=False, timeout=20)


def measured_by(module: str, flags: list[str], environment: dict[str, str]) -> list[Row]:
    """The rows that a benchmark writes in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", module, *flags, "--json", str(path)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)
        return [list(row.values()) for row in json.loads(path.read_text())["rows"]]


def handle() -> list[Row]:
    """Microseconds that drafting over HANDLE takes an engine's stream, without MPS and with it; see bench/handle.py."""
    rows: list[Row] = []
    with under_mps() as clients:
        for name, must, environment in (("without MPS", "350", dict(os.environ)), ("with MPS", "60", clients)):
            if environment is not None:
                for batch, stream_us, *_ in measured_by("bench.handle", [], environment):
                    rows.append([f"handle {name}, batch {batch}: a draft on the engine's stream, us", stream_us, must])
    return rows


def mps() -> list[Row]:
    """The step beside refreshes under MPS, and what the deaths of an engine and of the service do to the others there."""
    with under_mps() as environment:
        if environment is None:
            return []
        rows = measured_by("bench.sharing", ["--only", "refresh"], environment)
    found: list[Row] = [[f"with MPS: {what}", value, must] for what, value, must in rows]
    for victim in ("engine", "service"):
        for busy in (False, True):
            with under_mps() as environment:
                assert environment is not None
                found.append(death(victim, busy, environment))
    return found


def death(victim: str, busy: bool, environment: dict[str, str]) -> Row:
    """Kills an engine or the service, in the middle of its GPU work or while it has none; what becomes of the others."""
    flags = (*SMALL, "--lease-ms", "3000", "--refresh-interval-ms", "2")
    with patch.dict(os.environ, environment), PrivateService(flags, http=False) as service:
        measured.fill(service.endpoint, workload.make(100_000, 1).documents)
        # Without tokens that come in the service has nothing to do.
        quiet = () if busy else ("--quiet",)
        engines = [engine(service.endpoint, "beside", "--seconds", "15", *quiet)]
        if victim == "engine":
            engines.append(engine(service.endpoint, "killed", "--seconds", "600", "--no-check", *quiet))
        for process in engines:
            assert process.stderr is not None
            if not any("attached" in line for line in process.stderr):
                raise SystemExit("an engine under MPS did not attach")
        time.sleep(2)
        send = service.signal if victim == "service" else engines[-1].send_signal
        if not busy:
            send(signal.SIGSTOP)
            time.sleep(0.5)
        send(signal.SIGKILL)
        out, err = engines[0].communicate(timeout=60)
        if engines[0].returncode == 0:
            fate = f"decodes on, {json.loads(out.splitlines()[-1])['differ']} drafts differ"
        else:
            fate = f"ends: {next((line for line in reversed(err.splitlines()) if 'rror' in line), 'no error')[:80]}"
        if victim == "engine":
            time.sleep(3)
            code = service.exit_code
            fate += "; the service goes on" if code is None else f"; the service ends with {code}"
    return [
        f"with MPS: {victim} killed {'in the middle of its GPU work' if busy else 'while it has no GPU work'}: the other engine",
        fate,
        "-",
    ]


def main() -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=150, help="how long the four engines replay")
    options.add_argument("--kills", type=int, default=10, help="how often each is killed")
    options.add_argument("--cycles", type=int, default=100, help="attachments for the memory's sake")
    options.add_argument("--only", nargs="*", default=["cost", "refresh", "visibility", "memory", "handle", "mps", "replays"])
    arguments = options.parse_args()
    rows: list[Row] = []
    parts: dict[str, Callable[[str], list[Row]]] = {
        "cost": step_cost, "refresh": under_refresh, "visibility": visibility, "memory": lambda e: memory(e, arguments.cycles),
    }  # fmt: skip
    for flags, names in ((LARGE, ("cost", "refresh")), (SMALL, ("visibility", "memory"))):
        wanted = [name for name in names if name in arguments.only]
        if wanted:
            with PrivateService(flags, http=False) as service:
                measured.fill(service.endpoint, workload.make(4_000_000 if flags is LARGE else 200_000, 1).documents)
                for name in wanted:
                    print(f"{name} ...", file=sys.stderr, flush=True)
                    rows += parts[name](service.endpoint)
    if "handle" in arguments.only:
        rows += handle()
    if "mps" in arguments.only:
        rows += mps()
    if "replays" in arguments.only:
        rows += replays(arguments.seconds, arguments.kills)
    report("Sharing an index on a GPU", ["what", "measured", "must"], rows, arguments.json, [torch.cuda.get_device_name()])


if __name__ == "__main__":
    main()
