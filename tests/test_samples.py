"""The sample traces: their size, their format, their licences, and the order that lets a demo share between engines."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).parents[1] / "samples"
VOCABULARY = 128_256
TRACES = sorted(SAMPLES.glob("*.jsonl.gz"))


def _sessions(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_all_samples_take_at_most_two_megabytes() -> None:
    assert 0 < sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()) <= 2_000_000


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.name)
def test_format(path: Path) -> None:
    sessions = _sessions(path)
    assert sessions
    assert len({s["id"] for s in sessions}) == len(sessions)
    for session in sessions:
        assert set(session) == {"id", "group", "turns"}
        assert isinstance(session["id"], str)
        assert isinstance(session["group"], str)
        assert session["turns"]
        for turn in session["turns"]:
            assert set(turn) == {"input", "output"}
            assert turn["output"]
            assert all(type(token) is int and 0 <= token < VOCABULARY for token in turn["input"] + turn["output"])
        assert session["turns"][0]["input"]


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.name)
def test_source_and_licence_are_named(path: Path) -> None:
    rows = [line for line in (SAMPLES / "README.md").read_text().splitlines() if line.startswith(f"| `{path.name}`")]
    assert len(rows) == 1
    licences = [p for p in (SAMPLES / "licenses").iterdir() if f"licenses/{p.name}" in rows[0]]
    assert len(licences) == 1
    assert licences[0].read_text().strip()


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "taubench"])
def test_round_robin_spreads_each_group_over_four_engines(name: str) -> None:
    engines = defaultdict(set)
    for index, session in enumerate(_sessions(SAMPLES / f"{name}.jsonl.gz")):
        engines[session["group"]].add(index % 4)
    assert all(len(spread) == 4 for spread in engines.values())
