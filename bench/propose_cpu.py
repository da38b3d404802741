"""What does a draft cost on the CPU? Time of propose a request in a corpus of 1M tokens, beside arctic-inference's `speculate`.

Both hold the same documents and draft for the same contexts. "client" is `draftd.client` with the mapped transport, which is what an
engine calls; "core" is the drafting code below it. Compared is the fastest of many passes over all contexts, since whatever else runs on
the machine only adds. Exits 1 if the client at 16 rows a call is slower than the peer with the policy `tree`, which is the peer's rule, or
takes more than twice as long with `calibrated`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import peers, service
from bench.machine import parser, report
from bench.workload import VOCABULARY, Workload, make
from draftd.client import Drafter
from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import IndexReader
from draftd.drafter.rows import RowBlock
from draftd.server.replay.service import PrivateService

BATCHES = (1, 16, 64)
MUST_BATCH = 16
PASSES = 25
PARAMS = DraftParams(k=16, max_depth=24, spec_factor=2.0, min_token_prob=0.1, policy="tree")
POLICIES = {"tree": PARAMS, "calibrated": DraftParams(k=16, tau=0.1)}
MOST = {"tree": 1.0, "calibrated": 2.0}
"""Of the peer's time."""

Figures = dict[tuple[str, int], tuple[float, float, float]]
"""passes_us by policy and rows a call."""


def passes_us(propose: Callable[[np.ndarray], Drafts], contexts: int, batch: int) -> tuple[float, float, float]:
    """Fastest pass and median of the passes, in microseconds a request, and tokens drafted a request."""
    groups = [np.arange(i, min(i + batch, contexts), dtype=np.int32) for i in range(0, contexts, batch)]
    times = []
    for _ in range(PASSES + 1):
        started = time.perf_counter()
        drafts = [propose(rows) for rows in groups]
        times.append(1e6 * (time.perf_counter() - started) / contexts)
    drafted = sum(int(d.counts.sum()) for d in drafts) / contexts
    # The first pass warms both up.
    return min(times[1:]), float(np.median(times[1:])), drafted


def each(propose: Callable[[np.ndarray, DraftParams], Drafts], contexts: int) -> Figures:
    """passes_us of every policy and batch."""
    return {
        (name, batch): passes_us(lambda rows, params=params: propose(rows, params), contexts, batch)  # type: ignore[misc]
        for name, params in POLICIES.items()
        for batch in BATCHES
    }


def core(workload: Workload, max_length: int) -> Figures:
    """The drafting core's figures."""
    with tempfile.TemporaryDirectory(prefix="draftd-bench-", dir="/dev/shm") as root:
        corpus = Corpus(CorpusConfig(shm_root=Path(root)))
        corpus.start()
        try:
            corpus.ensure_namespace("default", VOCABULARY)
            for number, document in enumerate(workload.documents):
                corpus.ingest("default", f"document-{number}", 0, document, True)
            if not corpus.settle():
                raise SystemExit("the corpus did not settle")
            contexts = len(workload.contexts)
            block = RowBlock.open(corpus.rows.attach("bench", contexts, max_length, ["default"]))
            for slot, context in enumerate(workload.contexts):
                block.start(slot, f"context-{slot}", context, len(context), 0, False)
            reader = IndexReader.open(corpus.control_spec(), {"default": corpus.index_spec("default")}, block)
            return each(lambda slots, params: reader.propose(slots, None, params), contexts)
        finally:
            corpus.close()


def client(workload: Workload, max_length: int) -> Figures:
    """Those of draftd.client, mapped."""
    contexts = len(workload.contexts)
    with PrivateService(http=False) as running:
        service.fill(running.endpoint, workload.documents)
        with Drafter(
            running.endpoint,
            engine="bench",
            vocab_size=VOCABULARY,
            max_rows=contexts,
            max_length=max_length,
            transport="mapped",
            strict=True,
        ) as drafter:
            if not drafter.wait_attached(60):
                raise SystemExit("the client did not attach")
            for row, context in enumerate(workload.contexts):
                drafter.start(row, context)
            return each(drafter.propose, contexts)


def main() -> int:
    """Prints the table; 1 if it must be faster."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=1_000_000, help="least tokens of the corpus (default 1,000,000)")
    arguments.add_argument("--contexts", type=int, default=256)
    given = arguments.parse_args()
    workload = make(given.tokens, given.contexts)
    max_length = 1 + max(len(c) for c in workload.contexts)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        workload.save(Path(file.name))
        limits = (PARAMS.k, PARAMS.max_depth, PARAMS.spec_factor, PARAMS.min_token_prob)
        peer = peers.arctic("speculate", file.name, *limits)
    ours = {"core": core(workload, max_length), "client": client(workload, max_length)}
    rows: list[tuple[object, ...]] = []
    for name, figures in ours.items():
        for (policy, batch), (fastest, median, drafted) in figures.items():
            rows.append((f"draftd {name}, {policy}", batch, fastest, median, drafted, fastest / peer["us"] if peer else None))
    if peer:
        rows.append(("arctic speculate", 1, peer["us"], peer["us_median"], peer["drafted"], 1.0))
    length = sum(len(c) for c in workload.contexts) / len(workload.contexts)
    title = f"CPU propose, {workload.tokens:,} tokens of corpus, {len(workload.contexts)} contexts of {length:.0f} tokens on average"
    columns = ("drafter", "rows a call", "µs a request", "median pass", "drafted a request", "of arctic")
    report(title, columns, rows, given.json, [] if peer else [peers.MISSING])
    return int(peer is not None and any(ours["client"][policy, MUST_BATCH][0] > most * peer["us"] for policy, most in MOST.items()))


if __name__ == "__main__":
    sys.exit(main())
