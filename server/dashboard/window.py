"""What follows from the samples of a window, for `draftd top`: ratios, rates and percentiles. The page does the same in history.js.

Where there is nothing to measure a figure is None, which is not 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


class Window:
    """Sums over samples as /v1/history has them.

    Args:
        answer: An answer of /v1/history, for what its numbers mean.
        samples: The samples to sum, oldest first.
    """

    def __init__(self, answer: Json, samples: Sequence[Json]) -> None:
        self._place = {name: i for i, name in enumerate(answer["counts"])}
        self._bounds_s: Mapping[str, Sequence[float]] = answer["bounds_s"]
        self._samples = samples

    def labels(self, part: str) -> list[str]:
        """Engines, namespaces, sources, transports or kinds that counted anything."""
        return sorted({label for sample in self._samples for label in sample[part]})

    def total(self, part: str, label: str | None = None) -> list[int]:
        """Counts of one of them, or of all together; empty if nothing was counted."""
        found = [counts for sample in self._samples for name, counts in sample[part].items() if label in (None, name)]
        return [sum(column) for column in zip(*found, strict=True)]

    def ratio(self, counts: Sequence[int], part: str, whole: str) -> float | None:
        """One count divided by another; None where there is nothing to divide by."""
        return counts[self._place[part]] / counts[self._place[whole]] if counts and counts[self._place[whole]] else None

    def rate(self, part: str, label: str | None, name: str) -> float | None:
        """A count a second, of one label since it first counted anything, or of all together; None without a sample."""
        since = 0
        if label is not None:
            since = next((i for i, sample in enumerate(self._samples) if label in sample[part]), 0)
        seconds: float = sum(sample["seconds"] for sample in self._samples[since:])
        counts = self.total(part, label)
        if not seconds:
            return None
        return counts[self._place[name]] / seconds if counts else 0.0

    def percentile_s(self, histogram: str, label: str, q: float) -> float | None:
        """A percentile in seconds, interpolated within its bucket; the last bound stands for all above it. None without observations."""
        counts, bounds = self.total(histogram, label), self._bounds_s[histogram]
        rank = q * sum(counts)
        if not rank:
            return None
        below = 0
        for i, bound in enumerate(bounds):
            if counts[i] and below + counts[i] >= rank:
                low = bounds[i - 1] if i else 0.0
                return low + (bound - low) * (rank - below) / counts[i]
            below += counts[i]
        return bounds[-1]


def summarize(status: Json, answer: Json, samples: Sequence[Json], window_s: float) -> dict[str, Any]:
    """The figures of the last `window_s` seconds.

    Args:
        status: An answer of /v1/status.
        answer: The newest answer of /v1/history.
        samples: All samples at hand, oldest first.
    """
    shown = [sample for sample in samples if sample["at_s"] > answer["now_s"] - window_s]
    window = Window(answer, shown)
    return {
        "version": status["version"],
        "run": status["instance"],
        "ready": status["ready"],
        "uptime_s": status["uptime_s"],
        "window_s": window_s,
        **_acceptance(window, "namespaces", None),
        "propose": _percentiles(window, "propose"),
        "visibility": _percentiles(window, "visibility").get("", {"count": 0, "p50_s": None, "p99_s": None}),
        "refresh": _percentiles(window, "refresh"),
        "totals": status["totals"],
        "store": status["store"],
        "engines": [engine | _acceptance(window, "engines", engine["engine"]) for engine in status["attachments"]],
        "namespaces": [space | _acceptance(window, "namespaces", space["name"]) for space in status["namespaces"]],
        "asleep": status["asleep"],
    }


def _acceptance(window: Window, part: str, label: str | None) -> dict[str, Any]:
    counts = window.total(part, label)
    return {
        "acceptance_length": window.ratio(counts, "accepted_tokens", "drafts"),
        "acceptance_rate": window.ratio(counts, "accepted_tokens", "draft_tokens"),
        "proposals_per_s": window.rate(part, label, "proposals"),
        "committed_tokens_per_s": window.rate(part, label, "committed_tokens"),
    }


def _percentiles(window: Window, histogram: str) -> dict[str, dict[str, Any]]:
    return {
        label: {
            "count": sum(window.total(histogram, label)),
            "p50_s": window.percentile_s(histogram, label, 0.5),
            "p99_s": window.percentile_s(histogram, label, 0.99),
        }
        for label in window.labels(histogram)
    }
