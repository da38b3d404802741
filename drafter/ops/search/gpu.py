"""The first of two launches of a GPU draft: the loci of all suffix lengths in every segment, and the matches in the row itself.

Every program of a launch does one piece of one row: a group of suffix lengths in one segment, or a part of the row. A search probes
PROBES places of its range at once, for both ends of the locus: few dependent loads instead of few loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import (
    DD_SEGMENT_WORDS,
    DD_SEGMENTS,
    DD_SHIFT,
    DEVICE_DESCRIPTOR_WORDS,
    DEVICE_DESCRIPTORS,
    DEVICE_DESCRIPTORS_START,
    DEVICE_HEADER_WORDS,
    DEVICE_VERSION,
    DS_BUCKETS,
    DS_LENGTH,
    DS_SUFFIXES,
    DS_TEXT,
    LOCUS_LENGTHS,
)
from draftd.drafter.device_layout import SEGMENTS as SEGMENT_COUNT
from draftd.drafter.ops.local.gpu import local_matches

_HEADER_WORDS = tl.constexpr(DEVICE_HEADER_WORDS)
_VERSION = tl.constexpr(DEVICE_VERSION)
_DESCRIPTORS_START = tl.constexpr(DEVICE_DESCRIPTORS_START)
_DESCRIPTORS = tl.constexpr(DEVICE_DESCRIPTORS)
_DESCRIPTOR_WORDS = tl.constexpr(DEVICE_DESCRIPTOR_WORDS)
_SHIFT = tl.constexpr(DD_SHIFT)
_SEGMENTS_START = tl.constexpr(DD_SEGMENTS)
_SEGMENT_WORDS = tl.constexpr(DD_SEGMENT_WORDS)
_SUFFIXES = tl.constexpr(DS_SUFFIXES)
_LENGTH = tl.constexpr(DS_LENGTH)
_BUCKETS = tl.constexpr(DS_BUCKETS)
_TEXT = tl.constexpr(DS_TEXT)
_LOCUS_LENGTHS = tl.constexpr(LOCUS_LENGTHS)
_SEGMENTS = tl.constexpr(SEGMENT_COUNT)


@triton.jit
def descriptor(headers: tensor, namespace: tensor, version: tensor) -> tensor:
    """Pointer to the words of a namespace's version."""
    slot = version % _DESCRIPTORS
    return headers + namespace.to(tl.int64) * _HEADER_WORDS + _DESCRIPTORS_START + slot * _DESCRIPTOR_WORDS


