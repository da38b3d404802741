"""HTTP endpoints, and metrics: one catalogue, bounded labels, counters that never fall."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftd.drafter.layout import LAYOUT_VERSION
from draftd.drafter.stats import EngineStats
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.metrics import CATALOGUE, OTHER, FoldedStats, Metrics, markdown
from tests.server.harness import REFRAIN, RunningService, error_of, wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _counters(service: RunningService) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample that must not fall: counters, and counts, sums and buckets of histograms."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(service.get("/metrics"))
        if family.type in ("counter", "histogram") and family.name.startswith("draftd")
        for sample in family.samples
    }


def test_health_readiness_and_status(service: RunningService) -> None:
    assert service.get("/healthz") == "ok\n"
    assert service.get("/readyz") == "ready\n"
    engine = service.attach("on-status").attachment_id
    service.propose([pb.Row(document_id="d", tokens=[1, 2])], engine)
    status = json.loads(service.get("/v1/status"))
    assert (status["ready"], status["lease_ms"], status["limits"]["max_k"]) == (True, 10_000, 32)
    assert status["instance"] == service.service.corpus.instance
    (listed,) = [item for item in status["attachments"] if item["engine"] == "on-status"]
    assert (listed["transport"], listed["namespaces"], listed["rows"], listed["proposals"]) == ("inline", ["default"], 1, 1)
    assert 0 < listed["lease_left_ms"] <= 10_000
    (default,) = [item for item in status["namespaces"] if item["name"] == "default"]
    assert default["tokens"] >= len(REFRAIN)
    assert engine not in json.dumps(status)
    service.drafter.Detach(pb.DetachRequest(attachment_id=engine))


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/redoc"])
def test_api_pages_are_off_unless_asked_for(service: RunningService, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        service.get(path)


def test_what_is_exposed_is_what_the_catalogue_says(service: RunningService) -> None:
    service.draft(REFRAIN[:6])
    exposed = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(service.get("/metrics"))
        if not family.name.startswith("process_")
    }
    assert set(exposed) == {info.name for info in CATALOGUE}
    for info in CATALOGUE:
        family = exposed[info.name]
        assert (family.type, family.documentation) == (info.type, info.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(info.labels)
    assert exposed["draftd_corpus_tokens"].samples
    assert exposed["draftd_refresh_seconds"].samples
    assert exposed["draftd_visibility_lag_seconds"].samples


def test_catalogue_follows_prometheus_naming() -> None:
    for info in CATALOGUE:
        assert re.fullmatch(r"draftd_[a-z_]+", info.name)
        assert info.name.endswith("_total") == (info.type == "counter")
        assert info.help.endswith(".")
        assert bool(info.bounds) == (info.type == "histogram")


def test_documentation_lists_the_catalogue() -> None:
    assert markdown() in (DOCS / "metrics.md").read_text()


def test_counters_do_not_fall_when_attachments_leave(service: RunningService) -> None:
    service.draft(REFRAIN[:6])
    before = _counters(service)
    inline = service.attach("leaves-inline").attachment_id
    mapped = service.attach("leaves-mapped", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION).attachment_id
    service.propose([pb.Row(document_id="leaves", tokens=REFRAIN[:6], prompt_length=6)], inline)
    service.propose([pb.Row(document_id="leaves", offset=6, tokens=REFRAIN[6:9])], inline)
    # What a mapped engine counts in its block, written here as its client would.
    rows = service.service.corpus.rows._blocks[mapped].rows
    rows.stats.count_proposal(3, 12.0)
    rows.stats.count_fail_open("timeout")
    during = _counters(service)
    assert error_of(lambda: service.propose([], inline))[0] == "INVALID_ARGUMENT"
    for attachment_id in (inline, mapped):
        service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id))
    after = _counters(service)
    for earlier, later in ((before, during), (during, after)):
        for sample, value in earlier.items():
            assert later[sample] >= value, sample
    rows_of_mapped = ("draftd_proposed_rows_total", (("namespace", "default"), ("transport", "mapped")))
    assert after[rows_of_mapped] == during[rows_of_mapped] >= 3
    assert after["draftd_fail_opens_total", (("namespace", "default"), ("reason", "timeout"))] >= 1
    failed = ("draftd_rpc_errors_total", (("code", "INVALID_ARGUMENT"), ("method", "Propose")))
    assert after[failed] == during.get(failed, 0) + 1


def test_counters_of_a_broken_engine_do_not_make_totals_fall() -> None:
    metrics = Metrics(max_namespaces=4)
    stats = EngineStats()
    folded = FoldedStats(stats)
    stats.proposals[0] = 10
    folded.fold_into(metrics, "n", "mapped")
    stats.proposals[0] = 3
    folded.fold_into(metrics, "n", "mapped")
    assert metrics.value("draftd_proposals_total", "n", "mapped") == 10
    stats.proposals[0] = 5
    folded.fold_into(metrics, "n", "mapped")
    assert metrics.value("draftd_proposals_total", "n", "mapped") == 12


def test_namespaces_beyond_the_limit_share_a_label() -> None:
    metrics = Metrics(max_namespaces=2)
    assert [metrics.namespace_label(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_evictions_go_on_counting_after_a_namespace_is_made_anew(service: RunningService) -> None:
    sample = 'draftd_corpus_evicted_tokens_total{namespace="evicting"}'

    def fill_and_evict() -> None:
        for i in range(60):
            service.ingest(f"d{i}", [i] * 500, namespace="evicting", vocab_size=1000, complete=True, wait_visible=i % 10 == 9)
        service.service.corpus.settle()
        for _ in range(2):
            service.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="evicting", keep_generations=1))
        service.service.corpus.settle()

    fill_and_evict()
    first = service.metric(sample)
    assert first > 0
    service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="evicting"))
    assert service.metric(sample) == first
    fill_and_evict()
    assert service.metric(sample) > first


def test_metrics_answer_as_prometheus_text(service: RunningService) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{service.service.http_port}/metrics", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert service.metric("draftd_ready") == 1
    assert service.metric('draftd_attachments{transport="handle"}') == 0


def test_defect_in_background_work_is_counted_and_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    running = RunningService(lease_ms=400)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(running.service.corpus, "commit_owned", lambda owner: 1 // 0)
            running.attach("first")
            wait_until(lambda: running.metric("draftd_background_errors_total") >= 1)
        running.attach("second")
        wait_until(lambda: running.metric("draftd_lease_losses_total") >= 1)
    finally:
        running.close()
