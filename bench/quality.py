"""How good are the drafts? tokens/step and drafted/step of `draftd replay --visibility step` beside arctic-inference on the same traces.

One engine, 16 sessions at a time, k = 16, depth 24. With the peer at hand, exits 1 where draftd has fewer tokens/step than 99 % of the
peer's, or drafts more, counted to two decimals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import peers
from bench.machine import parser, report
from bench.workload import traces

K = 16
DEPTH = 24
PROBABILITY = 0.1
CONCURRENCY = 16
FACTORS = (1.0, 2.0, 4.0)
SHARE = 0.99
"""Least tokens/step, as a share of the peer's."""


def replay(trace: Path, factor: float, transport: str) -> dict[str, Any]:
    """The JSON of `draftd replay` at one operating point."""
    # fmt: off
    command = [
        sys.executable, "-m", "draftd.server.main", "replay", str(trace), "--json",
        "--engines", "1", "--corpus", "shared", "--visibility", "step", "--transport", transport, "--concurrency", str(CONCURRENCY),
        "--k", str(K), "--max-depth", str(DEPTH), "--policy", "tree", "--spec-factor", str(factor), "--min-token-prob", str(PROBABILITY),
    ]
    # fmt: on
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Prints the table; 1 if an operating point misses what it must reach."""
    arguments = parser(__doc__)
    arguments.add_argument("--traces", type=Path, metavar="DIR", help="folder of *.jsonl.gz; default: the samples")
    arguments.add_argument("--only", action="append", default=[], metavar="NAME", help="only traces of this name")
    arguments.add_argument("--transport", default="mapped", choices=["mapped", "handle", "inline"])
    given = arguments.parse_args()
    rows: list[tuple[object, ...]] = []
    missed = []
    for trace in traces(given.traces):
        name = trace.name.removesuffix(".jsonl.gz")
        if given.only and name not in given.only:
            continue
        for factor in FACTORS:
            ours = replay(trace, factor, given.transport)
            peer = peers.arctic("replay", trace, K, DEPTH, factor, PROBABILITY, CONCURRENCY)
            tokens, drafted = float(ours["tokens_per_step"]), float(ours["drafted_per_step"])
            if peer is None:
                rows.append((name, factor, tokens, drafted, None, None, None))
                continue
            reached = tokens >= SHARE * peer["tokens_per_step"] and round(drafted, 2) <= round(peer["drafted_per_step"], 2)
            if not reached:
                missed.append(f"{name} at factor {factor:g}")
            rows.append((name, factor, tokens, drafted, peer["tokens_per_step"], peer["drafted_per_step"], "yes" if reached else "NO"))
    columns = ("trace", "factor", "tokens/step", "drafted/step", "arctic tokens/step", "arctic drafted/step", "reached")
    notes = [f"missed: {', '.join(missed)}"] if missed else []
    if peers.arctic_python() is None:
        notes.append(peers.MISSING)
    report(f"Draft quality, {given.transport}, k {K}, depth {DEPTH}, {CONCURRENCY} sessions at a time", columns, rows, given.json, notes)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
