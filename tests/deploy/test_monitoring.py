"""The Grafana dashboard and the alerts: every expression parses, and asks for metrics and labels that a running service exports.

What the alerts say and when they fire is in alerts_test.yaml, for promtool.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from draftd.client import Drafter
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.metrics import CATALOGUE
from draftd.server.security.tokens import hash_of, new_token
from tests.server.harness import REFRAIN, VOCAB, RunningService, error_of, wait_until

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/draftd.json").read_text())
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

# What Prometheus adds to every target, and the metric that it makes itself.
TARGET_LABELS = {"job", "instance"}
OF_PROMETHEUS = {"up": set[str]()}

# Only a service with a GPU has samples of these.
OF_A_GPU = {"draftd_device_memory_bytes": {"part"}, "draftd_handle_batches_total": {"outcome"}, "draftd_mps": set[str]()}

# For whoever asks a question of his own: what another panel shows in another unit, and what happens once.
NOT_SHOWN = {
    *("draftd_build_info", "draftd_num_drafts_total", "draftd_corpus_generation", "draftd_namespaces", "draftd_namespaces_asleep"),
    *("draftd_propose_batch_rows", "draftd_propose_batch_latency_seconds_total", "draftd_propose_batches_total"),
    *("draftd_store_written_tokens_total", "draftd_store_pending_documents", "draftd_spans_sent_total"),
    *("draftd_store_restored_documents", "draftd_store_restored_tokens", "draftd_store_restore_seconds"),
    *("draftd_replication_connections_total", "draftd_replication_published_bytes_total", "draftd_replication_renamed_documents_total"),
    *("draftd_replication_consumed_tokens_total", "draftd_replication_consumed_bytes_total"),
}

VARIABLES = {variable["name"] for variable in DASHBOARD["templating"]["list"]}


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def _dashboard_expressions() -> Iterator[tuple[str, str, str]]:
    """(where, expression, legend)."""
    for panel in _panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']} {target['refId']}", target["expr"], target["legendFormat"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"], annotation["textFormat"]


DASHBOARD_EXPRESSIONS = list(_dashboard_expressions())
EXPRESSIONS = [(where, expression) for where, expression, _ in DASHBOARD_EXPRESSIONS] + [(rule["alert"], rule["expr"]) for rule in RULES]


def _parse(expression: str) -> promql_parser.Expr:
    """With Grafana's variables replaced by what they might stand for."""
    parsed: promql_parser.Expr = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    return parsed


def _nodes(expression: promql_parser.Expr) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(expression, found.append)
    return found


