"""What came of a replay, from its engines and its service: one dictionary for programs, one table for people."""

from __future__ import annotations

import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from draftd.client.channel import open_channel
from draftd.client.credentials import Credentials
from draftd.drafter.drafts import SOURCE_CORPUS, SOURCE_GROUP, SOURCE_LOCAL
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.engine import EngineResult

_TIMEOUT_S = 10.0


def summarize(results: Sequence[EngineResult], seconds: float, endpoint: str, http_url: str, namespaces: Sequence[str]) -> dict[str, Any]:
    """The figures of a replay; those of the service are None where it no longer answers.

    Args:
        results: One an engine.
        seconds: Wall-clock time of the replay.
        namespaces: Namespaces that the engines drafted from.
    """
    steps = sum(r.steps for r in results)
    tokens = sum(r.tokens for r in results)
    drafted = np.sum([r.drafted for r in results], axis=0)
    accepted = np.sum([r.accepted for r in results], axis=0)
    fail_opens: Counter[str] = Counter()
    for result in results:
        fail_opens.update(result.fail_opens)
    times = np.array([time for r in results for time in r.propose_us])
    return {
        "tokens_per_step": _ratio(tokens, steps),
        "drafted_per_step": _ratio(int(drafted.sum()), steps),
        "acceptance": {
            "overall": _ratio(int(accepted.sum()), int(drafted.sum())),
            "local": _ratio(int(accepted[SOURCE_LOCAL]), int(drafted[SOURCE_LOCAL])),
            "corpus": _ratio(int(accepted[SOURCE_CORPUS]), int(drafted[SOURCE_CORPUS])),
            "group": _ratio(int(accepted[SOURCE_GROUP]), int(drafted[SOURCE_GROUP])),
        },
        "propose_us": {f"p{q}": round(float(np.percentile(times, q)), 1) for q in (50, 99)} if len(times) else None,
        **_of_histograms(http_url),
        **_of_corpus(endpoint, namespaces),
        "fail_opens": sum(fail_opens.values()),
        "fail_opens_by_reason": {reason: count for reason, count in sorted(fail_opens.items()) if count},
        "lost_tokens": sum(r.lost_tokens for r in results),
        "steps": steps,
        "tokens": tokens,
        "turns": sum(r.turns for r in results),
        "outputs_exact": not any(r.wrong_outputs for r in results),
        "seconds": round(seconds, 3),
        "engines": len(results),
        "transport": ", ".join(sorted({r.transport for r in results})),
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _of_corpus(endpoint: str, namespaces: Sequence[str]) -> dict[str, Any]:
    with open_channel(endpoint, Credentials.from_environment()) as channel:
        try:
            answer = draftd_pb2_grpc.CorpusServiceStub(channel).ListNamespaces(pb.ListNamespacesRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return {"corpus_tokens": None, "bytes_per_token": None}
    used = [n for n in answer.namespaces if n.name in namespaces]
    tokens = sum(n.tokens for n in used)
    return {"corpus_tokens": tokens, "bytes_per_token": round(sum(n.bytes for n in used) / tokens, 2) if tokens else None}


def _of_histograms(http_url: str) -> dict[str, Any]:
    """visibility_ms and refresh_ms, interpolated in the buckets of the service's histograms."""
    names = {"draftd_visibility_lag_seconds": "visibility_ms", "draftd_refresh_seconds": "refresh_ms"}
    found: dict[str, Any] = dict.fromkeys(names.values())
    if not http_url:
        return found
    try:
        token = Credentials.from_environment().token()
        request = urllib.request.Request(f"{http_url}/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError:
        return found
    for family in text_string_to_metric_families(text):
        if family.name in names:
            counts: defaultdict[float, float] = defaultdict(float)
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    counts[float(sample.labels["le"])] += sample.value
            found[names[family.name]] = _percentiles_ms(sorted(counts.items()))
    return found


def _percentiles_ms(buckets: list[tuple[float, float]]) -> dict[str, float] | None:
    """p50 and p99 in milliseconds, from (upper bound in seconds, cumulative count); the last bound stands for what is above it."""
    if not buckets or not buckets[-1][1]:
        return None
    finite = [bound for bound, _ in buckets if np.isfinite(bound)]
    bounds = np.array([0.0, *finite, finite[-1]])
    cumulative = np.array([0.0, *(count for _, count in buckets)])
    return {f"p{q}": round(1000 * float(np.interp(q / 100 * cumulative[-1], cumulative, bounds)), 3) for q in (50, 99)}


def print_report(console: Console, figures: dict[str, Any], title: str) -> None:
    """One table for people."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    acceptance = figures["acceptance"]
    for name, value, meaning in (
        ("tokens/step", _number(figures["tokens_per_step"], 3), "what one verification step commits; 1 without drafts"),
        ("drafted/step", _number(figures["drafted_per_step"], 3), "tokens proposed a step"),
        ("acceptance", _percent(acceptance["overall"]), "of drafted tokens, those that were right"),
        ("  from own tokens", _percent(acceptance["local"]), ""),
        ("  from the corpus", _percent(acceptance["corpus"]), ""),
        ("  from the group", _percent(acceptance["group"]), "with --groups"),
        ("propose", _pair(figures["propose_us"], "us"), "p50 / p99 of one call for a whole batch"),
        ("visibility", _pair(figures["visibility_ms"], "ms"), "p50 / p99 from commit until others can draft from it"),
        ("refresh", _pair(figures["refresh_ms"], "ms"), "p50 / p99 of one index refresh"),
        ("corpus", "-" if figures["corpus_tokens"] is None else f"{figures['corpus_tokens']:,} tokens", ""),
        ("memory", f"{_number(figures['bytes_per_token'], 1)} B/token", "corpus and index together"),
        ("fail-opens", str(figures["fail_opens"]), ", ".join(f"{k} {v}" for k, v in figures["fail_opens_by_reason"].items())),
        ("outputs exact", "yes" if figures["outputs_exact"] else "NO", f"{figures['turns']:,} outputs rebuilt and compared"),
        ("steps", f"{figures['steps']:,}", f"{figures['tokens']:,} tokens in {figures['seconds']:.1f} s"),
        ("engines", str(figures["engines"]), f"transport {figures['transport']}"),
    ):
        table.add_row(name, value, meaning)
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _pair(value: dict[str, float] | None, unit: str) -> str:
    return "-" if value is None else f"{value['p50']:.4g} / {value['p99']:.4g} {unit}"
