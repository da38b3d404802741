"""Fills the metrics from the core and the attachments, at each scrape and each housekeeping tick."""

from collections import defaultdict

from draftd.drafter.corpus import Corpus
from draftd.drafter.stats import EngineStats
from draftd.server.attachments import HANDLE, INLINE, MAPPED, Attachment, Attachments
from draftd.server.metrics import FoldedStats, Metrics


class Telemetry:
    """Moves counts from where they arise into Metrics. The service's event loop is its only caller."""

    def __init__(self, metrics: Metrics, corpus: Corpus, attachments: Attachments) -> None:
        self._metrics = metrics
        self._corpus = corpus
        self._attachments = attachments
        self._folded: dict[str, FoldedStats] = {}
        self._unattached: defaultdict[str, FoldedStats] = defaultdict(lambda: FoldedStats(EngineStats()))
        self._errors_of: dict[str, int] = {}
        self._row_errors = 0
        self._evicted: defaultdict[str, int] = defaultdict(int)

    def unattached(self, namespace: str) -> EngineStats:
        """Where proposals of callers without an attachment are counted."""
        return self._unattached[self._metrics.namespace_label(namespace)].stats

    def attached(self, attachment: Attachment) -> None:
        """Starts to follow an attachment."""
        self._folded[attachment.id] = FoldedStats(attachment.stats)
        self._metrics.count("draftd_attaches_total", attachment.transport)

    def detached(self, attachment: Attachment) -> None:
        """Folds what an attachment counted last."""
        self._row_errors += self._errors_of.pop(attachment.id, 0)
        self._folded.pop(attachment.id).fold_into(self._metrics, attachment.namespace, attachment.transport)

    def update(self) -> None:
        """Brings Metrics up to date."""
        for attachment in self._attachments:
            self._attachments.refresh_stats(attachment)
            if attachment.transport == MAPPED:
                self._errors_of[attachment.id] = self._corpus.row_errors(attachment.id)
            self._folded[attachment.id].fold_into(self._metrics, attachment.namespace, attachment.transport)
        for namespace, folded in self._unattached.items():
            folded.fold_into(self._metrics, namespace, INLINE)
        for stat in self._corpus.refresh_stats():
            self._metrics.observe("draftd_refresh_seconds", stat.seconds, stat.kind)
            self._metrics.count("draftd_refresh_tokens_total", stat.kind, amount=stat.tokens)
        for lag in self._corpus.visibility_lags():
            self._metrics.observe("draftd_visibility_lag_seconds", lag)
        self._metrics.advance("draftd_refresh_errors_total", self._corpus.refresh_errors)
        self._metrics.advance("draftd_reader_timeouts_total", self._corpus.readers_passed_over)
        self._metrics.advance("draftd_row_errors_total", self._row_errors + sum(self._errors_of.values()))
        self._corpus_gauges()
        transports = [attachment.transport for attachment in self._attachments]
        self._metrics.replace("draftd_attachments", {(name,): transports.count(name) for name in (MAPPED, HANDLE, INLINE)})

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
        for name in self._evicted.keys() - {info.name for info in infos}:
            del self._evicted[name]
