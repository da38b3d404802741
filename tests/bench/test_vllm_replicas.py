"""The vLLM benchmark's own parts: its prompts, and what it makes of runs."""

from __future__ import annotations

from typing import Any

import pytest

from bench.prompts import KINDS, prompts, questions, templates
from bench.vllm_replicas import _first_difference
from bench.vllm_table import ADAPTIVE, ADAPTIVE_TREE, COLD, NGRAM, NONE, SERVED, TREE, Table
from bench.vllm_worker import COUNTERS


def test_prompts_are_the_same_each_time_and_different_within_a_run() -> None:
    made = prompts(600)
    assert made == prompts(600)
    assert prompts(3, 300) == made[300:303]
    assert all(len(set(made[first : first + 126])) == 126 for first in range(0, 474, 79))
    assert len(set(made[::2])) == 300
    assert set(made[1::2]) == set(questions())
    assert templates(5, 50) == made[100:110:2]
    assert all(len(text) > 300 for text in made[: 2 * len(KINDS) : 2])


def answer(seconds: float, outputs: list[list[int]], accepted: int = 0) -> dict[str, Any]:
    return {"seconds": seconds, "step_ms": 2.5, "outputs": outputs, "counters": dict(zip(COUNTERS, (10, 80, accepted), strict=True))}


def table(cold: float, served: float) -> Table:
    """Runs of one batch size with these gains over ngram_gpu, which has one of 1.5 over no speculation."""
    made = Table()
    plain = [[1] * 100, [2] * 50]
    for kind, seconds in ((NONE, 1.5), (NGRAM, 1.0), (COLD, 1 / cold), (SERVED, 1 / served)):
        for _ in range(3):
            made.add(kind, 16, answer(seconds, plain, 40), plain)
    return made


def test_gains_are_held_to_what_they_must_be() -> None:
    assert table(1.0, 3.1).missed() == []
    assert len(table(0.96, 3.1).missed()) == 1
    assert len(table(1.0, 2.9).missed()) == 1
    assert len(table(1.0, 1.2).missed()) == 2


def test_what_was_not_measured_is_missed() -> None:
    answers = answer(1.0, [[1] * 100])
    for rules_only, missed in ((False, 3), (True, 0)):
        made = Table(rules_only=rules_only)
        made.add(TREE, 16, answers, answers["outputs"])
        assert len(made.missed()) == missed


def test_gains_are_of_runs_of_the_same_round() -> None:
    """A machine that is slow for a while is so for both."""
    made, plain = Table(), [[1] * 100]
    for slow, gain in ((1.0, 3.2), (5.0, 3.2), (0.5, 2.8)):
        made.add(NGRAM, 1, answer(slow, plain), plain)
        made.add(SERVED, 1, answer(slow / gain, plain), plain)
    assert made.gain(SERVED, NGRAM, 1) == pytest.approx(3.2)


def test_rules_are_compared_where_both_were_measured() -> None:
    made = table(1.0, 3.1)
    plain = [[1] * 100, [2] * 50]
    made.add(TREE, 16, answer(1 / 3.0, plain), plain)
    made.add(ADAPTIVE, 16, answer(1.0, plain), plain)
    made.add(ADAPTIVE_TREE, 16, answer(0.99, plain), plain)
    assert made.missed() == [f"batch 16: {ADAPTIVE} is 0.99 x {ADAPTIVE_TREE}, must be 1"]
    assert made.rules() == [
        f"batch 16: {SERVED} is 1.03 x {TREE} in the fastest quarter of 3 runs, 1.03 x in their median",
        f"batch 16: {ADAPTIVE} is 0.99 x {ADAPTIVE_TREE} in the fastest quarter of 1 runs, 0.99 x in their median",
    ]


def test_rules_are_compared_by_runs_that_nothing_disturbed() -> None:
    """However many others were slow."""
    made, plain = Table(), [[1] * 100]
    for served, tree in ((1.0, 1.1), (5.0, 2.0), (4.0, 2.0), (3.0, 2.0)):
        made.add(SERVED, 1, answer(served, plain), plain)
        made.add(TREE, 1, answer(tree, plain), plain)
    assert made.fastest(SERVED, TREE, 1) == pytest.approx(1.1)
    assert made.gain(SERVED, TREE, 1) < 1
    assert not any(TREE in missed for missed in made.missed())


def test_rows_show_speed_gains_and_agreement() -> None:
    made = table(1.0, 3.0)
    made.add(SERVED, 16, answer(50.0, [[1] * 100, [3]]), [[1] * 100, [2] * 50])
    kind, batch, speed, _, on_none, on_ngram, accepted, step_ms, same = made.rows()[3]
    assert (kind, batch, speed, on_ngram, accepted, step_ms, same) == (SERVED, 16, 450.0, 3.0, 5.0, 2.5, "88%")
    assert on_none == 4.5


def test_outputs_part_where_they_first_differ() -> None:
    assert _first_difference([1, 2], [1, 2]) is None
    assert _first_difference([1, 2], [1, 3]) == 1
    assert _first_difference([1, 2], [1]) == 1
