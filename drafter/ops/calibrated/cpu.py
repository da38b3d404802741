"""The draft rule `calibrated` on the CPU, for a batch of rows of one namespace: a chain, or a tree of the likeliest continuations.

Counts are taken anew after every drafted token. What the draft was decided from is kept, so that it can be learned from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from draftd.drafter.ops.calibrated.cpu_corpus import LEAD_SAMPLES, Segments, count_corpus, find_lanes
from draftd.drafter.ops.calibrated.cpu_local import count_group, count_own, group_tokens
from draftd.drafter.ops.calibrated.cpu_mixer import (
    CANDIDATE_COUNT,
    CANDIDATE_TOKENS,
    PROBABILITIES,
    SCRATCH_COLUMNS,
    VOTE_COUNT,
    mix,
    refine,
)
from draftd.drafter.ops.calibrated.cpu_tally import COLUMNS, SEEN, make_tally
from draftd.drafter.ops.intrinsics import int32_pointer
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.policy import CANDIDATES, LENGTHS, LEVELS, MAX_VOTES, REACH, SOURCES

_LENGTHS = np.array(LENGTHS, np.int64)


@kernel
def draft_calibrated(
    addresses: Any, row_lengths: Any, use_corpus: Any, use_local: bool,
    text: Any, main: Any, main_length: int, buckets: Any, shift: int, recent: Any, recent_length: int, live_text: Any, live: Any,
    live_length: int, ring_start: int, ring: int, depth: int,
    calibration: Any, branches: int, tau: float, longest_row: int, members: Any, places: Any,
    out_tokens: Any, out_survival: Any, out_parents: Any, out_counts: Any, out_source: Any, out_match: Any, out_occurrences: Any,
    out_ints: Any, out_floats: Any,
) -> None:  # fmt: skip
    """Drafts for rows of one namespace.

    Args:
        addresses: int64 [n]; address of each row's int32 tokens.
        row_lengths: int64 [n]; tokens of each row.
        use_corpus: bool [n]; False drafts from the row's own tokens only.
        text, main, ..., ring: The index's arrays, current copies; see draftd.drafter.ops.draft.cpu.draft_rows.
        depth: Depth to which suffixes are sorted, in tokens.
        calibration: float32 [CALIBRATION_WORDS].
        branches: Most tokens that may follow one: 1 makes chains.
        tau: Least survival of a drafted token.
        longest_row: max(row_lengths).
        members, places: What the rows' groups have generated; see draftd.drafter.groups.GroupTexts. Without rows that have one both are
            empty.
        out_tokens: int32 [n, k], filled with -1; out_survival: float32 [n, k], zeros; out_parents: int32 [n, k], filled with -1;
            out_counts, out_source, out_match, out_occurrences: int32 [n], zeros.
        out_ints: int32 [n, k + 1, EVIDENCE_INTS]; out_floats: float32 [n, k + 1, EVIDENCE_FLOATS]; out: the state before any token and
            after each drafted one. States that nobody looked at have -1 votes.
    """
    index = Segments(
        text, main, main_length, buckets, shift, recent, recent_length, live_text, live, live_length, ring_start, ring, depth
    )  # fmt: skip
    k = out_tokens.shape[1]
    own = make_tally(longest_row + k + 1)
    corpus = make_tally(2 * LEAD_SAMPLES)
    group = corpus
    if len(places) > 0:
        most = np.int64(0)
        for r in range(len(places)):
            most = max(most, group_tokens(members, places[r]))
        group = make_tally(most)
    statistics = np.zeros((SOURCES, LEVELS, COLUMNS), np.int64)
    tops = np.zeros(SOURCES, np.int64)
    scratch = np.empty((MAX_VOTES, SCRATCH_COLUMNS), np.float64)
    sources = np.zeros(CANDIDATES, np.int64)
    kept = np.zeros(k + 1, np.int64)
    lows = np.zeros((k + 1, REACH + 1, 3), np.int64)
    highs = np.zeros((k + 1, REACH + 1, 3), np.int64)
    tails = np.empty((k + 1, REACH + k), np.int32)
    drafted = np.zeros(k + 1, np.int64)
    waiting = np.empty((CANDIDATES * (k + 1), 4), np.float64)

    for r in range(len(addresses)):
        n = row_lengths[r]
        for state in range(k + 1):
            out_ints[r, state, VOTE_COUNT] = -1
        if n == 0:
            continue
        row = carray(int32_pointer(addresses[r]), (n,))
        width = min(n, REACH)
        tails[0, :width] = row[n - width : n]
        count = 0
        state = 0
        waits = 0
        while True:
            # Look at what may come after `state`.
            end = width + drafted[state]
            tail = tails[state]
            tops[0] = count_own(row, n, tail, end, drafted[state], own, statistics[0]) if use_local else -1
            lowest = LEVELS
            tops[1] = -1
            if use_corpus[r]:
                parent = out_parents[r, state - 1] + 1 if state > 0 else 0
                kept[state] = find_lanes(
                    index, tail, end, kept[parent] if state > 0 else -1, lows[parent], highs[parent], lows[state], highs[state]
                )  # fmt: skip
                tops[1], lowest = count_corpus(index, tail, end, kept[state], lows[state], highs[state], corpus, statistics[1])
            tops[2] = count_group(members, places[r], tail, end, group, statistics[2]) if r < len(places) else -1
            ints, floats = out_ints[r, state], out_floats[r, state]
            mix(calibration, statistics, tops, own, corpus, group, lowest, scratch, ints, floats, sources)
            survival = np.float64(out_survival[r, state - 1]) if state > 0 else 1.0
            offered = 0
            for place in range(min(branches, ints[CANDIDATE_COUNT])):
                best = -1
                for rank in range(ints[CANDIDATE_COUNT]):
                    if offered >> rank & 1 == 0 and (best < 0 or floats[PROBABILITIES + rank] > floats[PROBABILITIES + best]):
                        best = rank
                offered |= 1 << best
                waiting[waits, 0] = survival * refine(calibration, floats[PROBABILITIES + best], place, survival)
                waiting[waits, 1] = state
                waiting[waits, 2] = ints[CANDIDATE_TOKENS + best]
                waiting[waits, 3] = sources[best]
                waits += 1
            if state == 0 and ints[CANDIDATE_COUNT] > 0:
                source = np.int64(waiting[0, 3])
                out_source[r] = 1 + source
                out_match[r] = _LENGTHS[tops[source]]
                out_occurrences[r] = statistics[source, tops[source], SEEN]
            # Draft the likeliest of all that wait.
            best = -1
            for i in range(waits):
                if waiting[i, 0] >= tau and (best < 0 or waiting[i, 0] > waiting[best, 0]):
                    best = i
            if best < 0:
                break
            parent = np.int64(waiting[best, 1])
            token = np.int32(waiting[best, 2])
            out_tokens[r, count] = token
            out_survival[r, count] = waiting[best, 0]
            out_parents[r, count] = parent - 1
            waiting[best, 0] = -1.0
            count += 1
            if count == k:
                break
            state = count
            end = width + drafted[parent]
            tails[state, :end] = tails[parent, :end]
            tails[state, end] = token
            drafted[state] = drafted[parent] + 1
        out_counts[r] = count
        if count == 0:
            out_source[r] = 0
            out_match[r] = 0
            out_occurrences[r] = 0
