"""The rule `calibrated` through the service: parameters, trees, what is learned from engines, what is shown of it and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftd.client import Drafter
from draftd.client.config import TransportName
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import REFRAIN, VOCAB, RunningService, draftd, error_of, wait_until


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    """A service that drafts by it, with a store, which holds the refrain."""
    made = RunningService(policy="calibrated", data_dir=tmp_path / "data", store_lag_ms=20)
    made.seed()
    monkeypatch.setenv("DRAFTD_SHM_ROOT", str(made.shm_root))
    yield made
    made.close()


def target(running: RunningService) -> str:
    return f"unix:{running.config.socket}"


def scored(running: RunningService, namespace: str = "default") -> int:
    """Drafted tokens of which the namespace knows what became of them."""
    return sum(decile.drafted for decile in running.namespace(namespace).calibration.deciles)


def decode(running: RunningService, engine: str, transport: TransportName, params: DraftParams | None = None) -> None:
    """An engine that generates the refrain, drafts for it and commits two tokens a step."""
    with Drafter(
        target(running), engine=engine, vocab_size=VOCAB, k=8, max_rows=2, max_length=256, transport=transport, strict=True,
        timeout_ms=10_000, params=params,
    ) as drafter:  # fmt: skip
        assert drafter.wait_attached(60)
        drafter.start(0, REFRAIN[:4])
        for at in range(4, 12, 2):
            drafter.propose([0])
            drafter.append(0, REFRAIN[at : at + 2])
        drafter.propose([0])
        drafter.finish(0, discard=True)


def test_the_rule_and_tau_are_the_requests_and_the_configurations_by_default(running: RunningService) -> None:
    tree = running.draft(REFRAIN[:6], policy=pb.POLICY_TREE)
    assert tree == REFRAIN[6:16]
    usual = running.draft(REFRAIN[:6])
    assert 0 < len(usual) < len(tree)
    assert running.draft(REFRAIN[:6], policy=pb.POLICY_CALIBRATED, tau=0.1) == usual
    assert len(running.draft(REFRAIN[:6], tau=0.01)) > len(usual)
    assert running.draft(REFRAIN[:6], tau=1.0) == []
    assert running.attach("defaults").defaults.policy == pb.POLICY_CALIBRATED


@pytest.mark.parametrize("wrong", [{"tau": -0.1}, {"tau": 1.1}, {"branches": 0}, {"branches": 4}])
def test_values_outside_their_range_are_refused(running: RunningService, wrong: dict[str, float]) -> None:
    code, message = error_of(lambda: running.draft(REFRAIN[:6], **wrong))
    assert code == "INVALID_ARGUMENT"
    assert f"parameters.{next(iter(wrong))}" in message


def test_trees_come_best_first_with_parents(running: RunningService) -> None:
    for i in range(3):
        running.ingest(f"fork-{i}", [500, 501, 502 + i // 2, 510 + i // 2, 520], complete=True, wait_visible=True)
    draft = running.propose([pb.Row(tokens=[500, 501])], branches=3, tau=0.01, k=6).drafts[0]
    assert len(draft.parents) == len(draft.tokens)
    assert {draft.tokens[i] for i, parent in enumerate(draft.parents) if parent == -1} >= {502, 503}
    for i, parent in enumerate(draft.parents):
        assert parent < i
        assert draft.probabilities[i] <= (draft.probabilities[parent] if parent >= 0 else 1)
    assert list(draft.probabilities) == sorted(draft.probabilities, reverse=True)
    assert not running.propose([pb.Row(tokens=[500, 501])], k=6).drafts[0].parents


@pytest.mark.parametrize("transport", ["mapped", "handle", "inline"])
def test_what_engines_commit_is_learned_over_every_transport(running: RunningService, transport: TransportName) -> None:
    decode(running, f"learner-{transport}", transport)
    wait_until(lambda: scored(running) > 0)
    calibration = running.namespace().calibration
    assert sum(d.accepted * d.drafted for d in calibration.deciles) == pytest.approx(sum(d.drafted for d in calibration.deciles))
    assert 0 < calibration.brier_score < 1


def test_trees_are_learned_from_and_counted_by_the_way_that_came_true(running: RunningService) -> None:
    decode(running, "trees", "inline", DraftParams(k=8, branches=3, tau=0.01))
    wait_until(lambda: scored(running) > 0)
    assert running.metric('draftd_num_accepted_tokens_total{namespace="default",position="0",source="corpus"}') > 0


def test_handle_takes_no_trees(running: RunningService) -> None:
    with pytest.raises(Exception, match="branches"):
        decode(running, "no-trees", "handle", DraftParams(k=8, branches=2))


def test_the_rule_tree_learns_nothing(running: RunningService) -> None:
    decode(running, "tree", "inline", DraftParams(k=8, policy="tree"))
    decode(running, "mapped-tree", "mapped", DraftParams(k=8, policy="tree"))
    assert scored(running) == 0


def test_metrics_and_explain_show_predictions(running: RunningService) -> None:
    decode(running, "shown", "inline")
    wait_until(lambda: scored(running) > 0)
    assert running.metric('draftd_brier_score{namespace="default"}') > 0
    shown = running.get("/metrics")
    assert 'draftd_predicted_acceptance{decile="' in shown
    assert 'draftd_observed_acceptance{decile="' in shown
    explained = json.loads(draftd("explain", "--endpoint", target(running), "--tokens", " ".join(map(str, REFRAIN[:6])), "--json").stdout)
    assert explained["candidates"][0]["token"] == REFRAIN[6]
    assert 0 < explained["candidates"][0]["probability"] < 1
    assert len(explained["calibration"]["deciles"]) == 10
    printed = draftd("explain", "--endpoint", target(running), "--tokens", " ".join(map(str, REFRAIN[:6]))).stdout
    assert "may come next" in printed
    assert "Brier score" in printed


def test_what_was_learned_outlives_a_restart(tmp_path: Path) -> None:
    flags = {"policy": "calibrated", "data_dir": tmp_path / "data", "store_lag_ms": 20}
    first = RunningService(**flags)
    first.seed()
    decode(first, "before", "inline")
    # What the engine taught is counted by the refresh that makes this visible.
    first.ingest("afterwards", [900], complete=True, wait_visible=True)
    assert scored(first) > 0
    before = first.namespace().calibration
    first.close()
    second = RunningService(**flags)
    try:
        assert second.namespace().calibration == before
    finally:
        second.close()


def test_costs_of_an_engine_set_tau(running: RunningService) -> None:
    """Where a verified token costs as much as a whole step nothing is drafted, where it costs nothing all that may be right."""
    with Drafter(
        target(running), engine="costs", vocab_size=VOCAB, k=8, max_rows=2, max_length=256, strict=True, timeout_ms=10_000
    ) as drafter:
        assert drafter.wait_attached(60)
        drafter.start(0, REFRAIN[:6])
        usual = int(drafter.propose([0]).counts[0])
        drafter.set_costs(slot=1.0, step=0.0)
        assert drafter.propose([0]).counts[0] == 0
        assert int(drafter.propose([0], DraftParams(k=8)).counts[0]) == usual
        drafter.set_costs(slot=0.0, step=1.0)
        assert drafter.propose([0]).counts[0] > usual


def test_the_end_of_a_prompt_is_context_and_never_text(running: RunningService) -> None:
    """It is not drafted, exported or stored, whichever way the document came."""
    lead = np.array([700, 701, 702], "<i4").tobytes()
    running.ingest("with-lead", [710, 711, 712], packed_lead=lead, complete=True, wait_visible=True, wait_durable=True)
    assert running.draft([700, 701], use_local=False, tau=0.0) == []
    assert running.draft([701, 702], policy=pb.POLICY_TREE, use_local=False) == []
    assert running.draft([702, 710], use_local=False, tau=0.0)[:2] == [711, 712]
    stored = [d for r in running.corpus.Export(pb.ExportRequest()) for d in r.documents if d.document_id == "with-lead"]
    assert np.frombuffer(stored[0].packed_tokens, "<i4").tolist() == [710, 711, 712]


@pytest.mark.parametrize("lead", [b"123", np.array([VOCAB], "<i4").tobytes(), np.array([-1], "<i4").tobytes()])
def test_a_lead_that_is_no_tokens_is_refused(running: RunningService, lead: bytes) -> None:
    code, message = error_of(lambda: running.ingest("bad-lead", [1], packed_lead=lead))
    assert code == "INVALID_ARGUMENT"
    assert "packed_lead" in message
