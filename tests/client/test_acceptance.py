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
