"""Sorting suffixes on a GPU, last steps: sorted runs are merged, each suffix finding its rank in the other runs by search.

Only suffixes whose key is on both sides of a run's end can move; all others are where they belong after the sort by keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.sort.gpu_compare import compare_suffixes


@triton.jit(do_not_specialize=["size", "log_width", "depth"])
def merge_runs(
    text: tensor, keys: tensor, suffixes: tensor, out: tensor, size: tensor, log_width: tensor, depth: tensor, WHOLE: tl.constexpr,
    BITS: tl.constexpr, LOG_RUNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Merges sorted runs of 2 ** log_width suffixes, 2 ** LOG_RUNS neighbouring ones into one.

    Args:
        keys: int64 pointer; sorted. suffixes: int32 pointer; positions in the order of their keys, sorted within runs.
        out: int32 pointer; must not overlap `suffixes`.
    """
    # A program's suffixes are in one run if runs are not shorter than BLOCK; then its first and last key tell whether any can move.
    at = tl.program_id(0) * BLOCK
    until = tl.minimum(at + BLOCK, size)
    start = (at >> log_width) << log_width
    end = tl.minimum(start + (1 << log_width), size)
    run = (at >> log_width) & ((1 << LOG_RUNS) - 1)
    is_long = (1 << log_width) >= BLOCK
    left = tl.load(keys + start - 1, mask=is_long & (run > 0), other=-1)
    right = tl.load(keys + end, mask=is_long & (run + 1 < (1 << LOG_RUNS)) & (end < size), other=-1)
    crosses = (is_long == 0) | (left == tl.load(keys + at)) | (right == tl.load(keys + until - 1))
    if crosses:
        _merge_block(text, keys, suffixes, out, size, log_width, depth, WHOLE, BITS, LOG_RUNS, BLOCK, CHUNK)
    else:
        i = at + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(suffixes + i, mask=i < size), mask=i < size)


@triton.jit
def _merge_block(
    text: tensor, keys: tensor, suffixes: tensor, out: tensor, size: tensor, log_width: tensor, depth: tensor, WHOLE: tl.constexpr,
    BITS: tl.constexpr, LOG_RUNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Places one block of suffixes; a lane is one of them and one other run of its neighbourhood."""
    partners: tl.constexpr = 1 if LOG_RUNS == 1 else 1 << LOG_RUNS
    lane = tl.arange(0, BLOCK * partners)
    i = tl.program_id(0) * BLOCK + lane // partners
    mine = i < size
    run = (i >> log_width) & ((1 << LOG_RUNS) - 1)
    other = run ^ (1 if partners == 1 else lane % partners)
    start = ((i >> (log_width + LOG_RUNS)) << (log_width + LOG_RUNS)) + (other << log_width)
    end = tl.minimum(start + (1 << log_width), size)
    later = other > run
    position = tl.load(suffixes + i, mask=mine, other=0)
    key = tl.load(keys + i, mask=mine, other=0)
    nearest = tl.where(later, start, end - 1)
    searched = mine & (other != run) & (start < end)
    searched = searched & (tl.load(keys + nearest, mask=searched, other=-1) == key)
    rest: tl.constexpr = 63 - WHOLE * BITS
    ended = ((key >> rest) & ((1 << BITS) - 1)) == 0
    low = start
    high = tl.where(searched, end, start)
    known = tl.where(ended, depth, tl.zeros_like(i) + WHOLE)
    low_shared = known
    high_shared = known
    # The nearest one goes first: runs that are in order already need no more.
    middle = nearest
    for _ in range(tl.where(tl.max(searched.to(tl.int32), axis=0) > 0, log_width + 2, 0)):
        open_ = low < high
        suffix = tl.load(suffixes + middle, mask=open_, other=0)
        suffix_key = tl.load(keys + middle, mask=open_, other=0)
        alike = open_ & (suffix_key == key)
        order, shared = compare_suffixes(text, position, suffix, tl.minimum(low_shared, high_shared), alike, depth, CHUNK)
        is_above = tl.where(alike, (order < 0) | ((order == 0) & (suffix > position)), suffix_key > key)
        high_shared = tl.where(alike & is_above, shared, high_shared)
        low_shared = tl.where(alike & ~is_above, shared, low_shared)
        high = tl.where(open_ & is_above, middle, high)
        low = tl.where(open_ & ~is_above, middle + 1, low)
        middle = (low + high) >> 1
    # Those of later runs that are below go before it, those of earlier runs that are above go after it.
    moved = tl.where(searched, tl.where(later, low - start, low - end), 0)
    if partners == 1:
        tl.store(out + i + moved, position, mask=mine)
    else:
        by = tl.sum(tl.reshape(moved, [BLOCK, partners]), axis=1)
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i + by, tl.load(suffixes + i, mask=i < size), mask=i < size)
