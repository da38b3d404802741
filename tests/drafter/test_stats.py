"""Counters of an engine."""

from __future__ import annotations

import numpy as np
import pytest

from draftd.drafter.params import MAX_K
from draftd.drafter.stats import BATCH_BOUNDS, FAIL_OPEN_REASONS, PROPOSE_US_BOUNDS, STATS_WORDS, EngineStats


def test_counters_are_views_of_one_array() -> None:
    words = np.zeros(STATS_WORDS, np.int64)
    stats = EngineStats(words)
    names = [n for n in EngineStats.__annotations__ if n != "words"]
    for i, name in enumerate(names, 1):
        getattr(stats, name)[...] = i
    assert sorted(set(words.tolist())) == list(range(1, len(names) + 1)), "counters overlap, or some words are nobody's"
    assert EngineStats(words).lost_tokens[0] == stats.lost_tokens[0]


@pytest.mark.parametrize(
    ("us", "bucket"), [(0.0, 0), (5.0, 0), (5.1, 1), (10_000.0, len(PROPOSE_US_BOUNDS) - 1), (1e9, len(PROPOSE_US_BOUNDS))]
)
def test_latency_goes_to_the_bucket_whose_bound_it_does_not_exceed(us: float, bucket: int) -> None:
    stats = EngineStats()
    stats.count_proposal(3, us)
    assert stats.propose_us_buckets.tolist() == [int(i == bucket) for i in range(len(PROPOSE_US_BOUNDS) + 1)]
    assert (stats.proposals[0], stats.rows[0], stats.propose_us_sum[0]) == (1, 3, round(us))


@pytest.mark.parametrize(("rows", "bucket"), [(0, 0), (1, 0), (2, 1), (3, 2), (512, len(BATCH_BOUNDS) - 1), (513, len(BATCH_BOUNDS))])
def test_batch_size_goes_to_its_bucket(rows: int, bucket: int) -> None:
    stats = EngineStats()
    stats.count_proposal(rows, 1)
    assert int(np.flatnonzero(stats.batch_rows_buckets)[0]) == bucket


def test_acceptance_by_source_and_position() -> None:
    stats = EngineStats()
    stats.count_verified(2, 4, 2)
    stats.count_verified(2, 3, 3)
    stats.count_verified(1, MAX_K, MAX_K)
    stats.count_verified(0, 0, 0)
    assert stats.drafted[2, :5].tolist() == [2, 2, 2, 1, 0]
    assert stats.accepted[2, :5].tolist() == [2, 2, 1, 0, 0]
    assert stats.acceptance_length[2, :5].tolist() == [0, 0, 1, 1, 0]
    assert stats.drafted[1].tolist() == [1] * MAX_K
    assert stats.acceptance_length[1, MAX_K] == 1
    assert stats.acceptance_length[0, 0] == 1


def test_fail_opens_by_reason() -> None:
    stats = EngineStats()
    for i, reason in enumerate(FAIL_OPEN_REASONS):
        for _ in range(i):
            stats.count_fail_open(reason)
    assert stats.fail_opens.tolist() == list(range(len(FAIL_OPEN_REASONS)))
    with pytest.raises(ValueError, match=r"tuple\.index"):
        stats.count_fail_open("no such reason")


def test_snapshot_no_longer_changes_and_add_sums() -> None:
    stats = EngineStats()
    stats.count_proposal(2, 7)
    copy = stats.snapshot()
    stats.count_proposal(2, 7)
    assert (copy.proposals[0], stats.proposals[0]) == (1, 2)
    copy.add(stats)
    assert (copy.proposals[0], copy.rows[0], stats.proposals[0]) == (3, 6, 2)
