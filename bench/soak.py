"""Does a service leak? Eight engines replay the samples over every transport, attach, detach, and are killed now and then, for an hour.

Exits 1 if the service's memory, files, threads or blocks grew after the first fifth of the time, if anything of an engine stayed behind,
or if an engine that was not killed failed or had another output than the recorded one.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import cast

from bench import service as measured
from bench.footprint import Footprint
from bench.machine import parser, report
from bench.workload import VOCABULARY, traces
from draftd.client.config import TransportName
from draftd.drafter.params import DraftParams
from draftd.drafter.shm import ShmDir
from draftd.server.replay.engine import EngineResult, EngineSettings, replay_sessions
from draftd.server.replay.service import PrivateService
from draftd.server.replay.trace import Session, load_trace

GROWTH = Footprint(private_mib=32, shm_mib=32, shm_files=8, files=16, threads=8, children=0)
"""Most that the service may grow after the first fifth of the time."""
KILLED_SHARE = 0.25
"""Share of the engines that are killed before they are through."""
SESSIONS = 16
"""Sessions that one engine replays, from its attachment to its end."""
LEASE_MS = 3000
QUOTA_TOKENS = 131_072
"""Full within the first minute, so that the corpus grows no more."""
STEP_MS = 5.0
TRANSPORTS = ("mapped", "inline", "handle")
_context = multiprocessing.get_context("spawn")


class _Free:
    def drafted(self) -> None:
        pass

    def committed(self, active: bool, tokens: int) -> bool:
        return active


def _engine(answer: Connection, settings: EngineSettings, sessions: list[Session]) -> None:
    """What an engine process does."""
    # On a crowded machine drafts are late now and then; the fail-opens are the engine's business.
    logging.getLogger("draftd.client").setLevel(logging.ERROR)
    try:
        answer.send(replay_sessions(settings, sessions, _Free()))
    except Exception as error:  # noqa: BLE001 - reported by the parent process
        answer.send(f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class Slot:
    """An engine process; `killed_at` is when it is to be killed on the monotonic clock, or infinity."""

    process: SpawnProcess
    answer: Connection
    killed_at: float

    def end(self) -> EngineResult | str | None:
        """What came of an engine that has ended; None of one that was killed."""
        killed = self.process.exitcode == -signal.SIGKILL
        result = None if killed else (self.answer.recv() if self.answer.poll() else f"ended with exit code {self.process.exitcode}")
        self.process.close()
        self.answer.close()
        return cast("EngineResult | str | None", result)


@dataclass(slots=True)
class Soak:
    """What happened.

    Attributes:
        wrong: What should not have happened.
    """

    finished: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    before: Footprint | None = None
    after: Footprint | None = None


class _Engines:
    """Keeps so many engines at work."""

    def __init__(self, count: int, endpoint: str, seed: int, soak: Soak) -> None:
        self._random = random.Random(seed)
        self._endpoint = endpoint
        self._soak = soak
        self._sessions = [session for path in traces() for session in load_trace(str(path))]
        self._longest = max(session.length for session in self._sessions)
        self._started = 0
        self._slots = [self._start() for _ in range(count)]

    def _start(self) -> Slot:
        number, rng = self._started, self._random
        self._started += 1
        settings = EngineSettings(
            endpoint=self._endpoint,
            name=f"engine-{number}",
            namespace=f"soak-{number % 3}",
            private=False,
            transport=cast(TransportName, TRANSPORTS[number % len(TRANSPORTS)]),
            params=DraftParams(),
            concurrency=4,
            step=False,
            step_ms=STEP_MS,
            timeout_ms=50.0,
            vocab_size=VOCABULARY,
            max_length=self._longest,
        )
        receiving, sending = _context.Pipe(duplex=False)
        process = _context.Process(target=_engine, args=(sending, settings, rng.sample(self._sessions, SESSIONS)), daemon=True)
        process.start()
        sending.close()
        life_s = rng.uniform(3, 20) if rng.random() < KILLED_SHARE else float("inf")
        return Slot(process, receiving, time.monotonic() + life_s)

    def tick(self, replace: bool) -> int:
        """Kills whose time it is, and replaces who has ended if `replace`; answers how many are at work."""
        going = []
        for slot in self._slots:
            if slot.process.is_alive() and not slot.answer.poll():
                if time.monotonic() >= slot.killed_at:
                    slot.process.kill()
                going.append(slot)
                continue
            slot.process.join()
            self._note(slot.end())
            if replace:
                going.append(self._start())
        self._slots = going
        return len(going)

    def kill(self) -> None:
        """Ends all that is left."""
        for slot in self._slots:
            slot.process.kill()
            slot.process.join()

    def _note(self, result: EngineResult | str | None) -> None:
        if result is None:
            self._soak.killed += 1
        elif isinstance(result, str):
            self._soak.wrong.append(f"an engine failed: {result}")
        else:
            self._soak.finished[result.transport] += 1
            self._soak.tokens += result.tokens
            if result.wrong_outputs:
                self._soak.wrong.append(f"{result.wrong_outputs} outputs are not the recorded ones")


def run(engines: int, seconds: float, seed: int, shm: Path) -> Soak:
    """Runs engines for a time and answers what happened; `shm` is a directory in shared memory for the service and the engines."""
    soak = Soak()
    os.environ["DRAFTD_SHM_ROOT"] = str(shm)
    flags = ["--lease-ms", str(LEASE_MS), "--quota-tokens", str(QUOTA_TOKENS), "--recent-tokens", "16384", "--live-tokens", "16384"]
    with PrivateService([*flags, "--shm-root", str(shm), "--log-level", "error"]) as running:
        pid = measured.process_id(running.endpoint)
        started = time.monotonic()
        working = _Engines(engines, running.endpoint, seed, soak)
        try:
            while (elapsed := time.monotonic() - started) < seconds:
                working.tick(replace=True)
                if soak.before is None and elapsed >= seconds / 5:
                    soak.before = Footprint.of(pid, shm / running_instance(shm))
                time.sleep(0.2)
            while working.tick(replace=False):
                time.sleep(0.2)
        finally:
            working.kill()
        # Leases of those that were killed run out, and a refresh takes what they left.
        time.sleep(2 * LEASE_MS / 1000)
        soak.after = Footprint.of(pid, shm / running_instance(shm))
        _look_for_leftovers(running.http_url, shm, soak)
    if left := [path.name for path in shm.iterdir() if path.name != "engines"]:
        soak.wrong.append(f"the service left {left} in shared memory")
    return soak


def running_instance(shm: Path) -> str:
    """Name of the directory of the one service that runs below `shm`."""
    (name,) = (path.name for path in shm.iterdir() if path.is_dir() and path.name != "engines")
    return name


def _look_for_leftovers(http: str, shm: Path, soak: Soak) -> None:
    with urllib.request.urlopen(f"{http}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    for name in ("draftd_attachments", "draftd_corpus_open_documents", "draftd_background_errors_total", "draftd_refresh_errors_total"):
        total = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        if total:
            soak.wrong.append(f"{name} is {total:.0f}")
    if blocks := list(shm.glob("*/rows-*")):
        soak.wrong.append(f"{len(blocks)} row blocks are left")
    # An engine that shares tensors removes, as it starts, those of engines that were killed.
    ShmDir.create(shm / "engines").close()
    if left := list((shm / "engines").iterdir()):
        soak.wrong.append(f"tensors of {len(left)} engines are left")


def main() -> int:
    """Prints the table; 1 if the service leaks or an engine failed."""
    arguments = parser(__doc__)
    arguments.add_argument("--engines", type=int, default=8)
    arguments.add_argument("--seconds", type=float, default=3600.0, help="how long (default 3600)")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    shm = Path(tempfile.mkdtemp(prefix="draftd-soak-", dir="/dev/shm"))
    try:
        soak = run(given.engines, given.seconds, given.seed, shm)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    assert soak.before is not None
    assert soak.after is not None
    failures = soak.wrong + soak.after.growth(soak.before, GROWTH)
    columns = ("seconds", "finished", "killed", "tokens", *(c for name in Footprint.__slots__ for c in (name, "then")), "sound")
    pairs = [getattr(f, name) for name in Footprint.__slots__ for f in (soak.before, soak.after)]
    by_transport = ", ".join(f"{name} {count}" for name, count in sorted(soak.finished.items()))
    rows = [(given.seconds, sum(soak.finished.values()), soak.killed, soak.tokens, *pairs, not failures)]
    report(f"{given.engines} engines that come, go and are killed", columns, rows, given.json, [f"finished: {by_transport}", *failures])
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
