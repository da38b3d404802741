"""All metrics of the service: one catalogue, and the collector that fills it at scrape time.

What engines count (EngineStats) is folded as differences, so that totals never fall when an attachment leaves. Labels are bounded:
namespaces beyond the configured number are counted as `_other`.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftd.drafter.params import MAX_K
from draftd.drafter.stats import BATCH_BOUNDS, FAIL_OPEN_REASONS, PROPOSE_US_BOUNDS, SOURCES, EngineStats

OTHER = "_other"
_LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_REFRESH_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_COMMIT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_ACCEPTANCE_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric: `name` as it is exposed (counters end in _total), type, label names, help, and a histogram's upper bounds."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()


CATALOGUE: tuple[MetricInfo, ...] = (
    MetricInfo("draftd_build_info", "gauge", ("version", "run"), "Always 1; the version and the run of the service."),
    MetricInfo("draftd_start_time_seconds", "gauge", (), "Unix time at which the service started."),
    MetricInfo("draftd_ready", "gauge", (), "1 while the service can draft, 0 while it starts or stops."),
    MetricInfo("draftd_proposals_total", "counter", ("namespace", "transport"), "Propose calls, each for a batch of rows."),
    MetricInfo("draftd_proposed_rows_total", "counter", ("namespace", "transport"), "Rows in Propose calls."),
    MetricInfo(
        "draftd_num_drafts_total", "counter", ("namespace", "source"), "Drafts that an engine has verified, by where they came from."
    ),
    MetricInfo(
        "draftd_num_draft_tokens_total", "counter", ("namespace", "source", "position"), "Tokens of verified drafts, by position from 0."
    ),
    MetricInfo(
        "draftd_num_accepted_tokens_total",
        "counter",
        ("namespace", "source", "position"),
        "Draft tokens that the engine committed, by position from 0.",
    ),
    MetricInfo(
        "draftd_acceptance_length",
        "histogram",
        ("namespace", "source"),
        "Accepted tokens of a verified draft.",
        _ACCEPTANCE_BOUNDS,
    ),
    MetricInfo(
        "draftd_propose_latency_seconds",
        "histogram",
        ("transport",),
        "Time to draft for one Propose call, where it is computed: in the engine for mapped, else in the service.",
        tuple(bound / 1e6 for bound in PROPOSE_US_BOUNDS),
    ),
    MetricInfo("draftd_propose_batch_rows", "histogram", ("transport",), "Rows of one Propose call.", BATCH_BOUNDS),
    MetricInfo(
        "draftd_propose_batch_latency_seconds_total",
        "counter",
        ("transport", "batch"),
        "Time spent drafting in the service, by upper bound of the batch's rows.",
    ),
    MetricInfo(
        "draftd_propose_batches_total",
        "counter",
        ("transport", "batch"),
        "Propose calls in the service, by upper bound of the batch's rows.",
    ),
    MetricInfo(
        "draftd_fail_opens_total",
        "counter",
        ("namespace", "reason"),
        "Calls that an engine's client answered without drafts (mapped only).",
    ),
    MetricInfo("draftd_engine_committed_tokens_total", "counter", ("namespace",), "Output tokens that attached engines committed."),
    MetricInfo("draftd_engine_lost_tokens_total", "counter", ("namespace",), "Of those, tokens that never reached the corpus."),
    MetricInfo(
        "draftd_ingest_tokens_total",
        "counter",
        ("namespace", "via"),
        "Tokens kept, by the call that brought them: ingest, harvest or import.",
    ),
    MetricInfo(
        "draftd_visibility_lag_seconds", "histogram", (), "Time from a token's arrival until others can draft from it.", _LAG_BOUNDS
    ),
    MetricInfo("draftd_refresh_seconds", "histogram", ("kind",), "Time of one refresh of an index, by kind.", _REFRESH_BOUNDS),
    MetricInfo("draftd_refresh_tokens_total", "counter", ("kind",), "Suffixes written by refreshes, by kind."),
    MetricInfo("draftd_refresh_errors_total", "counter", (), "Refreshes that failed; the index stayed as it was."),
    MetricInfo("draftd_reader_timeouts_total", "counter", (), "Times that a refresh stopped waiting for an engine that did not move on."),
    MetricInfo("draftd_row_errors_total", "counter", (), "Rows in row blocks of mapped engines that the service refused to take."),
    MetricInfo("draftd_corpus_tokens", "gauge", ("namespace",), "Tokens that can be drafted from, in flight and committed."),
    MetricInfo("draftd_corpus_quota_tokens", "gauge", ("namespace",), "Most tokens that the namespace holds."),
    MetricInfo("draftd_corpus_documents", "gauge", ("namespace",), "Committed documents."),
    MetricInfo("draftd_corpus_open_documents", "gauge", ("namespace",), "Documents in flight."),
    MetricInfo("draftd_corpus_evicted_tokens_total", "counter", ("namespace",), "Tokens evicted: quota, generations."),
    MetricInfo("draftd_corpus_generation", "gauge", ("namespace",), "Current generation."),
    MetricInfo("draftd_corpus_bytes", "gauge", ("namespace",), "Bytes of corpus and index in use."),
    MetricInfo("draftd_corpus_segment_tokens", "gauge", ("namespace", "segment"), "Suffixes in each segment of the index."),
    MetricInfo(
        "draftd_predicted_acceptance",
        "gauge",
        ("namespace", "decile"),
        "Mean predicted survival of drafted tokens by its tenth, 0 to 9, of the last million or so; policy calibrated.",
    ),
    MetricInfo("draftd_observed_acceptance", "gauge", ("namespace", "decile"), "Share of those tokens that engines committed."),
    MetricInfo("draftd_predicted_tokens", "gauge", ("namespace", "decile"), "How many tokens that is."),
    MetricInfo("draftd_brier_score", "gauge", ("namespace",), "Mean squared difference of predicted survival and what happened."),
    MetricInfo("draftd_calibration_refused_total", "counter", (), "Times that an engine handed over what it cannot have learned."),
    MetricInfo(
        "draftd_device_memory_bytes", "gauge", ("part",), "GPU memory of the service: indexes, free for further ones, and working memory."
    ),
    MetricInfo("draftd_namespaces", "gauge", (), "Namespaces in memory."),
    MetricInfo("draftd_namespaces_asleep", "gauge", (), "Namespaces that are in the store only until they are used again."),
    MetricInfo("draftd_store_written_documents_total", "counter", (), "Committed documents written to the store."),
    MetricInfo("draftd_store_written_tokens_total", "counter", (), "Their tokens."),
    MetricInfo("draftd_store_deleted_documents_total", "counter", (), "Documents that left the store: evicted, or of a dropped namespace."),
    MetricInfo(
        "draftd_store_unwritten_documents_total", "counter", (), "Documents that were evicted or dropped before they could be written."
    ),
    MetricInfo("draftd_store_damaged_documents_total", "counter", (), "Stored documents that could not be read and were set aside."),
    MetricInfo("draftd_store_errors_total", "counter", (), "Writes that the store refused; they are tried again."),
    MetricInfo("draftd_store_failing", "gauge", (), "1 while the store cannot be written, as on a full disk; drafting goes on."),
    MetricInfo("draftd_store_lag_seconds", "gauge", (), "Age of the oldest committed document that is not on disk; 0 without one."),
    MetricInfo("draftd_store_pending_documents", "gauge", (), "Committed documents that are not on disk."),
    MetricInfo("draftd_store_bytes", "gauge", (), "Size of the store on disk."),
    MetricInfo("draftd_store_commit_seconds", "histogram", (), "Time to write one batch to the store.", _COMMIT_BOUNDS),
    MetricInfo("draftd_store_restored_documents", "gauge", (), "Documents restored at the start."),
    MetricInfo("draftd_store_restored_tokens", "gauge", (), "Their tokens."),
    MetricInfo("draftd_store_restore_seconds", "gauge", (), "Time that it took to restore them and to build their indexes."),
    MetricInfo("draftd_replication_connected", "gauge", (), "1 while the service is connected to NATS; only where replicate is set."),
    MetricInfo("draftd_replication_lag_messages", "gauge", (), "Messages in the stream that are not in this corpus, as far as is known."),
    MetricInfo("draftd_replication_outbox_documents", "gauge", (), "Committed documents that are not in the stream."),
    MetricInfo("draftd_replication_outbox_age_seconds", "gauge", (), "How long the oldest of them has been waiting; 0 without one."),
    MetricInfo("draftd_replication_connections_total", "counter", (), "Connections made to NATS; all but the first are reconnects."),
    MetricInfo("draftd_replication_errors_total", "counter", (), "Connections that could not be made or were lost."),
    MetricInfo("draftd_replication_published_documents_total", "counter", (), "Documents that this service put into the stream."),
    MetricInfo("draftd_replication_published_bytes_total", "counter", (), "Their tokens as they were sent, without headers."),
    MetricInfo("draftd_replication_consumed_documents_total", "counter", (), "Documents that it took from there."),
    MetricInfo("draftd_replication_consumed_tokens_total", "counter", (), "Their tokens."),
    MetricInfo("draftd_replication_consumed_bytes_total", "counter", (), "Bytes of other nodes' messages, without headers."),
    MetricInfo(
        "draftd_replication_duplicate_documents_total",
        "counter",
        ("at",),
        "Documents that were there already: in the stream or the corpus.",
    ),
    MetricInfo(
        "draftd_replication_renamed_documents_total", "counter", (), "Documents taken under a longer id, since another one has theirs."
    ),
    MetricInfo(
        "draftd_replication_refused_messages_total", "counter", ("reason",), "Messages that did not fit; each reason is in the log."
    ),
    MetricInfo(
        "draftd_replication_unsent_documents_total",
        "counter",
        ("reason",),
        "Documents that were never sent: evicted before NATS could be reached, or too large for it.",
    ),
    MetricInfo("draftd_attachments", "gauge", ("transport",), "Live attachments."),
    MetricInfo("draftd_attaches_total", "counter", ("transport",), "Attachments made."),
    MetricInfo(
        "draftd_fallbacks_total",
        "counter",
        ("reason",),
        "Attachments that would map but do not: host, layout, device, or client, which could not map what it was told of.",
    ),
    MetricInfo(
        "draftd_handle_batches_total",
        "counter",
        ("outcome",),
        "Batches of engines that share tensors on a GPU: launched, expired (the engine's stream did not come), skipped (it no longer "
        "waited), failed (the driver refused).",
    ),
    MetricInfo(
        "draftd_abandoned_streams_total", "counter", (), "Attachments whose GPU work did not end in time; what they shared stays mapped."
    ),
    MetricInfo(
        "draftd_mps",
        "gauge",
        (),
        "1 if the service's GPU is shared by the Multi-Process Service, where an engine that is killed at work takes all others down.",
    ),
    MetricInfo("draftd_memory_refusals_total", "counter", (), "Times that somebody asked for device memory and got none; see the log."),
    MetricInfo("draftd_lease_losses_total", "counter", (), "Attachments whose lease ran out."),
    MetricInfo("draftd_spans_sent_total", "counter", (), "Spans of calls that the receiver of otlp_endpoint has taken."),
    MetricInfo("draftd_spans_dropped_total", "counter", (), "Spans that were not: it did not keep up, or did not answer."),
    MetricInfo("draftd_background_errors_total", "counter", (), "Defects in work that no caller waits on; each is in the log."),
    MetricInfo("draftd_rpc_errors_total", "counter", ("method", "code"), "Calls answered with an error, by gRPC status code."),
    MetricInfo(
        "draftd_refused_calls_total",
        "counter",
        ("reason",),
        "Calls over gRPC and HTTP refused for who made them or how fast: unauthenticated, permission, rate, or host.",
    ),
    MetricInfo("draftd_audited_calls_total", "counter", ("method", "outcome"), "Calls in the audit log, by gRPC status code."),
    MetricInfo("draftd_reloads_total", "counter", ("file", "result"), "Times that tokens or certificates were read again: ok or failed."),
)
_BY_NAME = {info.name: info for info in CATALOGUE}


def bucket_bounds(name: str) -> tuple[float, ...]:
    """Upper bounds of a histogram's buckets but the last."""
    return _BY_NAME[name].bounds


