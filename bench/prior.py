"""Makes the calibration that new namespaces start with, drafter/prior.npz, from two sample traces replayed together."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bench.policy import Replay
from bench.quality import K
from bench.workload import SAMPLES
from draftd.drafter import policy
from draftd.drafter.params import DraftParams
from draftd.server.replay.trace import Session, load_trace

TRACES = ("gsm8k", "taubench")
TAU = 0.03
"""Low, so that what is seldom drafted is learned too."""


def interleaved(traces: list[list[Session]]) -> list[Session]:
    """All sessions, those of every trace spread evenly over the whole."""
    placed = [((i + 0.5) / len(trace), number, session) for number, trace in enumerate(traces) for i, session in enumerate(trace)]
    return [session for _, _, session in sorted(placed, key=lambda p: p[:2])]


def main() -> None:
    """Replays, and writes the prior."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--traces", type=Path, default=SAMPLES, metavar="DIR", help="folder with both traces; default: the samples")
    arguments.add_argument("--out", type=Path, default=Path(policy.__file__).with_name("prior.npz"))
    given = arguments.parse_args()
    sessions = interleaved([load_trace(str(given.traces / f"{name}.jsonl.gz")) for name in TRACES])
    outcome = Replay(sessions, DraftParams(k=K, tau=TAU), policy.blank_calibration().tobytes()).run()
    np.savez_compressed(given.out, calibration=policy.as_prior(np.frombuffer(outcome.calibration, np.float32)))
    print(f"{outcome.tokens:,} tokens, {outcome.tokens_per_step:.3f} tokens/step: {given.out}, {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
