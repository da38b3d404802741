"""Fills the metrics from the core and the attachments, at each scrape and each housekeeping tick."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from draftd.drafter.corpus import Corpus
from draftd.drafter.records import NamespaceInfo
from draftd.drafter.stats import EngineStats
from draftd.server.attachments import HANDLE, INLINE, MAPPED, Attachment, Attachments
from draftd.server.dashboard.events import Events, Level
from draftd.server.fallback import Fallback
from draftd.server.metrics import FoldedStats, Metrics
from draftd.server.replicate.counts import AT_CORPUS, AT_STREAM, ReplicationState
from draftd.server.replicate.message import REASONS
from draftd.server.store.sleep import Sleepers
from draftd.server.store.store import Store

if TYPE_CHECKING:
    from draftd.server.device_handle import TensorSharing
    from draftd.server.replicate.replicator import Replicator

log = structlog.get_logger()


class Telemetry:
    """Moves counts from where they arise into Metrics. The service's event loop is its only caller."""

    def __init__(
        self,
        metrics: Metrics,
        corpus: Corpus,
        attachments: Attachments,
        events: Events,
        store: Store | None = None,
        sleepers: Sleepers | None = None,
        replicator: "Replicator | None" = None,
    ) -> None:
        self._events = events
        self._store = store
        self._sleepers = sleepers
        self._replicator = replicator
        self._metrics = metrics
        self._corpus = corpus
        self._attachments = attachments
        self._folded: dict[str, FoldedStats] = {}
        self._unattached: defaultdict[str, FoldedStats] = defaultdict(lambda: FoldedStats(EngineStats()))
        self._errors_of: dict[str, int] = {}
        self._row_errors = 0
        self._refresh_errors = 0
        self._failed_launches = 0
        self._evicted: defaultdict[str, int] = defaultdict(int)

    def unattached(self, namespace: str) -> EngineStats:
        """Where proposals of callers without an attachment are counted."""
        return self._unattached[self._metrics.namespace_label(namespace)].stats

    def attached(self, attachment: Attachment, fallback: Fallback | None = None) -> None:
        """Starts to follow an attachment; `fallback` is why it does not map, where it would."""
        engine = attachment.engine.name
        self._folded[attachment.id] = FoldedStats(attachment.stats)
        self._metrics.count("draftd_attaches_total", attachment.transport)
        if fallback is None:
            self._events.note("attach", engine, f"attached over {attachment.transport}")
            return
        self._metrics.count("draftd_fallbacks_total", fallback.kind)
        # An engine of another host never maps; on this one somebody expects it.
        level: Level = "info" if fallback.kind == "host" else "warning"
        self._events.note("attach", engine, f"attached over {attachment.transport}: {fallback.text}", level=level)
        getattr(log, level)("not_mapped", engine=engine, transport=attachment.transport, kind=fallback.kind, reason=fallback.text)

    def detached(self, attachment: Attachment, *, lost: bool = False) -> None:
        """Folds what an attachment counted last."""
        self._row_errors += self._errors_of.pop(attachment.id, 0)
        self._folded.pop(attachment.id).fold_into(self._metrics, attachment.namespace, attachment.transport)
        if lost:
            self._events.note("lease lost", attachment.engine.name, "did not renew its lease in time", level="warning")
        else:
            self._events.note("detach", attachment.engine.name, "detached")

    def update(self) -> None:
        """Brings Metrics up to date."""
        for attachment in self._attachments:
            self._attachments.refresh_stats(attachment)
            if attachment.transport == MAPPED:
                self._errors_of[attachment.id] = self._corpus.rows.errors(attachment.id)
            self._folded[attachment.id].fold_into(self._metrics, attachment.namespace, attachment.transport)
        for namespace, folded in self._unattached.items():
            folded.fold_into(self._metrics, namespace, INLINE)
        for stat in self._corpus.refresh_stats():
            self._metrics.observe("draftd_refresh_seconds", stat.seconds, stat.kind)
            self._metrics.count("draftd_refresh_tokens_total", stat.kind, amount=stat.tokens)
        for lag in self._corpus.visibility_lags():
            self._metrics.observe("draftd_visibility_lag_seconds", lag)
        if self._corpus.refresh_errors > self._refresh_errors:
            log.error("refresh_failed", times=self._corpus.refresh_errors - self._refresh_errors, exc_info=self._corpus.refresh_failure)
            self._refresh_errors = self._corpus.refresh_errors
        self._metrics.advance("draftd_refresh_errors_total", self._refresh_errors)
        self._metrics.replace("draftd_device_memory_bytes", {(part,): n for part, n in self._corpus.device_bytes().items()})
        self._metrics.advance("draftd_reader_timeouts_total", self._corpus.readers_passed_over)
        self._metrics.advance("draftd_row_errors_total", self._row_errors + sum(self._errors_of.values()))
        if self._attachments.sharing is not None:
            self._of_sharing(self._attachments.sharing)
        if self._attachments.memory is not None:
            self._metrics.advance("draftd_memory_refusals_total", self._attachments.memory.refused)
        self._corpus_gauges()
        if self._store is not None:
            self._of_store(self._store)
        if self._replicator is not None:
            self._of_replication(self._replicator.state())
        transports = [attachment.transport for attachment in self._attachments]
        self._metrics.replace("draftd_attachments", {(name,): transports.count(name) for name in (MAPPED, HANDLE, INLINE)})

    def _of_sharing(self, sharing: "TensorSharing") -> None:
        counts = sharing.counts()
        for outcome, count in counts.items():
            self._metrics.advance("draftd_handle_batches_total", count, outcome)
        self._metrics.advance("draftd_abandoned_streams_total", sharing.abandoned)
        if counts.get("failed", 0) > self._failed_launches:
            log.error("launch_failed", times=counts["failed"] - self._failed_launches)
            self._failed_launches = counts["failed"]

    def _of_store(self, store: Store) -> None:
        counts = store.counts
        self._metrics.advance("draftd_store_written_documents_total", counts.written_documents)
        self._metrics.advance("draftd_store_written_tokens_total", counts.written_tokens)
        self._metrics.advance("draftd_store_deleted_documents_total", counts.deleted_documents)
        self._metrics.advance("draftd_store_unwritten_documents_total", store.backlog.never_written)
        self._metrics.advance("draftd_store_damaged_documents_total", counts.damaged_documents)
        self._metrics.advance("draftd_store_errors_total", counts.errors)
        seconds, counts.commit_s = counts.commit_s, []
        for one in seconds:
            self._metrics.observe("draftd_store_commit_seconds", one)
        self._metrics.set("draftd_store_failing", int(bool(store.failure)))
        self._metrics.set("draftd_store_lag_seconds", store.lag_s())
        self._metrics.set("draftd_store_pending_documents", store.backlog.waiting)
        self._metrics.set("draftd_store_bytes", store.database.size_bytes())
        self._metrics.set("draftd_store_restored_documents", counts.restored_documents)
        self._metrics.set("draftd_store_restored_tokens", counts.restored_tokens)
        self._metrics.set("draftd_store_restore_seconds", counts.restore_s)
        self._metrics.set("draftd_namespaces_asleep", len(self._sleepers or ()))

    def _of_replication(self, state: ReplicationState) -> None:
        counts, metrics = state.counts, self._metrics
        metrics.set("draftd_replication_connected", int(state.connected))
        metrics.set("draftd_replication_lag_messages", state.lag_messages)
        metrics.set("draftd_replication_outbox_documents", state.outbox_documents)
        metrics.set("draftd_replication_outbox_age_seconds", state.outbox_age_s)
        metrics.advance("draftd_replication_connections_total", counts.connections)
        metrics.advance("draftd_replication_errors_total", counts.errors)
        metrics.advance("draftd_replication_published_documents_total", counts.published_documents)
        metrics.advance("draftd_replication_published_bytes_total", counts.published_bytes)
        metrics.advance("draftd_replication_consumed_documents_total", counts.consumed_documents)
        metrics.advance("draftd_replication_consumed_tokens_total", counts.consumed_tokens)
        metrics.advance("draftd_replication_consumed_bytes_total", counts.consumed_bytes)
        metrics.advance("draftd_replication_renamed_documents_total", counts.renamed)
        for name, by_label in (
            ("draftd_replication_unsent_documents_total", state.unsent_documents),
            ("draftd_replication_duplicate_documents_total", {at: counts.duplicates[at] for at in (AT_STREAM, AT_CORPUS)}),
            ("draftd_replication_refused_messages_total", {reason: counts.refused[reason] for reason in REASONS}),
        ):
            for label, value in by_label.items():
                metrics.advance(name, value, label)

    def _acceptance_gauges(self, infos: Sequence[NamespaceInfo]) -> None:
        """Predicted and observed acceptance; of namespaces that share a label those of the one that has drafted most."""
        shown: dict[str, NamespaceInfo] = {}
        for info in sorted(infos, key=lambda i: sum(d.drafted for d in i.deciles)):
            if any(d.drafted for d in info.deciles):
                shown[self._metrics.namespace_label(info.name)] = info
        for name, attribute in (
            ("draftd_predicted_acceptance", "predicted"),
            ("draftd_observed_acceptance", "accepted"),
            ("draftd_predicted_tokens", "drafted"),
        ):
            values: dict[tuple[str, ...], float] = {
                (label, str(i)): float(getattr(decile, attribute))
                for label, info in shown.items()
                for i, decile in enumerate(info.deciles)
                if decile.drafted
            }
            self._metrics.replace(name, values)
        self._metrics.replace("draftd_brier_score", {(label,): info.brier_score for label, info in shown.items()})
        self._metrics.advance("draftd_calibration_refused_total", self._corpus.calibrations_refused)

    def _corpus_gauges(self) -> None:
        infos = self._corpus.namespaces()
        self._metrics.set("draftd_namespaces", len(infos))
        for name, attribute in (
            ("draftd_corpus_tokens", "tokens"),
            ("draftd_corpus_quota_tokens", "quota_tokens"),
            ("draftd_corpus_documents", "documents"),
            ("draftd_corpus_open_documents", "open_documents"),
            ("draftd_corpus_generation", "generation"),
            ("draftd_corpus_bytes", "bytes"),
        ):
            values: defaultdict[tuple[str, ...], float] = defaultdict(float)
            for info in infos:
                values[self._metrics.namespace_label(info.name),] += getattr(info, attribute)
            self._metrics.replace(name, values)
        segments: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for info in infos:
            label = self._metrics.namespace_label(info.name)
            for segment in ("main", "recent", "live"):
                segments[label, segment] += getattr(info, segment)
            # A namespace that was dropped and made anew counts from 0 again; the metric goes on from where it was.
            before = self._evicted[info.name]
            added = info.evicted_tokens - before if info.evicted_tokens >= before else info.evicted_tokens
            self._metrics.count("draftd_corpus_evicted_tokens_total", label, amount=added)
            self._evicted[info.name] = info.evicted_tokens
        self._metrics.replace("draftd_corpus_segment_tokens", segments)
        self._acceptance_gauges(infos)
        for name in self._evicted.keys() - {info.name for info in infos}:
            del self._evicted[name]
