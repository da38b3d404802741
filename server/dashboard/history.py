"""The last quarter of an hour, a sample a second, for the page and for `draftd top`. In memory, bounded, and gone with the process.

A sample is by how much the counters of Metrics, and those of each engine, have grown. Nothing is counted here anew, and ratios and
percentiles are left to whoever draws them, so that they can be taken over any window.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.stats import SOURCES, STATS_WORDS, EngineStats
from draftd.server.attachments import Attachments
from draftd.server.dashboard.events import Events, Numbers, Watcher
from draftd.server.metrics import OTHER, Metrics, bucket_bounds

INTERVAL_S: Final = 1.0
MAX_SAMPLES: Final = 900
MAX_SERIES: Final = 32
"""Most engines, and most namespaces, that an answer tells apart: those with the most drafts of late; the others are one, named `_other`."""

COUNTS: Final = ("drafts", "draft_tokens", "accepted_tokens", "committed_tokens", "proposals", "rows", "fail_opens")
"""What is counted of an engine and of a namespace, in the order of the numbers in an answer."""
SOURCE_COUNTS: Final = COUNTS[:3]
HISTOGRAMS: Final = {
    "propose": "draftd_propose_latency_seconds",
    "refresh": "draftd_refresh_seconds",
    "visibility": "draftd_visibility_lag_seconds",
}
_EARLY_S = 0.1
_RANKED_SAMPLES = 60

Counts = NDArray[np.int64]
K = TypeVar("K", bound=Hashable)


def _spans() -> tuple[dict[str, int], list[int]]:
    """Position of each span of the words of EngineStats, and where the spans start."""
    at = EngineStats(np.arange(STATS_WORDS, dtype=np.int64))
    by_source = ((name, view) for name, view in vars(at).items() if view.ndim == 2)
    views = {f"{name}.{SOURCES[i]}": view[i] for name, view in by_source for i in range(len(SOURCES))}
    views |= {name: view for name, view in vars(at).items() if name != "words" and view.ndim == 1}
    ordered = sorted(views, key=lambda name: int(views[name][0]))
    return {name: i for i, name in enumerate(ordered)}, [int(views[name][0]) for name in ordered]


_SPAN, _STARTS = _spans()
_OF_SOURCE = [[_SPAN[f"{field}.{source}"] for field in ("acceptance_length", "drafted", "accepted")] for source in SOURCES[1:]]


def _spans_of(words: Sequence[Counts]) -> Counts:
    """Sums of the spans of EngineStats: [n, STATS_WORDS] to [n, spans]."""
    return np.add.reduceat(np.stack(words), _STARTS, axis=1) if words else np.empty((0, len(_STARTS)), np.int64)


def _counts(spans: Counts) -> Counts:
    """COUNTS of each row of spans: [n, spans] to [n, len(COUNTS)]."""
    of_sources = [spans[:, [source[i] for source in _OF_SOURCE]].sum(axis=1) for i in range(len(SOURCE_COUNTS))]
    return np.stack([*of_sources, *(spans[:, _SPAN[name]] for name in COUNTS[len(SOURCE_COUNTS) :])], axis=1)


class _Growth(Generic[K]):
    """By how much counters have grown since they were looked at last."""

    def __init__(self) -> None:
        self._keys: list[K] = []
        self._last: Counts | None = None

    def of(self, keys: list[K], now: Counts) -> Counts:
        """`now` is [n, m], a row a key; a key that was not there before began at 0, and what fell has not grown."""
        before: Counts | int = 0
        if keys == self._keys and self._last is not None:
            before = self._last
        elif self._last is not None and keys:
            rows = dict(zip(self._keys, self._last, strict=True))
            before = np.stack([rows.get(key, np.zeros(now.shape[1], np.int64)) for key in keys])
        self._keys, self._last = keys, now
        grown: Counts = np.maximum(now - before, 0)
        return grown


@dataclass(frozen=True, slots=True)
class Series:
    """Counts of some engines or namespaces: those that counted anything.

    Attributes:
        names: Their names.
        counts: int64 [names, COUNTS].
    """

    names: tuple[str, ...]
    counts: Counts

    @staticmethod
    def of(names: Sequence[str], counts: Counts) -> "Series":
        """Leaves out what counted nothing, and sums what has the same name."""
        counted = np.flatnonzero(counts.any(axis=1))
        names, counts = tuple(names[i] for i in counted.tolist()), counts[counted]
        different = tuple(dict.fromkeys(names))
        if len(different) < len(names):
            summed = np.zeros((len(different), counts.shape[1]), np.int64)
            np.add.at(summed, [different.index(name) for name in names], counts)
            names, counts = different, summed
        return Series(names, counts)

    def as_json(self, shown: frozenset[str]) -> dict[str, list[int]]:
        """The counts by name, those not among `shown` as one."""
        named = self if shown.issuperset(self.names) else Series.of([name if name in shown else OTHER for name in self.names], self.counts)
        return dict(zip(named.names, named.counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Sample:
    """One second.

    Attributes:
        at_s: Unix time of its end.
        seconds: How long it is.
        sources: int64 [3, 3]: SOURCE_COUNTS by source: own tokens, corpus, group.
        histograms: New observations in each bucket, by histogram and label: propose by transport, refresh by kind, visibility.
    """

    number: int
    at_s: float
    seconds: float
    engines: Series
    namespaces: Series
    sources: Counts
    histograms: dict[str, dict[str, Counts]]


class History:
    """The samples and the events. The service's event loop calls `sample`; `answer` may be called from any thread.

    Attributes:
        events: The events.
    """

    def __init__(self, run: str, metrics: Metrics, attachments: Attachments, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._metrics = metrics
        self._attachments = attachments
        self._clock = clock
        self._numbers = Numbers()
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._sampled_s = clock()
        self._engines: _Growth[str] = _Growth()
        self._namespaces: _Growth[tuple[str, str]] = _Growth()
        self._buckets: dict[str, _Growth[tuple[str, ...]]] = {name: _Growth() for name in HISTOGRAMS}
        self.events = Events(self._numbers, clock)
        self._watcher = Watcher(metrics, self.events)

    def sample(self) -> None:
        """Takes a sample, if it is time for one; Metrics must be up to date."""
        now = self._clock()
        seconds = now - self._sampled_s
        if 0 <= seconds < INTERVAL_S - _EARLY_S:
            return
        self._sampled_s = now
        self._watcher.look()
        attachments = list(self._attachments)
        of_engines = self._engines.of([a.id for a in attachments], _counts(_spans_of([a.stats.words for a in attachments])))
        totals = self._metrics.engine_totals
        labels = list(totals)
        spans = self._namespaces.of(labels, _spans_of([totals[label].words for label in labels]))
        sample = Sample(
            number=self._numbers.next(),
            at_s=now,
            seconds=max(seconds, 0.0),
            engines=Series.of([a.engine.name for a in attachments], of_engines),
            namespaces=Series.of([namespace for namespace, _ in labels], _counts(spans)),
            sources=spans.sum(axis=0)[_OF_SOURCE],
            histograms={name: self._observed(name, metric) for name, metric in HISTOGRAMS.items()},
        )
        self._samples.append(sample)

    def _observed(self, name: str, metric: str) -> dict[str, Counts]:
        """New observations of a histogram, by the value of its label, "" without one."""
        now = self._metrics.bucket_counts(metric)
        if not now:
            return {}
        grown = self._buckets[name].of(list(now), np.stack(list(now.values())))
        return {"".join(labels): counts for labels, counts in zip(now, grown, strict=True) if counts.any()}

    def totals(self) -> dict[str, int]:
        """COUNTS of all engines since the start of the service."""
        spans = _spans_of([stats.words for stats in self._metrics.engine_totals.values()])
        return dict(zip(COUNTS, _counts(spans).sum(axis=0).tolist(), strict=True))

    def answer(self, after: int) -> dict[str, Any]:
        """What /v1/history answers: samples and events that are newer than number `after`."""
        # The number is read first: what comes meanwhile is sent again rather than left out.
        number = self._numbers.last
        samples = list(self._samples)
        engines = _with_most_drafts([sample.engines for sample in samples])
        namespaces = _with_most_drafts([sample.namespaces for sample in samples])
        return {
            "run": self._run,
            "number": number,
            "now_s": self._clock(),
            "interval_s": INTERVAL_S,
            "counts": COUNTS,
            "bounds_s": {name: bucket_bounds(metric) for name, metric in HISTOGRAMS.items()},
            "samples": [_sample_json(sample, engines, namespaces) for sample in samples if sample.number > after],
            "events": [event.as_json() for event in self.events.newer_than(after)],
        }


def _with_most_drafts(all_series: Sequence[Series]) -> frozenset[str]:
    """The names that are told apart."""
    names = frozenset[str]().union(*(series.names for series in all_series))
    if len(names) <= MAX_SERIES:
        return names
    drafts: Counter[str] = Counter()
    for series in all_series[-_RANKED_SAMPLES:]:
        drafts.update(dict(zip(series.names, series.counts[:, 0].tolist(), strict=True)))
    return frozenset(name for name, _ in drafts.most_common(MAX_SERIES - 1))


def _sample_json(sample: Sample, engines: frozenset[str], namespaces: frozenset[str]) -> dict[str, Any]:
    return {
        "number": sample.number,
        "at_s": round(sample.at_s, 3),
        "seconds": round(sample.seconds, 3),
        "engines": sample.engines.as_json(engines),
        "namespaces": sample.namespaces.as_json(namespaces),
        "sources": dict(zip(SOURCES[1:], sample.sources.tolist(), strict=True)),
        **{name: {label: counts.tolist() for label, counts in by_label.items()} for name, by_label in sample.histograms.items()},
    }