@triton.jit
def probe_position(low: tensor, size: tensor, i: tensor, PROBES: tl.constexpr) -> tensor:
    """The i-th of PROBES evenly spaced places in [low, low + size); all of them if there are no more than that."""
    return low + (size // (PROBES + 1)) * (i + 1) + ((size % (PROBES + 1)) * (i + 1)) // (PROBES + 1)


@triton.jit
def rounds_of(size: tensor, PROBES: tl.constexpr) -> tensor:
    """Rounds that a search of at most `size` places takes. (A while loop over tensors would do without; Triton cannot compile it.)"""
    rounds = size * 0
    while size > 0:
        size = size // (PROBES + 1)
        rounds += 1
    return rounds


@triton.jit
def search_group(
    arena: tensor, words: tensor, shift: tensor, segment: tensor, row: tensor, n: tensor, longest: tensor, group: tensor, loci: tensor,
    LENGTHS: tl.constexpr, PROBES: tl.constexpr,
) -> tensor:  # fmt: skip
    """Writes the loci of the suffix lengths group * LENGTHS + 1 ... (group + 1) * LENGTHS in one segment.

    Args:
        arena: int32 pointer; words: int64 pointer to the segment's record in a descriptor.
        loci: int32 pointer [LOCUS_LENGTHS, 2]; out: first suffix and end of each length; equal if there is none.

    Returns:
        Size of the longest one's locus.
    """
    suffixes = arena + tl.load(words + _SUFFIXES)
    text = arena + tl.load(words + _TEXT)
    buckets = arena + tl.load(words + _BUCKETS)
    i = tl.arange(0, 2 * LENGTHS)
    length = group * LENGTHS + 1 + i // 2
    upper = (i % 2) == 1
    active = length <= longest
    start = n - length
    bucket = tl.load(row + start, mask=active, other=0) >> shift
    low = tl.load(buckets + bucket, mask=active, other=0)
    high = tl.load(buckets + bucket + 1, mask=active, other=0)
    # How many tokens the suffixes just outside the range share with the pattern: all inside share the smaller number.
    known = tl.where(shift == 0, 1, 0)
    low_shared = tl.zeros_like(low) + known
    high_shared = tl.zeros_like(low) + known
    probe = tl.arange(0, PROBES)
    for _ in range(rounds_of(tl.max(high - low, axis=0), PROBES)):
        size = high - low
        at = probe_position(low[:, None], size[:, None], probe[None, :], PROBES)
        inside = (size[:, None] > 0) & (probe[None, :] >= 0)
        position = tl.load(suffixes + at, mask=inside, other=0)
        # From here on, where the suffix and the pattern go on after what they share.
        same = tl.zeros_like(at) + tl.minimum(low_shared, high_shared)[:, None]
        # -1, 0, 1: the suffix is below, begins with, is above the pattern; 2: not known yet.
        order = tl.where(inside & (same < length[:, None]), 2, 0)
        undecided = tl.max(tl.max(order, axis=1), axis=0)
        while undecided == 2:
            open_ = order == 2
            x = tl.load(text + position + same, mask=open_, other=0)
            y = tl.load(row + start[:, None] + same, mask=open_, other=0)
            differs = tl.where(x < y, -1, 1)
            same += (open_ & (x == y)).to(tl.int32)
            order = tl.where(open_, tl.where(x != y, differs, tl.where(same < length[:, None], 2, 0)), order)
            undecided = tl.max(tl.max(order, axis=1), axis=0)
        below = inside & ((order < 0) | ((order == 0) & upper[:, None]))
        above = inside & ~below
        low_shared = tl.maximum(low_shared, tl.max(tl.where(below, same, 0), axis=1))
        high_shared = tl.maximum(high_shared, tl.max(tl.where(above, same, 0), axis=1))
        low = tl.maximum(low, tl.max(tl.where(below, at + 1, 0), axis=1))
        high = tl.minimum(high, tl.min(tl.where(above, at, 0x7FFFFFFF), axis=1))
    tl.store(loci + length * 2 + i % 2, tl.where(active, low, 0), mask=length < _LOCUS_LENGTHS)
    is_last = (i == 2 * LENGTHS - 1).to(tl.int32) - (i == 2 * LENGTHS - 2).to(tl.int32)
    return tl.sum(tl.where(active, low, 0) * is_last, axis=0)


@triton.jit
def match_rows(
    arena: tensor, headers: tensor, tokens: tensor, row_stride: tensor, lengths: tensor, rows: tensor, namespaces: tensor,
    snapshot: tensor, loci: tensor, hits: tensor, hit_stride: tensor, hit_counts: tensor, histograms: tensor, max_depth: tensor,
    USE_LOCAL: tl.constexpr, USE_CORPUS: tl.constexpr, GROUPS: tl.constexpr, GROUP_PROGRAMS: tl.constexpr,
    LENGTHS: tl.constexpr, PROBES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    """One launch: program (row of the batch, task). The first tasks search, the last PARTS match locally.

    Args:
        arena, headers: see draftd.drafter.device_layout; headers int64 [namespaces, DEVICE_HEADER_WORDS].
        tokens: int32 [rows, row_stride]; lengths: int32 or int64 [rows]; rows: int32 or int64 [batch].
        namespaces: int32 [rows]; -1 drafts from the row's own tokens only.
        snapshot: int64 [batch], zeros; out: the version that all programs of a row read.
        loci: int32 [batch, 3, LOCUS_LENGTHS, 2]; out.
        hits: int32 [batch, hit_stride]; hit_counts: int32 [batch], zeros; histograms: int32 [batch, 64], zeros; out.
        GROUPS: groups of LENGTHS suffix lengths; GROUP_PROGRAMS of them run at once, the others follow if the longest length matched.
    """
    b = tl.program_id(0)
    task = tl.program_id(1)
    r = tl.load(rows + b).to(tl.int64)
    n = tl.load(lengths + r).to(tl.int32)
    row = tokens + r * row_stride
    longest = tl.minimum(max_depth, n) - 1
    searches: tl.constexpr = _SEGMENTS * GROUP_PROGRAMS if USE_CORPUS else 0
    if task < searches:
        namespace = tl.load(namespaces + r)
        if (namespace >= 0) & (longest > 0):
            version = tl.load(headers + namespace.to(tl.int64) * _HEADER_WORDS + _VERSION)
            seen = tl.atomic_cas(snapshot + b, tl.zeros_like(version), version)
            version = tl.where(seen == 0, version, seen)
            words = descriptor(headers, namespace, version)
            segment = task % _SEGMENTS
            record = words + _SEGMENTS_START + segment * _SEGMENT_WORDS
            count = tl.load(record + _LENGTH)
            shift = tl.load(words + _SHIFT).to(tl.int32)
            out = loci + (b.to(tl.int64) * _SEGMENTS + segment) * (_LOCUS_LENGTHS * 2)
            found = (count > 0) & (version > 0)
            for group in range(task // _SEGMENTS, GROUPS, GROUP_PROGRAMS):
                searched = tl.where(found, longest, 0)
                size = search_group(arena, record, shift, segment, row, n, searched, group, out, LENGTHS, PROBES)
                found = size > 0
    elif USE_LOCAL:  # noqa: SIM102 (decided when compiled)
        if longest > 0:
            local_matches(
                row, n, longest, task - searches, hits + b.to(tl.int64) * hit_stride, hit_counts + b, histograms + b * 64,
                PARTS, BLOCK, BACK,
            )  # fmt: skip
