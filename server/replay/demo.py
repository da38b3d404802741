"""`make demo`: what four engines gain when they draft from one corpus instead of from a silo each, on the sample traces.

Tokens repeat exactly, for the engines go in lockstep and wait after each step until what was committed can be drafted from; steps nearly,
since when they draft by what others have taught is a matter of timing.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftd.server.replay.cli import replay_with_progress
from draftd.server.replay.processes import EngineFailed
from draftd.server.replay.run import ReplaySettings, Sharing
from draftd.server.replay.service import PrivateService, ServiceFailed
from draftd.server.replay.trace import TraceError, load_trace

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
ENGINES = 4
CONCURRENCY = 8
SESSIONS = 240
TOKENS = 50_000
"""Of each trace, the first sessions are replayed: at most so many, with at most so many output tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one trace, with a corpus for each engine and with one for all."""

    trace: str
    sessions: int
    silo: dict[str, Any]
    shared: dict[str, Any]

    @property
    def exact(self) -> bool:
        """All outputs were the recorded ones."""
        return bool(self.silo["outputs_exact"] and self.shared["outputs_exact"])


def demo(samples: Path = SAMPLES, limit: int = SESSIONS) -> int:
    """Runs the demo on the first sessions of every trace in a directory, at most `limit` of each; the exit code."""
    console, errors = Console(), Console(stderr=True)
    started = time.monotonic()
    paths = sorted(samples.glob("*.jsonl*"))
    if not paths:
        errors.print(f"draftd: there are no traces in {samples}; the demo runs in a source checkout")
        return 1
    console.print(
        f"{ENGINES} engines replay recorded sessions, {CONCURRENCY} at a time each: first with a corpus each, then with one for all.\n"
        "The service and the engine processes are real; only the model is replaced by its recorded answers. One or two minutes."
    )
    try:
        with errors.status("starting a service (the first start on a machine compiles kernels)"):
            service = PrivateService(["--log-level", "warning"])
            service.start()
        with service:
            compared = [_compare(errors, service, path, limit) for path in paths]
    except (TraceError, ServiceFailed, EngineFailed) as error:
        errors.print(f"draftd: {error}")
        return 1
    _print(console, compared, time.monotonic() - started)
    return 0 if all(one.exact for one in compared) else 1


def _compare(console: Console, service: PrivateService, path: Path, limit: int) -> Comparison:
    loaded = load_trace(str(path), limit)
    so_far = accumulate(sum(len(turn.output) for turn in session.turns) for session in loaded)
    sessions = [session for session, tokens in zip(loaded, so_far, strict=True) if tokens <= TOKENS]
    name = path.name.split(".")[0]

    def replay(sharing: Sharing) -> dict[str, Any]:
        settings = ReplaySettings(
            engines=ENGINES, sharing=sharing, transport="mapped", concurrency=CONCURRENCY, step=True, namespace=f"{name}/{sharing}"
        )
        return replay_with_progress(console, settings, sessions, service.endpoint, service.http_url, f"{name}, {sharing}")

    return Comparison(name, len(sessions), replay("silo"), replay("shared"))


def _print(console: Console, compared: list[Comparison], seconds: float) -> None:
    table = Table(title="\nTokens that one step of the model commits; without drafts it is 1", title_justify="left", title_style="bold")
    table.add_column("trace", no_wrap=True)
    for column in ("sessions", "silos", "shared", "gain", "outputs"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in compared:
        silo, shared = one.silo["tokens_per_step"], one.shared["tokens_per_step"]
        exact = "exact" if one.exact else "WRONG"
        table.add_row(one.trace, str(one.sessions), f"{silo:.2f}", f"{shared:.2f}", f"{shared / silo - 1:+.1%}", exact)
    console.print(table)
    before, after = (sum(figures["steps"] for figures in runs) for runs in zip(*((c.silo, c.shared) for c in compared), strict=True))
    tokens = sum(one.shared["tokens"] for one in compared)
    console.print(
        f"With one corpus for all engines, the same {tokens:,} tokens took {1 - after / before:.1%} fewer steps of the model than with a"
        f" corpus each ({after:,} instead of {before:,}), and every output stayed what it was.\nIt helps most where engines work on related"
        f" tasks; drafting for {CONCURRENCY} requests took {_propose_us(compared):.0f} us of CPU a step here. [dim]({seconds:.0f} s)[/dim]"
    )


def _propose_us(compared: list[Comparison]) -> float:
    """Median time of a propose with the shared corpus, over the traces."""
    times = sorted(one.shared["propose_us"]["p50"] for one in compared)
    return float(times[len(times) // 2])


if __name__ == "__main__":
    sys.exit(demo())