Labels = tuple[str, ...]


class _Histogram:
    """Cumulative counts of one labelled histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.asarray(bounds, np.float64)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[np.searchsorted(self.bounds, value)] += 1
        self.sum += value

    def add(self, counts: NDArray[np.int64], total: float) -> None:
        self.counts += counts
        self.sum += total

    def buckets(self) -> list[tuple[str, float]]:
        names = [str(float(bound)) for bound in self.bounds] + ["+Inf"]
        return list(zip(names, np.cumsum(self.counts).tolist(), strict=True))


class Metrics(Collector):
    """The values behind the catalogue. The service's event loop is its only caller.

    Attributes:
        engine_totals: All that engines counted since the start, by namespace label and transport.
    """

    def __init__(self, max_namespaces: int) -> None:
        self._max_namespaces = max_namespaces
        self._namespaces: set[str] = set()
        self._counters: dict[str, defaultdict[Labels, float]] = {
            info.name: defaultdict(float) for info in CATALOGUE if info.type == "counter"
        }
        self._histograms: dict[str, dict[Labels, _Histogram]] = {info.name: {} for info in CATALOGUE if info.type == "histogram"}
        self._gauges: dict[str, dict[Labels, float]] = {info.name: {} for info in CATALOGUE if info.type == "gauge"}
        self.engine_totals: defaultdict[tuple[str, str], EngineStats] = defaultdict(EngineStats)
        self.set("draftd_start_time_seconds", time.time())
        for info in CATALOGUE:
            if info.type == "counter" and not info.labels:
                self.count(info.name, amount=0)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Adds to a counter."""
        self._counters[name][labels] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        self._gauges[name][labels] = value

    def advance(self, name: str, total: float, *labels: str) -> None:
        """Sets a counter that is kept elsewhere; it never falls."""
        self._counters[name][labels] = max(total, self._counters[name][labels])

    def replace(self, name: str, values: Mapping[Labels, float]) -> None:
        """Sets a gauge for exactly these labels; others disappear."""
        self._gauges[name] = dict(values)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds one observation to a histogram."""
        self._histogram(name, labels).observe(value)

    def value(self, name: str, *labels: str) -> float:
        """A counter's value."""
        return self._counters[name][labels]

    def values(self, name: str) -> Mapping[Labels, float]:
        """A counter's or a gauge's value by its labels, as it is now and as it changes."""
        return self._counters[name] if name in self._counters else self._gauges[name]

    def bucket_counts(self, name: str) -> dict[Labels, NDArray[np.int64]]:
        """Observations in each bucket of a histogram by its labels, the last one being those above every bound: copies."""
        return {labels: histogram.counts.copy() for labels, histogram in self._histograms[name].items()}

    def rpc_error(self, method: str, code: str) -> None:
        """Counts a call that was answered with an error."""
        self.count("draftd_rpc_errors_total", method, code)

    def namespace_label(self, namespace: str) -> str:
        """The label value of a namespace: its name, or `_other` once too many have been seen."""
        if namespace in self._namespaces:
            return namespace
        if len(self._namespaces) >= self._max_namespaces:
            return OTHER
        self._namespaces.add(namespace)
        return namespace

    def batch(self, transport: str, rows: int, seconds: float) -> None:
        """Counts one Propose call that the service computed, by batch size."""
        bucket = bisect_left(BATCH_BOUNDS, rows)
        label = str(BATCH_BOUNDS[bucket]) if bucket < len(BATCH_BOUNDS) else "+Inf"
        self.count("draftd_propose_batches_total", transport, label)
        self.count("draftd_propose_batch_latency_seconds_total", transport, label, amount=seconds)

    def fold(self, namespace: str, transport: str, added: EngineStats) -> None:
        """Adds what an engine counted since the last fold."""
        namespace = self.namespace_label(namespace)
        self.engine_totals[namespace, transport].add(added)
        self.count("draftd_proposals_total", namespace, transport, amount=int(added.proposals[0]))
        self.count("draftd_proposed_rows_total", namespace, transport, amount=int(added.rows[0]))
        for source in range(1, len(SOURCES)):
            name = SOURCES[source]
            self.count("draftd_num_drafts_total", namespace, name, amount=int(added.drafted[source, 0]))
            for position in np.flatnonzero(added.drafted[source]).tolist():
                place = str(position)
                self.count("draftd_num_draft_tokens_total", namespace, name, place, amount=int(added.drafted[source, position]))
                self.count("draftd_num_accepted_tokens_total", namespace, name, place, amount=int(added.accepted[source, position]))
            lengths = added.acceptance_length[source]
            buckets = np.zeros(len(_ACCEPTANCE_BOUNDS) + 1, np.int64)
            np.add.at(buckets, np.searchsorted(_ACCEPTANCE_BOUNDS, np.arange(MAX_K + 1)), lengths)
            self._histogram("draftd_acceptance_length", (namespace, name)).add(buckets, float(lengths @ np.arange(MAX_K + 1)))
        self._histogram("draftd_propose_latency_seconds", (transport,)).add(added.propose_us_buckets, float(added.propose_us_sum[0]) / 1e6)
        self._histogram("draftd_propose_batch_rows", (transport,)).add(added.batch_rows_buckets, float(added.rows[0]))
        for i, reason in enumerate(FAIL_OPEN_REASONS):
            if added.fail_opens[i]:
                self.count("draftd_fail_opens_total", namespace, reason, amount=int(added.fail_opens[i]))
        self.count("draftd_engine_committed_tokens_total", namespace, amount=int(added.committed_tokens[0]))
        self.count("draftd_engine_lost_tokens_total", namespace, amount=int(added.lost_tokens[0]))

    def collect(self) -> Iterator[Metric]:
        """Yields the catalogue's metrics; called by the registry."""
        for info in CATALOGUE:
            yield self._family(info)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """The catalogue without values, so that registering collects nothing."""
        return [Metric(info.name.removesuffix("_total"), info.help, info.type) for info in CATALOGUE]

    def _histogram(self, name: str, labels: Labels) -> _Histogram:
        histograms = self._histograms[name]
        if labels not in histograms:
            histograms[labels] = _Histogram(_BY_NAME[name].bounds)
        return histograms[labels]

    def _family(self, info: MetricInfo) -> Metric:
        if info.type == "counter":
            counter = CounterMetricFamily(info.name, info.help, labels=info.labels)
            for labels, value in sorted(self._counters[info.name].items()):
                counter.add_metric(labels, value)
            return counter
        if info.type == "gauge":
            gauge = GaugeMetricFamily(info.name, info.help, labels=info.labels)
            for labels, value in sorted(self._gauges[info.name].items()):
                gauge.add_metric(labels, value)
            return gauge
        histogram = HistogramMetricFamily(info.name, info.help, labels=info.labels)
        for labels, values in sorted(self._histograms[info.name].items()):
            histogram.add_metric(labels, values.buckets(), values.sum)
        return histogram


class FoldedStats:
    """One engine's counters and what of them is folded already."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self._last = np.zeros_like(stats.words)

    def fold_into(self, metrics: Metrics, namespace: str, transport: str) -> None:
        """Folds the increase since the last call; a counter that fell, which only a broken engine can cause, adds nothing."""
        now = self.stats.words.copy()
        metrics.fold(namespace, transport, EngineStats(np.maximum(now - self._last, 0)))
        self._last = now


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for info in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in info.labels)
        lines.append(f"| `{info.name}` | {info.type} | {labels} | {info.help} |")
    return "\n".join(lines) + "\n"
