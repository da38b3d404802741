"""One launch after a draft: each row's new tokens and its draft, into a ring that the host reads without a message or an event.

What is written is what the stream's order makes of it, so an engine may give a row to another request right after. A captured graph may
hold the launch: which place of the ring it writes is counted on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.collect.ring import NEW_TOKENS, RECORD_HEAD, RING, SAMPLES

_NEW = tl.constexpr(NEW_TOKENS)
_HEAD = tl.constexpr(RECORD_HEAD)
_RING = tl.constexpr(RING)
_SAMPLES = tl.constexpr(SAMPLES)
_BLOCK = tl.constexpr(128)


@triton.jit
def _copy(from_: tensor, to: tensor, words: tensor) -> None:
    i = tl.arange(0, _BLOCK)
    for at in range(0, words, _BLOCK):
        some = at + i < words
        tl.store(to + at + i, tl.load(from_ + at + i, mask=some), mask=some)


@triton.jit(do_not_specialize=["row_stride", "row_count", "row_room", "most", "k", "ints", "floats"])
def collect_rows(
    tokens: tensor, row_stride: tensor, row_count: tensor, row_room: tensor, lengths: tensor, rows: tensor, carried: tensor,
    draft_tokens: tensor, draft_counts: tensor, draft_source: tensor, draft_match: tensor, draft_occurrences: tensor, k: tensor,
    counters: tensor, records: tensor, done: tensor, most: tensor,
    draft_probabilities: tensor, lesson_ints: tensor, ints: tensor, lesson_floats: tensor, floats: tensor, samples: tensor,
    K: tl.constexpr, TEACHING: tl.constexpr,
) -> None:  # fmt: skip
    """Programs (row of the batch).

    Args:
        tokens: int32 [row_count, row_stride]; row_room: most tokens of a row; lengths: int32 or int64 [row_count]; rows: int32 or int64
            [batch], as in match_rows.
        carried: int32 [row_count, 2]; tokens of each row that the host has, and the generation of its request; the first is updated.
        draft_tokens: int32 [batch, k]; draft_counts ... draft_occurrences: int32 [batch].
        counters: int64 [2]; launches so far, and programs of this one that are done.
        records: int32 [RING, most, RECORD_HEAD + NEW_TOKENS + K], on the host; out. done: int64 [RING, 2], on the host; out, last: the
            launch's number, from 1, and its batch size.
        TEACHING: Carry samples too; the arguments that follow count only then. Floats are seen as int32.
        draft_probabilities: [batch, k]; lesson_ints: [batch, ints]; lesson_floats: [batch, floats]; what drafts were decided from.
        samples: int32 [RING, SAMPLES, k + ints + floats], on the host; out.
    """
    b = tl.program_id(0)
    launch = tl.load(counters)
    place = launch % _RING
    r = tl.load(rows + b).to(tl.int64)
    there = (r >= 0) & (r < row_count)
    at = tl.where(there, r, 0)
    n = tl.where(there, tl.minimum(tl.maximum(tl.load(lengths + at), 0), row_room), 0).to(tl.int32)
    before = tl.load(carried + at * 2)
    new = tl.where(there, tl.minimum(tl.maximum(n - before, 0), _NEW), 0)
    record = records + (place * most + b) * (_HEAD + _NEW + K)
    tl.store(record, tl.where(there, r, -1).to(tl.int32))
    tl.store(record + 1, tl.load(carried + at * 2 + 1))
    tl.store(record + 2, before)
    tl.store(record + 3, new)
    tl.store(record + 4, tl.load(draft_counts + b))
    tl.store(record + 5, tl.load(draft_source + b))
    tl.store(record + 6, tl.load(draft_match + b))
    tl.store(record + 7, tl.load(draft_occurrences + b))
    i = tl.arange(0, _NEW)
    fresh = tl.load(tokens + at * row_stride + before + i, mask=i < new, other=0)
    tl.store(record + _HEAD + i, fresh, mask=i < new)
    kth = tl.arange(0, K)
    tl.store(record + _HEAD + _NEW + kth, tl.load(draft_tokens + b * k + kth, mask=kth < k, other=-1))
    if TEACHING:
        batch = tl.num_programs(0)
        nth = (b + batch - (launch * _SAMPLES % batch).to(tl.int32)) % batch
        if nth < _SAMPLES:
            sample = samples + (place * _SAMPLES + nth) * (k + ints + floats)
            _copy(draft_probabilities + b * k, sample, k)
            _copy(lesson_ints + b.to(tl.int64) * ints, sample + k, ints)
            _copy(lesson_floats + b.to(tl.int64) * floats, sample + k + ints, floats)
    tl.store(carried + at * 2, before + new, mask=there)
    tl.debug_barrier()
    if tl.atomic_add(counters + 1, tl.full([], 1, tl.int64), sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(done + place * 2 + 1, tl.num_programs(0).to(tl.int64))
        tl.store(counters + 1, tl.full([], 0, tl.int64))
        tl.store(counters, launch + 1)
        tl.debug_barrier()
        tl.atomic_xchg(done + place * 2, launch + 1, sem="acq_rel", scope="sys")
