"""What happened lately, as a short list for people: noted where it happens, or seen in a counter that grew.

What repeats within a minute is one event with an amount, so that a fault a thousand times a second does not push out the rest.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from draftd.server.metrics import CATALOGUE, Labels, Metrics

Level = Literal["info", "warning", "error"]
MAX_EVENTS = 200
REPEATED_WITHIN_S = 60.0

_LABELS = {info.name: info.labels for info in CATALOGUE}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, perhaps repeatedly.

    Attributes:
        id: Unique in this run of the service.
        number: Of its last change; see Numbers.
        first_s: Unix time at which it happened first.
        last_s: Unix time at which it happened last.
        kind: A word or two for what sort of thing it is.
        subject: Engine, namespace or method that it is about; may be empty.
        text: What happened.
        amount: How often, or how many tokens where `text` says so; 0 where that means nothing.
    """

    id: int
    number: int
    first_s: float
    last_s: float
    kind: str
    level: Level
    subject: str
    text: str
    amount: int

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


class Numbers:
    """Numbers that rise, one for each change, so that a reader can ask for what is newer than what it has."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """The number of a change that is made now."""
        self.last += 1
        return self.last


class Events:
    """The list. Written by the service's event loop alone; `newer_than` may be called from any thread."""

    def __init__(self, numbers: Numbers, clock: Callable[[], float] = time.time) -> None:
        self._numbers = numbers
        self._clock = clock
        self._by_id: dict[int, Event] = {}
        self._latest: dict[tuple[str, str, str], int] = {}

    def note(self, kind: str, subject: str, text: str, *, level: Level = "info", amount: int = 0) -> None:
        """Adds an event; with an amount, to the same one of the last minute if there is one."""
        now, number, key = self._clock(), self._numbers.next(), (kind, subject, text)
        known = self._by_id.get(self._latest.get(key, 0)) if amount else None
        if known and now - known.last_s <= REPEATED_WITHIN_S:
            self._by_id[known.id] = replace(known, number=number, last_s=now, amount=known.amount + amount)
            return
        self._by_id[number] = Event(number, number, now, now, kind, level, subject, text, amount)
        self._latest[key] = number
        if len(self._by_id) > MAX_EVENTS:
            gone = self._by_id.pop(next(iter(self._by_id)))
            gone_key = (gone.kind, gone.subject, gone.text)
            if self._latest.get(gone_key) == gone.id:
                del self._latest[gone_key]

    def newer_than(self, number: int) -> list[Event]:
        """Events that were added or changed after that number, in the order in which they began."""
        return [event for event in list(self._by_id.values()) if event.number > number]


@dataclass(frozen=True, slots=True)
class _Watch:
    """A counter whose growth is an event.

    Attributes:
        subject: Label that names what it is about; empty: nothing in particular.
        text: What happened, with labels in braces.
        leave_out: Label values that another counter tells of.
    """

    metric: str
    kind: str
    text: str
    subject: str = ""
    level: Level = "warning"
    leave_out: frozenset[str] = frozenset()


_REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
_DEFECTS = frozenset({"INTERNAL", "failed"})
"""Label values of what somebody has to look at."""
_WATCHED = (
    _Watch("draftd_fail_opens_total", "fail-open", "calls without drafts: {reason}", "namespace"),
    _Watch("draftd_engine_lost_tokens_total", "lost tokens", "tokens that never reached the corpus", "namespace"),
    _Watch("draftd_corpus_evicted_tokens_total", "eviction", "tokens evicted", "namespace", "info"),
    _Watch("draftd_refresh_tokens_total", "merge", "suffixes merged into main", level="info", leave_out=frozenset({"live", "recent"})),
    _Watch("draftd_rpc_errors_total", "error", "calls answered {code}", "method", leave_out=_REFUSALS),
    _Watch("draftd_refused_calls_total", "refused", "calls refused: {reason}"),
    _Watch("draftd_refresh_errors_total", "error", "refreshes that failed", level="error"),
    _Watch("draftd_background_errors_total", "error", "defects in the background; see the log", level="error"),
    _Watch("draftd_reader_timeouts_total", "slow engine", "refreshes that stopped waiting for an engine"),
    _Watch("draftd_row_errors_total", "error", "rows of mapped engines that were refused"),
    _Watch("draftd_store_errors_total", "store", "writes that the store refused", level="error"),
    _Watch("draftd_store_damaged_documents_total", "store", "damaged documents set aside", level="error"),
    _Watch("draftd_replication_errors_total", "replication", "connections to NATS that failed or were lost"),
    _Watch("draftd_replication_refused_messages_total", "replication", "messages of other nodes refused: {reason}"),
    _Watch("draftd_replication_unsent_documents_total", "replication", "documents never sent to other nodes: {reason}"),
    _Watch("draftd_spans_dropped_total", "tracing", "spans dropped"),
    _Watch("draftd_audited_calls_total", "audit", "calls of {method}: {outcome}", level="info"),
    _Watch("draftd_reloads_total", "reload", "reloads of {file}: {result}", level="info"),
)


class Watcher:
    """Notes an event for each counter that has grown since it was looked at last."""

    def __init__(self, metrics: Metrics, events: Events) -> None:
        self._metrics = metrics
        self._events = events
        self._seen: dict[str, dict[Labels, float]] = {watch.metric: {} for watch in _WATCHED}

    def look(self) -> None:
        """Compares every watched counter with what it was."""
        for watch in _WATCHED:
            seen = self._seen[watch.metric]
            for labels, value in self._metrics.values(watch.metric).items():
                grown = int(value - seen.get(labels, 0))
                if grown > 0:
                    seen[labels] = value
                    if watch.leave_out.isdisjoint(labels):
                        self._note(watch, dict(zip(_LABELS[watch.metric], labels, strict=True)), grown)

    def _note(self, watch: _Watch, labels: Mapping[str, str], grown: int) -> None:
        level: Level = "error" if not _DEFECTS.isdisjoint(labels.values()) else watch.level
        self._events.note(watch.kind, labels.get(watch.subject, ""), watch.text.format_map(labels), level=level, amount=grown)
