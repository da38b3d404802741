"""What became of drafts, counted as a plain reading of the committed tokens counts it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.client.acceptance import PendingDrafts
from draftd.client.rows import Request, RowTable
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import MAX_K
from draftd.drafter.stats import EngineStats

K = 4
token = st.integers(0, 2)
row = st.tuples(st.lists(token, max_size=K), st.integers(1, 2), st.lists(token, max_size=6))


@settings(max_examples=100, deadline=None)
@given(st.lists(row, min_size=1, max_size=5))
def test_settling_counts_the_common_prefix(rows: list[tuple[list[int], int, list[int]]]) -> None:
    n = len(rows)
    table = RowTable(np.zeros((n, 8), np.int32), np.zeros(n, np.int32), 3)
    stats, expected = EngineStats(), EngineStats()
    pending = PendingDrafts(table, stats, K)
    drafts = Drafts.empty(n, K)
    for i, (draft, source, _) in enumerate(rows):
        table.put(i, Request(str(i), "", False, 2), np.array([1, 2], np.int32))
        drafts.tokens[i, : len(draft)] = draft
        drafts.counts[i] = len(draft)
        drafts.source[i] = source if draft else 0
    pending.remember(np.arange(n), drafts)
    for i, (draft, source, committed) in enumerate(rows):
        # A step's tokens may come in several calls.
        for one in committed:
            table.extend(i, np.array([one], np.int32))
        if draft and committed:
            accepted = next((j for j, (a, b) in enumerate(zip(draft, committed, strict=False)) if a != b), min(len(draft), len(committed)))
            expected.count_verified(source, len(draft), accepted)
    pending.settle(np.arange(n))
    np.testing.assert_array_equal(stats.words, expected.words)
    for i, (_, _, committed) in enumerate(rows):
        if committed:
            pending.settle(np.array([i]))
    np.testing.assert_array_equal(stats.words, expected.words)


def test_the_longest_draft_and_the_longest_row() -> None:
    table = RowTable(np.zeros((1, MAX_K + 1), np.int32), np.zeros(1, np.int32), 3)
    stats = EngineStats()
    pending = PendingDrafts(table, stats, MAX_K)
    table.put(0, Request("a", "", False, 1), np.array([1], np.int32))
    drafts = Drafts.empty(1, MAX_K)
    drafts.tokens[:] = 2
    drafts.counts[:] = MAX_K
    drafts.source[:] = 2
    pending.remember(np.array([0]), drafts)
    table.extend(0, np.full(MAX_K, 2, np.int32))
    pending.settle(np.array([0]))
    assert stats.acceptance_length[2, MAX_K] == 1
    assert stats.accepted.sum() == MAX_K


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.lists(token, max_size=K), st.lists(token, min_size=1, max_size=3)), min_size=1, max_size=6),
    wanted=st.integers(0, 20),
    late=st.booleans(),
)
def test_drafts_past_the_end_of_a_request_do_not_count(steps: list[tuple[list[int], list[int]]], wanted: int, late: bool) -> None:
    """The last step came before it was known that the request had ended; the engine itself does not count its draft."""
    table = RowTable(np.zeros((1, 32), np.int32), np.zeros(1, np.int32), 3)
    stats, expected = EngineStats(), EngineStats()
    pending = PendingDrafts(table, stats, K, late=late)
    table.put(0, Request("a", "", False, 2), np.array([1, 2], np.int32))
    starts = [2 + sum(len(committed) for _, committed in steps[:i]) for i in range(len(steps) + 1)]
    # Where one step past the end is all that may have come; without `late` nothing is settled before the end is known.
    length = max(2 + wanted, starts[-2] if late else starts[-1])
    row = np.array([0])
    for (draft, committed), start in zip(steps, starts, strict=False):
        drafts = Drafts.empty(1, K)
        drafts.tokens[0, : len(draft)] = draft
        drafts.counts[0], drafts.source[0] = len(draft), 1 if draft else 0
        pending.settle(row)
        pending.remember(row, drafts)
        table.extend(0, np.array(committed, np.int32))
        if draft and start < length:
            accepted = next((j for j, (a, b) in enumerate(zip(draft, committed, strict=False)) if a != b), min(len(draft), len(committed)))
            expected.count_verified(1, len(draft), accepted)
    pending.settle(row)
    pending.end(0, length)
    np.testing.assert_array_equal(stats.words, expected.words)
    pending.end(0)
    np.testing.assert_array_equal(stats.words, expected.words)


def test_what_was_counted_is_never_taken_back() -> None:
    """Counters that fall look like those of an engine that has begun anew."""
    table = RowTable(np.zeros((1, 8), np.int32), np.zeros(1, np.int32), 3)
    stats = EngineStats()
    pending = PendingDrafts(table, stats, K, late=True)
    table.put(0, Request("a", "", False, 1), np.array([1], np.int32))
    drafts = Drafts.empty(1, K)
    drafts.tokens[0, 0], drafts.counts[0], drafts.source[0] = 2, 1, 1
    for accepted in (0, 1, 2):
        pending.settle(np.array([0]))
        assert stats.accepted.sum() == max(0, accepted - 1)
        pending.remember(np.array([0]), drafts)
        table.extend(0, np.array([2], np.int32))
    pending.end(0, 3)
    assert stats.accepted.sum() == 2