def _wanted(expression: promql_parser.Expr) -> Iterator[tuple[str, str]]:
    """(metric, label) for every label by which a metric is chosen or grouped; the label is empty for the metric itself."""
    for node in _nodes(expression):
        if isinstance(node, promql_parser.VectorSelector):
            metric = node.name or "a selector without a metric"
            yield metric, ""
            yield from ((metric, matcher.name) for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            metrics = [str(inner.name) for inner in _nodes(node.expr) if isinstance(inner, promql_parser.VectorSelector)]
            yield from ((metric, label) for metric in metrics for label in node.modifier.labels)


def _groupings(expression: promql_parser.Expr) -> list[set[str]]:
    """Labels that each aggregation keeps."""
    aggregates = [node for node in _nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
    return [set(node.modifier.labels) if node.modifier else set() for node in aggregates]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Labels of every sample that a service exports after each thing that it counts has happened at least once."""
    directory = tmp_path_factory.mktemp("service")
    token = new_token()
    token_file = directory / "tokens.toml"
    token_file.write_text(f'[tokens.scraper]\nsha256 = "{hash_of(token)}"\nrights = ["read"]\nnamespaces = ["*"]\n')
    token_file.chmod(0o600)
    # Nobody answers there: what is exported of replication is there all the same.
    running = RunningService(data_dir=directory / "store", token_file=token_file, replicate="nats://127.0.0.1:9", policy="calibrated")

    def scrape() -> str:
        url = f"http://127.0.0.1:{running.service.http_port}/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
            return str(answer.read().decode())

    try:
        running.seed()
        running.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="default"))
        inline = running.attach("inline", unmapped_reason="another /dev/shm").attachment_id
        assert error_of(lambda: running.propose([], inline))[0] == "INVALID_ARGUMENT"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            running.get("/metrics")
        with Drafter(f"unix:{running.config.socket_path()}", engine="mapped", vocab_size=VOCAB, max_rows=2, max_length=256) as drafter:
            assert drafter.wait_attached(60)
            drafter.start(0, REFRAIN[:8])
            assert drafter.propose([0]).counts[0] > 0
            drafter.append(0, REFRAIN[8:12])
            drafter.propose([0])
            drafter.propose([1])  # a row without a request
            drafter.finish(0)
        token_file.write_text(token_file.read_text() + "\n")
        counted = ("draftd_fail_opens_total{", "draftd_reloads_total{", "draftd_brier_score{")
        wait_until(lambda: all(sample in scrape() for sample in counted))
        samples: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(scrape()):
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
        yield samples
    finally:
        running.close()


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_expression_asks_for_what_a_running_service_exports(where: str, expression: str, exported: dict[str, set[str]]) -> None:
    wanted = list(_wanted(_parse(expression)))
    assert wanted
    known = exported | OF_PROMETHEUS | OF_A_GPU
    for metric, label in wanted:
        assert metric in known, f"{metric} is not exported"
        assert not label or label in known[metric] | TARGET_LABELS, f"{metric} has no label {label}"


@pytest.mark.parametrize(("where", "expression", "legend"), DASHBOARD_EXPRESSIONS, ids=[where for where, _, _ in DASHBOARD_EXPRESSIONS])
def test_legend_shows_labels_that_the_expression_keeps(where: str, expression: str, legend: str) -> None:
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert all(shown <= kept for kept in _groupings(_parse(expression)))
    assert set(re.findall(r"\$\{?(\w+)", expression)) <= VARIABLES | {"__rate_interval"}


def test_variables_of_the_dashboard_query_what_is_exported(exported: dict[str, set[str]]) -> None:
    queries = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) == 2
    for query in queries:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        for metric, wanted in [*_wanted(_parse(selector)), (_parse(selector).name, label)]:  # type: ignore[attr-defined]
            assert not wanted or wanted in exported[metric] | TARGET_LABELS


def test_panels_have_their_own_place_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in _panels():
        assert panel["description"].endswith("."), panel["title"]
        assert all(target["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for target in panel["targets"])


def test_every_metric_is_in_a_panel_or_an_alert() -> None:
    asked = {re.sub(r"_(bucket|sum|count)$", "", metric) for _, expression in EXPRESSIONS for metric, _ in _wanted(_parse(expression))}
    names = {info.name for info in CATALOGUE}
    assert names > NOT_SHOWN
    assert names - asked == NOT_SHOWN


def test_labels_of_metrics_of_a_gpu_are_those_of_the_catalogue() -> None:
    assert {info.name: set(info.labels) for info in CATALOGUE if info.name in OF_A_GPU} == OF_A_GPU


def test_no_metric_has_a_label_that_prometheus_gives_to_the_target() -> None:
    assert not [info.name for info in CATALOGUE if set(info.labels) & TARGET_LABELS]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in (ROOT / page).read_text()
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert all(used <= kept for kept in _groupings(_parse(rule["expr"])) or [TARGET_LABELS])


def test_runbook_has_no_section_for_an_alert_that_is_gone() -> None:
    sections = set(re.findall(r"^### (Draftd\w+)$", (ROOT / "docs/operations.md").read_text(), flags=re.MULTILINE))
    assert sections == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian: apt-get install prometheus); `make check` needs it"
)
@pytest.mark.parametrize("command", [["check", "rules", str(ALERTS)], ["test", "rules", "tests/deploy/alerts_test.yaml"]], ids=" ".join)
def test_promtool_accepts_the_alerts(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire_and_to_stay_silent() -> None:
    tests = [
        test for case in yaml.safe_load((ROOT / "tests/deploy/alerts_test.yaml").read_text())["tests"] for test in case["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in RULES}
    assert {test["alertname"] for test in tests if test["exp_alerts"]} == names
    assert {test["alertname"] for test in tests if not test["exp_alerts"]} == names
