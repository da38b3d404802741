"""What bench.vllm_replicas makes of its runs: a table of speeds, and what each must reach."""

from __future__ import annotations

import statistics
from typing import Any

from bench.vllm_worker import COUNTERS

NONE, NGRAM, COLD, SERVED, TWICE = (
    "no speculation",
    "ngram_gpu",
    "draftd, nothing known",
    "draftd on B, only A has served it",
    "draftd, prompts seen twice",
)
TREE, ADAPTIVE, ADAPTIVE_TREE = (f"{SERVED}, {how}" for how in ("rule tree", "adaptive", "rule tree, adaptive"))
RULES = ((SERVED, TREE), (ADAPTIVE, ADAPTIVE_TREE))
"""What the rule `calibrated` drafts for, and the same with `tree`, which must not be faster."""
GAIN_ON_NONE, GAIN_ON_NGRAM, COLD_ON_NGRAM = 2.0, 3.0, 0.97


class Table:
    """Tokens a second by what drafts and by batch size, and what each run must be.

    Args:
        rules_only: Only rules are compared.
    """

    def __init__(self, *, rules_only: bool = False) -> None:
        self.rules_only = rules_only
        self.speeds: dict[tuple[str, int], list[float]] = {}
        self.accepted: dict[tuple[str, int], list[float]] = {}
        self.step_ms: dict[tuple[str, int], list[float]] = {}
        self.same: dict[tuple[str, int], list[float]] = {}

    def add(self, kind: str, batch: int, answer: dict[str, Any], plain: list[list[int]]) -> None:
        """A run, and what no speculation has answered to the same prompts."""
        outputs = answer["outputs"]
        key = (kind, batch)
        self.speeds.setdefault(key, []).append(sum(map(len, outputs)) / answer["seconds"])
        self.step_ms.setdefault(key, []).append(answer["step_ms"])
        drafts, _, accepted = (answer["counters"][name] for name in COUNTERS)
        self.accepted.setdefault(key, []).append(1 + accepted / drafts if drafts else 1.0)
        self.same.setdefault(key, []).append(sum(a == b for a, b in zip(outputs, plain, strict=True)) / len(plain))

    def gain(self, kind: str, other: str, batch: int) -> float:
        """How many times as fast one kind is as another: the median of the rounds, whose runs are next to one another in time."""
        return statistics.median(a / b for a, b in zip(self.speeds[kind, batch], self.speeds[other, batch], strict=False))

    def fastest(self, kind: str, other: str, batch: int) -> float:
        """How many times as fast one kind is as another in the fastest quarter of their runs, by their means.

        vLLM's interpreter decides how long a step of a small model takes, and on a machine that others use too, runs of it differ by half.
        Nothing makes a run faster than it is, so the fastest ones are those that were not disturbed.
        """
        a, b = (
            statistics.mean(sorted(speeds)[-max(1, len(speeds) // 4) :]) for speeds in (self.speeds[kind, batch], self.speeds[other, batch])
        )
        return a / b

    def rules(self) -> list[str]:
        """How `calibrated` compares with `tree`."""
        return [
            f"batch {batch}: {kind} is {self.fastest(kind, other, batch):.2f} x {other} in the fastest quarter of {len(speeds)} runs, "
            f"{self.gain(kind, other, batch):.2f} x in their median"
            for kind, other in RULES
            for (of, batch), speeds in self.speeds.items()
            if of == kind and (other, batch) in self.speeds
        ]

    def rows(self) -> list[tuple[object, ...]]:
        """One a kind and batch size."""
        made: list[tuple[object, ...]] = []
        for (kind, batch), speeds in sorted(self.speeds.items(), key=lambda item: item[0][1]):
            speed = statistics.median(speeds)
            spread = (max(speeds) - min(speeds)) / speed
            on_none, on_ngram = (self.gain(kind, other, batch) if (other, batch) in self.speeds else "-" for other in (NONE, NGRAM))
            same = statistics.mean(self.same[kind, batch])
            accepted, step_ms = (statistics.median(of[kind, batch]) for of in (self.accepted, self.step_ms))
            made.append((kind, batch, speed, f"{spread:.0%}", on_none, on_ngram, accepted, step_ms, f"{same:.0%}"))
        return made

    def missed(self) -> list[str]:
        """What did not reach what it must."""
        found = []
        for batch in sorted({batch for _, batch in self.speeds}):
            for kind, other, least in ((SERVED, NONE, GAIN_ON_NONE), (SERVED, NGRAM, GAIN_ON_NGRAM), (COLD, NGRAM, COLD_ON_NGRAM)):
                if {(kind, batch), (other, batch)} <= self.speeds.keys():
                    if (gain := self.gain(kind, other, batch)) < least:
                        found.append(f"batch {batch}: {kind} is {gain:.2f} x {other}, must be {least:g}")
                elif not self.rules_only:
                    found.append(f"batch {batch}: {kind} was not measured")
            for kind, other in RULES:
                if {(kind, batch), (other, batch)} <= self.speeds.keys() and (gain := self.fastest(kind, other, batch)) < 1:
                    found.append(f"batch {batch}: {kind} is {gain:.2f} x {other}, must be 1")
        return found
