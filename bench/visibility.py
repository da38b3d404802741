"""How soon can another engine draft a token? Time from append by engine A to the first draft of engine B that has it.

A commits 25,000 tokens a second on 32 rows; between them it appends probes, a marker that occurs nowhere else and a payload. B, another
process, asks for a draft after the marker until the payload comes. Half of the probes stay in flight, half are finished at once.
Exits 1 if the 99th percentile is above 50 ms.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.sharedctypes import SynchronizedArray

import numpy as np
from numpy.typing import NDArray

from bench.machine import parser, report
from bench.workload import VOCABULARY, make
from draftd.client import Drafter
from draftd.drafter.params import DraftParams
from draftd.server.replay.service import PrivateService

LIMIT_MS = 50.0
ROWS = 32
TICK_S = 0.02
PROBE_EVERY = 3
"""Ticks between probes."""
MARKER_TOKENS = 12
PAYLOAD_TOKENS = 4
"""As many as a draft may have: no shorter match of the marker can then score higher."""
POLL_S = 0.0005
STARTUP_TICKS = 100
PARAMS = DraftParams(k=PAYLOAD_TOKENS, max_depth=24, use_local=False, policy="tree")


def probe(number: int) -> NDArray[np.int32]:
    """The marker and the payload of a probe: random tokens, so that the marker occurs nowhere else."""
    return np.random.default_rng(1_000_003 + number).integers(0, VOCABULARY, MARKER_TOKENS + PAYLOAD_TOKENS, dtype=np.int32)


def drafter(endpoint: str, name: str, rows: int, transport: str) -> Drafter:
    """An attached, strict client."""
    made = Drafter(
        endpoint,
        engine=name,
        vocab_size=VOCABULARY,
        k=PARAMS.k,
        max_rows=rows,
        max_length=16_384,
        transport=transport,  # type: ignore[arg-type]
        timeout_ms=1000,
        params=PARAMS,
        strict=True,
    )
    if not made.wait_attached(120):
        raise SystemExit(f"engine {name} did not attach")
    return made


def write(endpoint: str, transport: str, rate: int, appended: SynchronizedArray[float], achieved: SynchronizedArray[float]) -> None:
    """Engine A: commits `rate` tokens a second until every probe is written."""
    documents = make(500_000, 1).documents
    step = max(1, round(rate * TICK_S / ROWS))
    probes = len(appended)
    with drafter(endpoint, "A", ROWS + probes, transport) as engine:
        position = dict.fromkeys(range(ROWS), 0)
        current = {row: documents[row] for row in range(ROWS)}
        following = ROWS
        for row in range(ROWS):
            engine.start(row, [1])
        committed = 0
        started = time.monotonic()
        for tick in range(STARTUP_TICKS + PROBE_EVERY * probes):
            for row in range(ROWS):
                want = step
                while want:
                    tokens = current[row][position[row] : position[row] + want]
                    engine.append(row, tokens)
                    want -= len(tokens)
                    position[row] += len(tokens)
                    if position[row] == len(current[row]):
                        engine.finish(row)
                        engine.start(row, [1])
                        current[row], position[row] = documents[following % len(documents)], 0
                        following += 1
                committed += step
            number, rest = divmod(tick - STARTUP_TICKS, PROBE_EVERY)
            if rest == 0 and number >= 0:
                engine.start(ROWS + number, [1])
                appended[number] = time.monotonic()
                engine.append(ROWS + number, probe(number))
                if number % 2:
                    engine.finish(ROWS + number)
            time.sleep(max(0.0, started + (tick + 1) * TICK_S - time.monotonic()))
        achieved[0] = committed / (time.monotonic() - started)


def read(endpoint: str, transport: str, writer: multiprocessing.process.BaseProcess, probes: int) -> list[float]:
    """Engine B: when it could draft each probe's payload, on the monotonic clock; NaN for what it never could."""
    seen = []
    with drafter(endpoint, "B", 1, transport) as engine:
        for number in range(probes):
            tokens = probe(number)
            engine.start(0, tokens[:MARKER_TOKENS])
            found = float("nan")
            while np.isnan(found) and writer.is_alive():
                drafts = engine.propose([0])
                if np.array_equal(drafts.tokens[0], tokens[MARKER_TOKENS:]):
                    found = time.monotonic()
                else:
                    time.sleep(POLL_S)
            seen.append(found)
            engine.finish(0, discard=True)
    return seen


def main() -> int:
    """Prints the table; 1 if tokens become visible too late."""
    arguments = parser(__doc__)
    arguments.add_argument("--probes", type=int, default=300)
    arguments.add_argument("--rate", type=int, default=25_000, help="tokens a second (default 25,000)")
    arguments.add_argument("--transport", default="mapped", choices=["mapped", "handle", "inline"])
    given = arguments.parse_args()
    context = multiprocessing.get_context("spawn")
    appended: SynchronizedArray[float] = context.Array("d", given.probes)
    achieved: SynchronizedArray[float] = context.Array("d", 1)
    with PrivateService(http=False) as running:
        arguments_of_writer = (running.endpoint, given.transport, given.rate, appended, achieved)
        writer = context.Process(target=write, args=arguments_of_writer, daemon=True)
        writer.start()
        seen = read(running.endpoint, given.transport, writer, given.probes)
        writer.join(60)
    lags = 1000 * (np.array(seen) - np.array(appended))
    in_flight, finished = lags[0::2], lags[1::2]
    rows = []
    for name, values in (("in flight", in_flight), ("finished", finished), ("all", lags)):
        never = int(np.isnan(values).sum())
        p50, p99, worst = np.nanpercentile(values, [50, 99, 100])
        rows.append((name, len(values), never, float(p50), float(p99), float(worst)))
    title = f"Visibility to another engine, {given.transport}, {achieved[0]:,.0f} tokens/s coming in"
    report(title, ("probes", "count", "never seen", "p50 ms", "p99 ms", "max ms"), rows, given.json)
    return int(rows[-1][2] > 0 or rows[-1][4] > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
