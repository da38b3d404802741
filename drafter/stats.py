"""What an engine counts while it drafts, as cumulative numbers that the service can read without asking.

One array of int64 words; in a row block the service maps it, elsewhere it lives on the heap. Only the engine's decode thread adds.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.params import MAX_K

SOURCES: Final = ("none", "local", "corpus", "group")
FAIL_OPEN_REASONS: Final = ("unavailable", "timeout", "refused", "unattached", "torn", "rows_full", "internal")
PROPOSE_US_BOUNDS: Final = (5, 10, 20, 35, 50, 75, 100, 150, 200, 350, 500, 750, 1000, 2000, 5000, 10_000)
BATCH_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_FIELDS: Final = (
    ("proposals", (1,)),
    ("rows", (1,)),
    ("drafted", (len(SOURCES), MAX_K)),
    ("accepted", (len(SOURCES), MAX_K)),
    ("acceptance_length", (len(SOURCES), MAX_K + 1)),
    ("propose_us_buckets", (len(PROPOSE_US_BOUNDS) + 1,)),
    ("propose_us_sum", (1,)),
    ("batch_rows_buckets", (len(BATCH_BOUNDS) + 1,)),
    ("fail_opens", (len(FAIL_OPEN_REASONS),)),
    ("committed_tokens", (1,)),
    ("lost_tokens", (1,)),
)
STATS_WORDS: Final = sum(int(np.prod(shape)) for _, shape in _FIELDS)


class EngineStats:
    """Cumulative counters of one engine, each a view into one int64 array.

    Attributes:
        proposals: [1] calls of propose.
        rows: [1] rows in them.
        drafted: [4, MAX_K] drafted tokens by source, see SOURCES, and position in the draft.
        accepted: [4, MAX_K] of those, the ones that the engine committed.
        acceptance_length: [4, MAX_K + 1] drafts by source and number of accepted tokens.
        propose_us_buckets: [16 + 1] calls by latency, upper bounds in PROPOSE_US_BOUNDS, microseconds.
        propose_us_sum: [1] their sum, microseconds.
        batch_rows_buckets: [10 + 1] calls by batch size, upper bounds in BATCH_BOUNDS.
        fail_opens: [7] calls answered without drafts, by FAIL_OPEN_REASONS.
        committed_tokens: [1] tokens that the engine committed.
        lost_tokens: [1] of those, the ones that never reached the corpus.
    """

    proposals: NDArray[np.int64]
    rows: NDArray[np.int64]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    acceptance_length: NDArray[np.int64]
    propose_us_buckets: NDArray[np.int64]
    propose_us_sum: NDArray[np.int64]
    batch_rows_buckets: NDArray[np.int64]
    fail_opens: NDArray[np.int64]
    committed_tokens: NDArray[np.int64]
    lost_tokens: NDArray[np.int64]

    def __init__(self, words: NDArray[np.int64] | None = None) -> None:
        self.words: NDArray[np.int64] = np.zeros(STATS_WORDS, np.int64) if words is None else words
        start = 0
        for name, shape in _FIELDS:
            size = int(np.prod(shape))
            setattr(self, name, self.words[start : start + size].reshape(shape))
            start += size

    def snapshot(self) -> EngineStats:
        """A copy that no longer changes."""
        return EngineStats(self.words.copy())

    def add(self, other: EngineStats) -> None:
        """Adds another engine's counts to these."""
        self.words += other.words

    def count_proposal(self, rows: int, elapsed_us: float) -> None:
        """Counts one call of propose for `rows` rows that took `elapsed_us` microseconds."""
        self.proposals[0] += 1
        self.rows[0] += rows
        self.propose_us_sum[0] += round(elapsed_us)
        self.propose_us_buckets[bisect_left(PROPOSE_US_BOUNDS, elapsed_us)] += 1
        self.batch_rows_buckets[bisect_left(BATCH_BOUNDS, rows)] += 1

    def count_verified(self, source: int, drafted: int, accepted: int) -> None:
        """Counts one draft of `drafted` tokens from `source`, of which the engine committed the first `accepted`."""
        self.drafted[source, :drafted] += 1
        self.accepted[source, :accepted] += 1
        self.acceptance_length[source, accepted] += 1

    def count_fail_open(self, reason: str) -> None:
        """Counts one call that was answered without drafts."""
        self.fail_opens[FAIL_OPEN_REASONS.index(reason)] += 1
