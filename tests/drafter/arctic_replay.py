"""A short replay of the sample traces in which every draft comes from arctic-inference, live or as it was recorded.

Needs neither draftd nor arctic-inference: who drafts, and who is told what was committed, is the caller's business.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

SAMPLES = Path(__file__).parents[2] / "samples"
FIXTURE = Path(__file__).parent / "data" / "arctic.json.gz"
DEPTH = 24
"""Of arctic's trees: match and draft together."""
K = 16
CONCURRENCY = 8
STEPS = 200


class Setting(NamedTuple):
    """A trace and the parameters that it is replayed with."""

    trace: str
    factor: float
    probability: float


SETTINGS = (
    Setting("gsm8k", 1.0, 0.1),
    Setting("humaneval", 2.0, 0.1),
    Setting("taubench", 4.0, 0.1),
    Setting("specbench_math_reasoning", 2.0, 0.0),
    Setting("gsm8k", 4.0, 0.4),
)


class ArcticDraft(NamedTuple):
    """What arctic answered: tokens, the sum of their probabilities, and the length of the match."""

    tokens: list[int]
    score: float
    match_length: int


class Request(NamedTuple):
    """A turn in flight: its number, its context, and what of its output is committed."""

    number: int
    context: list[int]
    output: list[int]


Draft = Callable[[list[Request]], list[ArcticDraft]]
"""Answers a draft for each request in flight, before anything of the step is committed."""


def replay(setting: Setting, draft: Draft, begin: Callable[[Request], None], commit: Callable[[Request, list[int], bool], None]) -> None:
    """Replays the first steps of a trace.

    Args:
        begin: Told of each request when it starts.
        commit: Told what a request commits, and whether that was its end.
    """
    waiting = _requests(setting.trace)
    active: list[tuple[Request, list[int]]] = []
    for _ in range(STEPS):
        for request, reference in islice(waiting, CONCURRENCY - len(active)):
            begin(request)
            active.append((request, reference))
        drafts = draft([request for request, _ in active])
        following = []
        for (request, reference), drafted in zip(active, drafts, strict=True):
            rest = reference[len(request.output) :]
            accepted = 0
            while accepted < min(len(drafted.tokens), len(rest) - 1) and drafted.tokens[accepted] == rest[accepted]:
                accepted += 1
            new = rest[: accepted + 1]
            request.output.extend(new)
            ended = len(new) == len(rest)
            commit(request, new, ended)
            if not ended:
                following.append((request, reference))
        active = following


def _requests(trace: str) -> Iterator[tuple[Request, list[int]]]:
    """Every turn of a trace as a request, with what it is going to generate."""
    number = 0
    with gzip.open(SAMPLES / f"{trace}.jsonl.gz", "rt") as lines:
        for line in lines:
            context: list[int] = []
            turns: list[dict[str, Any]] = json.loads(line)["turns"]
            for turn in turns:
                context = context + turn["input"]
                number += 1
                yield Request(number, context, []), turn["output"]
                context = context + turn["output"]


def recorded() -> dict[Setting, list[ArcticDraft]]:
    """The fixture: for each setting the drafts, in the order of the replay."""
    with gzip.open(FIXTURE, "rt") as file:
        return {Setting(*entry["setting"]): [ArcticDraft(*d) for d in entry["drafts"]] for entry in json.load(file)}
