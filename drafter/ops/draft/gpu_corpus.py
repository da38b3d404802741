"""The most frequent continuation of a large locus on the GPU, exactly, from few reads.

Continuations are sorted, so a next token with a share of a locus shows up in evenly spaced samples; the samples also bound every
candidate's count, and only those that may win are counted, by a search for both ends in all segments at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.search.gpu import probe_position, rounds_of
from draftd.drafter.ops.warp import LANES, bit_count, highest_bit, lanes_where, lanes_with_same, value_of

_PROBES = tl.constexpr(16)
_SEGMENT_AGE_BITS = tl.constexpr(29)
_NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def recency(segment: tensor, position: tensor, ring_start: tensor, ring: tensor) -> tensor:
    """How recent an occurrence is; comparable over the segments of one index."""
    age = position - ring_start
    age = tl.where(age < 0, age + ring, age)
    return (segment << _SEGMENT_AGE_BITS) + tl.where(segment == 2, position, age)


@triton.jit
def _latest(arena: tensor, suffixes: tensor, first: tensor, end: tensor, ring_start: tensor, ring: tensor) -> tensor:
    """The most recent of at most 32 occurrences in the intervals [first, end) of the segments."""
    segment = tl.arange(0, 4)
    at = first[:, None] + tl.arange(0, 32)[None, :]
    valid = at < end[:, None]
    position = tl.load(arena + suffixes[:, None] + at, mask=valid, other=0)
    age = recency(segment[:, None] + tl.zeros_like(at), position, ring_start, ring)
    return tl.max(tl.max(tl.where(valid, age, -1), axis=1), axis=0)


@triton.jit
def _run(arena: tensor, suffixes: tensor, texts: tensor, offset: tensor, token: tensor, low: tensor, high: tensor) -> tensor:
    """Where the suffixes that continue with `token` after `offset` tokens begin and end.

    Args:
        low, high: int32 [4, 2]; where to look for the begin (column 0) and the end (column 1) in each segment.

    Returns:
        int32 [4, 2].
    """
    is_end = tl.arange(0, 2)[None, :, None] == 1
    probe = tl.arange(0, _PROBES)[None, None, :]
    for _ in range(rounds_of(tl.max(tl.max(high - low, axis=1), axis=0), _PROBES)):
        size = (high - low)[:, :, None]
        at = probe_position(low[:, :, None], size, probe, _PROBES)
        inside = (size > 0) & (probe >= 0)
        position = tl.load(arena + suffixes[:, None, None] + at, mask=inside, other=0)
        x = tl.load(arena + texts[:, None, None] + position + offset, mask=inside, other=-1)
        below = inside & ((x < token) | ((x == token) & is_end))
        low = tl.maximum(low, tl.max(tl.where(below, at + 1, 0), axis=2))
        high = tl.minimum(high, tl.min(tl.where(inside & ~below, at, _NEVER), axis=2))
    return low


@triton.jit
def _of(segment: tensor, values: tensor) -> tensor:
    """The value of one of the four segments."""
    return tl.sum(tl.where(tl.arange(0, 4) == segment, values, 0), axis=0)


@triton.jit
def _sampled(
    arena: tensor, suffixes: tensor, texts: tensor, low: tensor, sizes: tensor, stride: tensor, offset: tensor, segment: tensor
) -> tensor:
    """The next tokens of 32 evenly spaced occurrences in a segment; below zero, and all different, where there is none."""
    lane = tl.arange(0, LANES)
    step = _of(segment, stride)
    size = _of(segment, sizes)
    # The last lanes' places may overflow in a large segment.
    valid = (lane * step < size) & (lane * step >= 0)
    position = tl.load(arena + _of(segment, suffixes) + _of(segment, low) + lane * step, mask=valid, other=0)
    x = tl.load(arena + _of(segment, texts) + offset + position, mask=valid, other=-1)
    return tl.where(x >= 0, x, -1 - lane)


@triton.jit
def best_child(
    arena: tensor, suffixes: tensor, texts: tensor, low: tensor, high: tensor, offset: tensor, prob: tensor, min_prob: tensor,
    ring_start: tensor, ring: tensor,
) -> tensor:  # fmt: skip
    """The most frequent continuation of a locus, if it may keep the survival probability `prob` at `min_prob` or above.

    Of equal counts up to 32 the most recent occurrence wins, of larger ones the smaller token.

    Args:
        arena: int32 pointer; suffixes, texts: int64 [4]; offsets of each segment's suffixes and text; the fourth is empty.
        low, high: int32 [4]; the locus.
        offset: Tokens of the locus.

    Returns:
        The token and its count (-1, 0 if there is none), its locus as int32 [4] twice, and 1 if recency has decided, else 0.
    """
    lane = tl.arange(0, LANES)
    segment = tl.arange(0, 4)
    sizes = high - low
    total = tl.sum(sizes, axis=0)
    total_f = total.to(tl.float32)
    best = tl.full([], -1, tl.int32)
    best_count = total * 0
    best_latest = tl.full([], -1, tl.int32)
    best_low = low
    best_high = low
    tied = total * 0
    # In the first phase a lane samples each segment once. Where that is too sparse for the share that is needed, a second one follows.
    sparse = tl.maximum(1, (sizes + LANES - 1) // LANES)
    unseen = tl.minimum(sparse - 1, sizes)
    stride = sparse
    chunks = tl.minimum(sizes, 1)
    # The first phase's samples, all segments' at once.
    x0 = _sampled(arena, suffixes, texts, low, sizes, sparse, offset, 0)
    x1 = _sampled(arena, suffixes, texts, low, sizes, sparse, offset, 1)
    x2 = _sampled(arena, suffixes, texts, low, sizes, sparse, offset, 2)
    for phase in range(2):
        for s in range(3):
            begin = _of(s, low)
            size = _of(s, sizes)
            step = _of(s, stride)
            # Occurrences elsewhere of a token that was not sampled there.
            elsewhere = tl.sum(tl.where(segment == s, 0, tl.where((segment > s) & (phase == 0), sizes, unseen)), axis=0)
            chunk_count = _of(s, chunks)
            for chunk in range(chunk_count):
                base = begin + chunk * LANES * step
                at = base + lane * step
                # A large stride times a lane may overflow past the end.
                valid = (at < begin + size) & (at >= base)
                x = tl.where(s == 0, x0, tl.where(s == 1, x1, x2))
                if phase == 1:
                    position = tl.load(arena + _of(s, suffixes) + at, mask=valid, other=0)
                    x = tl.load(arena + _of(s, texts) + offset + position, mask=valid, other=-1)
                    x = tl.where(x >= 0, x, -1 - lane)
                group = lanes_with_same(x)
                same = bit_count(group)
                first_lane = (group & 1) != 0
                last_lane = (group & lanes_where(lane == LANES - 1)) != 0
                cut = (first_lane & (chunk > 0)) | (last_lane & (chunk < chunk_count - 1))
                most = elsewhere + tl.where(cut, size, tl.minimum((same + 1) * step - 1, size))
                candidate = (x >= 0) & (x != best) & (highest_bit(group) == lane)
                candidate = candidate & (prob * tl.div_rn(most.to(tl.float32), total_f) >= min_prob)
                todo = lanes_where(candidate & (most >= best_count))
                while todo != 0:
                    # The one with most samples first.
                    chosen = tl.max(tl.where(((todo >> lane) & 1) != 0, same * LANES + lane, -1), axis=0) % LANES
                    token = value_of(x, chosen)
                    below = bit_count(lanes_where(valid & (x < token)))
                    up_to = bit_count(lanes_where(valid & (x <= token)))
                    count_valid = bit_count(lanes_where(valid))
                    here = segment == s
                    begin_low = tl.where(here, tl.where(below > 0, base + (below - 1) * step + 1, begin), low)
                    begin_high = tl.where(here, base + below * step, high)
                    end_low = tl.where(here, base + (up_to - 1) * step + 1, low)
                    end_high = tl.where(here, tl.where(up_to < count_valid, base + up_to * step, begin + size), high)
                    is_end = tl.arange(0, 2)[None, :] == 1
                    ends = _run(
                        arena, suffixes, texts, offset, token,
                        tl.where(is_end, end_low[:, None], begin_low[:, None]),
                        tl.where(is_end, end_high[:, None], begin_high[:, None]),
                    )  # fmt: skip
                    first = tl.sum(tl.where(is_end, 0, ends), axis=1)
                    end = tl.sum(tl.where(is_end, ends, 0), axis=1)
                    count = tl.sum(end - first, axis=0)
                    latest = best_latest
                    if count <= LANES:
                        latest = _latest(arena, suffixes, first, end, ring_start, ring)
                    if count > best_count:
                        tied = tied * 0
                    if (count == best_count) & (count <= LANES):
                        tied = tied * 0 + 1
                    wins_tie = tl.where(count <= LANES, latest > best_latest, token < best)
                    if (count > best_count) | ((count == best_count) & wins_tie):
                        best = token
                        best_count = count
                        best_latest = latest
                        best_low = first
                        best_high = end
                    todo = todo & ~(1 << chosen)
                    todo = todo & lanes_where(most >= best_count)
        if phase == 0:
            # A winner has this share of all occurrences or more, thus in some segment too.
            needed = tl.maximum(tl.div_rn(min_prob, prob), tl.div_rn(best_count.to(tl.float32), total_f))
            wider = tl.maximum(1, (needed * sizes.to(tl.float32) * 0.999).to(tl.int32))
            stride = tl.minimum(sparse, wider)
            chunks = tl.where(sparse > wider, (sizes + LANES * stride - 1) // (LANES * stride), 0)
    return best, best_count, best_low, best_high, tied
