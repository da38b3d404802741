"""What the benchmarks draft from: documents and contexts made from the sample traces, the same on every run and for every peer.

The samples hold about 220,000 output tokens; a larger corpus repeats them with tokens replaced at random, so that copies are alike but
seldom equal, as a model's answers to the same task are.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "samples"
VOCABULARY = 128_256
REPLACED_SHARE = 0.1
"""Share of tokens replaced in a copy."""


def traces(folder: Path | None = None) -> list[Path]:
    """The trace files of a folder, the repository's samples by default.

    Raises:
        SystemExit: There are none.
    """
    found = sorted((folder or SAMPLES).glob("*.jsonl.gz"))
    if not found:
        raise SystemExit(f"no *.jsonl.gz in {folder}")
    return found


def sessions(path: Path) -> list[dict[str, Any]]:
    """The sessions of a trace, in its order."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Workload:
    """documents: int32 arrays to draft from. contexts: int32 arrays, prompt and answer so far, to draft for."""

    documents: list[NDArray[np.int32]]
    contexts: list[NDArray[np.int32]]

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(len(d) for d in self.documents)

    def save(self, path: Path) -> None:
        """Writes it as .npz, for a peer that runs in another environment."""
        np.savez(path, **_packed("documents", self.documents), **_packed("contexts", self.contexts))  # type: ignore[arg-type]


def _packed(name: str, arrays: list[NDArray[np.int32]]) -> dict[str, NDArray[np.generic]]:
    return {f"{name}_tokens": np.concatenate(arrays), f"{name}_lengths": np.array([len(a) for a in arrays])}


def make(corpus_tokens: int, contexts: int, max_context: int = 4096, seed: int = 0) -> Workload:
    """At least `corpus_tokens` tokens of documents, and `contexts` contexts of at most `max_context` tokens cut from the originals."""
    turns = [turn for path in traces() for turn in _turns(path)]
    rng = np.random.default_rng(seed)
    documents: list[NDArray[np.int32]] = []
    held = 0
    for round_ in range(corpus_tokens + 1):
        if held >= corpus_tokens:
            break
        for _, output in turns:
            document = output.copy()
            if round_:
                replaced = rng.random(len(document)) < REPLACED_SHARE
                document[replaced] = rng.integers(0, VOCABULARY, int(replaced.sum()), dtype=np.int32)
            documents.append(document)
            held += len(document)
    chooser = random.Random(seed)
    cut = []
    for prompt, output in chooser.sample(turns, min(contexts, len(turns))):
        cut.append(np.concatenate([prompt, output[: chooser.randrange(len(output))]])[-max_context:])
    return Workload(documents, cut)


def _turns(path: Path) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Every turn as (everything before its output, its output)."""
    for session in sessions(path):
        context: list[int] = []
        for turn in session["turns"]:
            context += turn["input"]
            yield np.array(context, np.int32), np.array(turn["output"], np.int32)
            context += turn["output"]
