"""What a namespace has learned about its drafts: collected from its readers, merged and published by the service.

How it is learned is in draftd.drafter.ops.calibrated; how it is collected in draftd.drafter.lessons.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import policy
from draftd.drafter.index import IndexArrays
from draftd.drafter.lessons import Learned
from draftd.drafter.ops.calibrated.cpu_learn import take_in
from draftd.drafter.records import Decile

_LARGEST_FEATURE = 12.0
"""No feature of a candidate is larger."""
_LARGEST_WEIGHT = 20.0
_MOST_SCORED = 1_000_000
"""Drafted tokens after which what was predicted and observed is halved, so that it tells of the last ones."""


class Calibration:
    """A namespace's calibration, of which the service is the only writer.

    Attributes:
        values: float32 [CALIBRATION_WORDS]; what is in force.
        learned: What the service's own drafts teach.
        refused: Times that an engine handed over what cannot have been learned.
        changes: Counts what was taken in.
        start: What it went on from.

    Args:
        index: Where it is published.
        start: What to go on from, of this layout or the one before it; anything else means the shipped prior.
    """

    def __init__(self, index: IndexArrays, start: bytes = b"") -> None:
        kept = policy.adopted(np.frombuffer(start, "<f4")) if len(start) % 4 == 0 else None
        self.start = start
        self.values = policy.shipped_prior().copy() if kept is None or not np.isfinite(kept).all() else kept
        self.learned = Learned.in_process()
        self.refused = 0
        self.changes = 0
        self._index = index
        index.publish_calibration(self.values)

    def take_in(self, learned: Iterable[NDArray[np.float32]]) -> None:
        """Merges what readers have learned, float32 [CALIBRATION_WORDS] each, and publishes the result."""
        total: NDArray[np.float32] | None = None
        for delta in learned:
            if not _plausible(delta):
                self.refused += 1
                continue
            total = delta if total is None else total + delta
        if total is None:
            return
        take_in(self.values, total)
        weights = self.values[policy.WEIGHTS_AT : policy.DECILES_AT]
        np.clip(weights, -_LARGEST_WEIGHT, _LARGEST_WEIGHT, out=weights)
        scores = self.values[policy.DECILES_AT :]
        if scores[:-1:3].sum() > _MOST_SCORED:
            scores *= 0.5
        self.changes += 1
        self._index.publish_calibration(self.values)

    def to_bytes(self) -> bytes:
        """The values, little-endian, for `start`."""
        return self.values.astype("<f4").tobytes()

    def deciles(self) -> tuple[Decile, ...]:
        """Predicted and observed acceptance, by decile of the prediction."""
        rows = self.values[policy.DECILES_AT : policy.BRIER_AT].reshape(-1, 3).tolist()
        return tuple(Decile(round(n), p / n, a / n) if n else Decile(0, 0.0, 0.0) for n, p, a in rows)

    def brier_score(self) -> float:
        """Mean squared difference of prediction and outcome over all drafted tokens; 0 before there are any."""
        drafted = float(self.values[policy.DECILES_AT : policy.BRIER_AT : 3].sum())
        return float(self.values[policy.BRIER_AT]) / drafted if drafted else 0.0


def _plausible(delta: NDArray[np.float32]) -> bool:
    """It can have been learned: engines share the memory that it comes from, and may be wrong."""
    if not np.isfinite(delta).all():
        return False
    cells = delta[: policy.WEIGHTS_AT].reshape(-1, 2)
    weights = delta[policy.WEIGHTS_AT : policy.DECILES_AT].reshape(-1, policy.WEIGHT_WORDS)
    scores = delta[policy.DECILES_AT : policy.BRIER_AT].reshape(-1, 3)
    most = np.abs(weights[:, :-1]).max(axis=1)
    return bool(
        (cells[:, 0] >= 0).all()
        and (cells[:, 0] <= cells[:, 1] * 1.001 + 1e-3).all()
        and (most <= policy.RATE * _LARGEST_FEATURE * weights[:, -1] * 1.001 + 1e-6).all()
        and (scores >= 0).all()
        and (scores[:, 1:] <= scores[:, :1] * 1.001 + 1e-3).all()
        and 0 <= delta[policy.BRIER_AT] <= scores[:, 0].sum() * 1.001 + 1e-3
    )
