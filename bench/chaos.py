"""Do engines survive the service? Eight engine processes replay the samples while the service is killed with SIGKILL every 5 seconds.

It is started again at once, each time with an empty corpus. Exits 1 if an engine fails or its output is not the recorded one, or if no
fail-open was counted although the service was away.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from bench.machine import parser, report
from bench.workload import VOCABULARY, traces
from draftd.drafter.params import DraftParams
from draftd.server.replay.engine import EngineResult, EngineSettings
from draftd.server.replay.processes import EngineProcesses
from draftd.server.replay.service import PrivateService
from draftd.server.replay.trace import Session, load_trace

KILL_EVERY_S = 5.0
LONGEST_S = 600.0
STEP_MS = 5.0
"""Least time of a step, as a model would take."""


def workload(repeat: int) -> list[Session]:
    """The samples, `repeat` times over; the longest sessions first, so that the engines end together."""
    sessions = [session for path in traces() for session in load_trace(str(path))]
    ordered = sorted(sessions, key=lambda s: -s.length)
    return [replace(s, id=f"{number}:{s.id}") for number in range(repeat) for s in ordered]


def run(transport: str, engines: int, sessions: list[Session]) -> tuple[list[EngineResult], int, float]:
    """What the engines did, how often the service was killed, and how many seconds it took."""
    with PrivateService(http=False) as service:
        settings = [
            EngineSettings(
                endpoint=service.endpoint,
                name=f"engine-{i}",
                namespace="default",
                private=False,
                transport=transport,  # type: ignore[arg-type]
                params=DraftParams(),
                concurrency=4,
                step=False,
                step_ms=STEP_MS,
                timeout_ms=2.0,
                vocab_size=VOCABULARY,
                max_length=max(s.length for s in sessions),
            )
            for i in range(engines)
        ]
        kills = 0
        started = time.monotonic()
        with EngineProcesses(settings, sessions) as processes:
            last = time.monotonic()

            def tick() -> None:
                nonlocal kills, last
                # Engines first have to be there.
                if processes.tokens == 0:
                    last = time.monotonic()
                elif time.monotonic() - last >= KILL_EVERY_S:
                    service.kill()
                    service.spawn()
                    kills += 1
                    last = time.monotonic()

            results = processes.results(tick, LONGEST_S)
        service.wait_ready()
        return results, kills, time.monotonic() - started


def main() -> int:
    """Prints the table; 1 if an engine did not survive."""
    arguments = parser(__doc__)
    arguments.add_argument("--engines", type=int, default=8)
    arguments.add_argument("--repeat", type=int, default=1, help="times the samples are replayed (default 1)")
    arguments.add_argument("--transport", action="append", choices=["mapped", "handle", "inline"], help="default: mapped and inline")
    given = arguments.parse_args()
    rows: list[tuple[object, ...]] = []
    survived = True
    for transport in given.transport or ["mapped", "inline"]:
        sessions = workload(given.repeat)
        expected = sum(len(t.output) for s in sessions for t in s.turns)
        results, kills, seconds = run(transport, given.engines, sessions)
        tokens = sum(r.tokens for r in results)
        wrong = sum(r.wrong_outputs for r in results)
        fail_opens = sum(sum(r.fail_opens.values()) for r in results)
        steps = sum(r.steps for r in results)
        reasons = " ".join(f"{reason}={sum(r.fail_opens.get(reason, 0) for r in results)}" for reason in _reasons(results))
        exact = wrong == 0 and tokens == expected
        survived &= exact and kills > 0 and fail_opens > 0
        finished = f"{len(results)} of {given.engines}"
        rows.append((transport, finished, tokens, kills, seconds, tokens / steps, exact, fail_opens, reasons or "none"))
    columns = ("transport", "engines finished", "tokens", "kills", "seconds", "tokens/step", "outputs exact", "fail-opens", "by reason")
    report(f"SIGKILL of the service every {KILL_EVERY_S:.0f} s", columns, rows, given.json)
    return int(not survived)


def _reasons(results: list[EngineResult]) -> list[str]:
    return sorted({reason for r in results for reason, count in r.fail_opens.items() if count})


if __name__ == "__main__":
    sys.exit(main())
