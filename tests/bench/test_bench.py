"""The benchmarks' own parts: the workload is what it says and the same every time, tables and JSON agree, and the peer is optional."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as runner
from bench import peers
from bench.footprint import Footprint
from bench.hostile_calls import HostileCalls, methods, path
from bench.machine import report
from bench.rpc import padded_check
from bench.scaling import Load, Measured, cost, table
from bench.workload import VOCABULARY, make
from draftd.proto.draftd.v1 import draftd_pb2 as pb

BENCH = Path(__file__).parents[2] / "bench"


def test_every_benchmark_is_run_by_name() -> None:
    parts = {
        "__main__",
        "__init__",
        "machine",
        "workload",
        "service",
        "footprint",
        "hostile_calls",
        "scaling",
        "prior",
        "prompts",
        "vllm_table",
        "vllm_worker",
        "gpu_engine",
        "device_image",
    }
    assert {path.stem for path in BENCH.glob("*.py")} - parts == {*runner.NAMES, *runner.GPU_NAMES, *runner.LONG_NAMES}
    assert all(callable(importlib.import_module(f"bench.{name}").main) for name in (*runner.NAMES, *runner.LONG_NAMES))


def test_workload_is_large_enough_and_repeats() -> None:
    one, other = make(300_000, 20, max_context=100), make(300_000, 20, max_context=100)
    assert one.tokens >= 300_000
    assert len(one.contexts) == 20
    assert all(0 < len(c) <= 100 for c in one.contexts)
    assert all(int(d.min()) >= 0 and int(d.max()) < VOCABULARY for d in one.documents)
    for name in ("documents", "contexts"):
        assert all(np.array_equal(a, b) for a, b in zip(getattr(one, name), getattr(other, name), strict=True))


def test_copies_are_alike_but_not_equal() -> None:
    documents = make(300_000, 1).documents
    originals = next(i for i in range(1, len(documents)) if len(documents[i]) == len(documents[0]) and _alike(documents, i))
    share = np.mean([np.mean(documents[i] == documents[originals + i]) for i in range(100)])
    assert 0.8 < share < 1.0


def _alike(documents: list[np.ndarray], i: int) -> bool:
    return float(np.mean(documents[0] == documents[i])) > 0.5 and len(documents[1]) == len(documents[i + 1])


@pytest.mark.parametrize("size", [10, 100, 1032, 5000, 100_000])
def test_empty_call_has_the_size_asked_for(size: int) -> None:
    assert len(padded_check(size)) == size


def test_table_and_json_hold_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report("Title", ("name", "value"), [("a", 1.5), ("b", None)], tmp_path / "out.json", ["a note"])
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"] == [{"name": "a", "value": 1.5}, {"name": "b", "value": None}]
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["cpu"] in printed
    assert "1.500" in printed
    assert "a note" in printed


def test_peer_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCTIC_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert peers.arctic("replay", "trace") is None


def test_growth_is_told_for_what_grew_by_more_than_it_may() -> None:
    before = Footprint(private_mib=100, shm_mib=10, shm_files=3, files=20, threads=8, children=0)
    after = Footprint(private_mib=200, shm_mib=5, shm_files=3, files=21, threads=8, children=1)
    most = Footprint(private_mib=32, shm_mib=1, shm_files=1, files=1, threads=1, children=0)
    assert after.growth(before, most) == ["private_mib grew by 100, from 100", "children grew by 1, from 0"]
    assert before.growth(before, most) == []


def test_hostile_calls_repeat_and_name_every_method() -> None:
    one, other = HostileCalls(3), HostileCalls(3)
    calls = [next(one) for _ in range(500)]
    assert calls == [next(other) for _ in range(500)]
    assert {call.path for call in calls} >= {path(method) for method in methods(pb)}
    assert all(len(call.messages) == 1 for call in calls if not call.client_streams)


def test_plan_of_many_nodes_is_what_its_arithmetic_gives() -> None:
    page = (BENCH.parent / "docs/scaling.md").read_text()
    assert table() in page
    # What the text says of it.
    thousand, cell = cost(Load(1000)), cost(Load(50))
    assert cost(Load(1000, quota_tokens=2**28)).corpus_s / 60 == pytest.approx(4.5, abs=0.05)
    assert cost(Load(64)).corpus_s == pytest.approx(60, rel=0.1)
    assert 0.07 < cost(Load(150)).node_cores <= 0.1
    assert cost(Load(600)).nats_out_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert cell.documents_per_s == 100
    assert 20 * cell.nats_out_bytes_per_s / 1e6 == pytest.approx(130, abs=0.5)
    assert thousand.documents_per_s * 120 * 100 / 1e6 == pytest.approx(24)


def test_cost_of_nodes_grows_as_it_must() -> None:
    one, twice = cost(Load(10)), cost(Load(20))
    assert twice.node_in_bytes_per_s == pytest.approx(2 * one.node_in_bytes_per_s)
    assert twice.nats_out_bytes_per_s == pytest.approx(4 * one.nats_out_bytes_per_s)
    assert twice.corpus_s == pytest.approx(one.corpus_s / 2)
    m = Measured()
    for tokens, stored, cpu in ((75.3, 461, 170), (527.3, 1133, 275)):
        assert m.stored_bytes + m.stored_bytes_per_token * tokens == pytest.approx(stored, rel=0.02)
        assert m.take_us + m.take_us_per_token * tokens == pytest.approx(cpu, rel=0.06)
