"""The most frequent continuation of a locus that is too large for registers, on the GPU, exactly, from evenly spaced samples.

Continuations are sorted in each segment, so a token's occurrences there are a run: samples bound its length, and a search between them
finds its ends. Places of a locus count through its three segments.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.draft.gpu_words import floor_of, of_segment, recency, text_at
from draftd.drafter.ops.warp import LANES, TOKEN_BITS, TOKENS, bit_count, lanes_with_same

_LOOKS = tl.constexpr(128)
_PARTS = tl.constexpr(8)
"""A search looks at _LOOKS places at once; six of its parts each look for one end of the run in one segment."""


@triton.jit
def _gap(below: tensor, same: tensor, samples: tensor, start: tensor, stride: tensor, begin: tensor, end: tensor) -> tensor:
    """Where a token's run in one segment may begin, and where it may end: four places.

    Args:
        below, same: How many of the segment's samples have smaller tokens, and how many this one.
        samples: The segment's samples; start: place of the first; stride: places between them.
        begin, end: The locus's places in the segment.
    """
    up_to = below + same
    low = tl.where(below > 0, start + (below - 1) * stride + 1, begin)
    high = tl.where(below < samples, start + below * stride, end)
    end_low = tl.where(up_to > 0, start + (up_to - 1) * stride + 1, begin)
    end_high = tl.where(up_to < samples, start + up_to * stride, end)
    return low, high, end_low, end_high


@triton.jit
def _rounds_of(size: tensor, PROBES: tl.constexpr) -> tensor:
    """Rounds that a search of at most `size` places takes."""
    rounds = size * 0
    while size > 0:
        size = size // (PROBES + 1)
        rounds += 1
    return rounds


@triton.jit
def _search(arena: tensor, token: tensor, offset: tensor, low: tensor, high: tensor, suffixes: tensor, texts: tensor) -> tensor:
    """Finds six places at once: part e looks in low[e] to high[e] for the first token above (odd e), or the first that is not below.

    Args:
        low, high: int32 [_LOOKS]; alike within a part. suffixes, texts: int64 [_LOOKS]; offsets for a part's segment.
        offset: Tokens from a suffix's first to the one that is compared.
    """
    probes: tl.constexpr = _LOOKS // _PARTS
    look = tl.arange(0, _LOOKS)
    part = look // probes
    nth = look % probes + 1
    above = part % 2 == 1
    for _ in range(_rounds_of(tl.max(high - low, axis=0), probes)):
        # Rounded up, so that all places are probed if there are no more than that.
        spacing = (high - low) // (probes + 1) + 1
        at = low + nth * spacing - 1
        inside = at < high
        position = tl.load(arena + suffixes + at, mask=inside, other=0)
        x = tl.load(arena + texts + position + offset, mask=inside, other=0)
        before = (inside & ((x < token) | ((x == token) & above))).to(tl.int32)
        count = before
        for e in tl.static_range(6):
            count = tl.where(part == e, tl.sum(tl.where(part == e, before, 0), axis=0), count)
        next_low = tl.where(count > 0, low + count * spacing, low)
        high = tl.minimum(high, low + (count + 1) * spacing - 1)
        low = next_low
    return low


@triton.jit
def _at_part(values: tensor, e: tl.constexpr) -> tensor:
    return tl.max(tl.where(tl.arange(0, _LOOKS) // (_LOOKS // _PARTS) == e, values, 0), axis=0)


@triton.jit
def _latest_of(
    arena: tensor, words: tensor, first0: tensor, first1: tensor, first2: tensor, size0: tensor, size1: tensor, size2: tensor
) -> tensor:
    """How recent the most recent of at most 32 occurrences is: where their suffixes begin in the arena, and how many each segment has."""
    lane = tl.arange(0, LANES)
    end1 = size0 + size1
    some = lane < end1 + size2
    first = of_segment(lane, size0, end1, first0, first1 - size0, first2 - end1)
    position = tl.load(arena + first + lane, mask=some, other=0)
    return tl.max(tl.where(some, recency(words, of_segment(lane, size0, end1, 0, 1, 2), position), -1), axis=0)


@triton.jit(noinline=True)
def follow_locus(
    arena: tensor, words: tensor, first0: tensor, first1: tensor, first2: tensor, size0: tensor, size1: tensor, size2: tensor,
    matched: tensor, most_steps: tensor, min_prob: tensor, best_key: tensor, tokens: tensor, probs: tensor, SLOTS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Follows the most frequent continuation of a locus while it has more than SLOTS occurrences.

    Of equal counts up to 32 the most recent occurrence wins, of larger ones the smaller token.

    Args:
        arena: int32 pointer; words: int64 pointer to the row's record.
        first0 ... size2: Where in the arena the locus begins in each segment, and its size there.
        matched: Tokens of the locus; most_steps: tokens to draft at most.
        best_key: int64 pointer; the row's best so far: a chain that cannot beat it ends.
        tokens: int32 pointer, probs: float32 pointer [most_steps]; out.

    Returns:
        Steps, the occurrences that are left (0: the chain has ended), the survival probability, 1 if recency has decided, else 0, and
        the locus that is left as it was given.
    """
    slot = tl.arange(0, SLOTS)
    part = tl.arange(0, _LOOKS) // (_LOOKS // _PARTS)
    odd = part % 2 == 1
    zero = matched * 0
    prob = tl.full([], 1.0, tl.float32)
    score = prob * 0.0
    by_recency = zero
    step = zero
    count = size0 + size1 + size2
    best_yet = tl.load(best_key, volatile=True)
    # The samples' frame: places of the segments' ends, of the first sample, and between samples. In each segment the locus is from `low`
    # to `high`; `sample` is its first sample there, the one of `samples`.
    end0 = zero
    end1 = zero
    end2 = zero
    first = zero
    stride = zero
    low0 = zero
    low1 = zero
    low2 = zero
    high0 = size0
    high1 = size1
    high2 = size2
    sample0 = zero
    sample1 = zero
    sample2 = zero
    samples0 = zero
    samples1 = zero
    samples2 = zero
    place = slot
    at = slot.to(tl.int64)
    following = slot
    alive = slot < 0
    while (count > SLOTS) & (step < most_steps):
        floor = floor_of(best_yet, score, most_steps - step, min_prob)
        best_yet = tl.load(best_key, volatile=True)
        # Counts from here on may keep the chain alive.
        needed = tl.maximum(1, (floor * count.to(tl.float32) / prob * 0.999).to(tl.int32))
        best = zero - 1
        most = zero
        latest = zero - 1
        tie = zero
        slack = zero
        a0 = zero
        b0 = zero
        a1 = zero
        b1 = zero
        a2 = zero
        b2 = zero
        f0 = zero
        f1 = zero
        f2 = zero
        n0 = zero
        n1 = zero
        n2 = zero
        finer = zero
        ahead = following
        passes = zero + 1
        while passes > 0:
            if (finer == 1) | (2 * count <= stride * SLOTS) | (stride == 0):
                # Samples of what the locus is now: evenly over all of it, or SLOTS at a time.
                if first == 0:
                    first0 += low0
                    first1 += low1 - end0
                    first2 += low2 - end1
                    end0 = high0 - low0
                    end1 = end0 + high1 - low1
                    end2 = end1 + high2 - low2
                    # Places of the best run so far move too.
                    a0 -= low0
                    b0 -= low0
                    a1 += end0 - low1
                    b1 += end0 - low1
                    a2 += end1 - low2
                    b2 += end1 - low2
                    low0 = zero
                    high0 = end0
                    low1 = end0
                    high1 = end1
                    low2 = end1
                    high2 = end2
                if finer == 0:
                    stride = (count + SLOTS - 1) // SLOTS
                place = first + slot * stride
                alive = place < end2
                position = tl.load(arena + of_segment(place, end0, end1, first0, first1 - end0, first2 - end1) + place, mask=alive, other=0)
                at = of_segment(place, end0, end1, text_at(words, 0), text_at(words, 1), text_at(words, 2)) + position + matched
                following = tl.load(arena + at + step, mask=alive, other=-1)
                samples0 = tl.sum((alive & (place < end0)).to(tl.int32), axis=0)
                samples1 = tl.sum((alive & (place < end1)).to(tl.int32), axis=0) - samples0
                samples2 = tl.sum(alive.to(tl.int32), axis=0) - samples0 - samples1
                sample0 = zero
                sample1 = samples0
                sample2 = samples0 + samples1
            if finer == 0:
                slack = tl.minimum(stride - 1, high0 - low0) + tl.minimum(stride - 1, high1 - low1) + tl.minimum(stride - 1, high2 - low2)
            ahead = tl.load(arena + at + step + 1, mask=alive, other=-1)
            x = tl.where(alive & (following < TOKENS), following, -1)
            # Most frequent first: how often a token is in its register, then the token itself.
            keys = tl.where(x >= 0, (bit_count(lanes_with_same(x)) << TOKEN_BITS) | x, -1)
            rest = samples0 + samples1 + samples2
            top = tl.max(keys, axis=0)
            while top >= 0:
                token = top & (TOKENS - 1)
                same = x == token
                seen = tl.sum(same.to(tl.int32), axis=0)
                keys = tl.where(same, -1, keys)
                rest -= seen
                top = tl.max(keys, axis=0)
                # What this token may have at most.
                upper = tl.minimum(count, tl.where(finer == 1, slack, seen * stride + slack))
                if (upper >= tl.maximum(most, needed)) & (token != best):
                    below = alive & (following < token)
                    below0 = tl.sum((below & (place < end0)).to(tl.int32), axis=0)
                    below1 = tl.sum((below & (place < end1)).to(tl.int32), axis=0) - below0
                    below2 = tl.sum(below.to(tl.int32), axis=0) - below0 - below1
                    same0 = tl.sum((same & (place < end0)).to(tl.int32), axis=0)
                    same1 = tl.sum((same & (place < end1)).to(tl.int32), axis=0) - same0
                    same2 = seen - same0 - same1
                    p0, q0, r0, s0 = _gap(below0, same0, samples0, first + sample0 * stride, stride, low0, high0)
                    p1, q1, r1, s1 = _gap(below1, same1, samples1, first + sample1 * stride, stride, low1, high1)
                    p2, q2, r2, s2 = _gap(below2, same2, samples2, first + sample2 * stride, stride, low2, high2)
                    begin = of_segment(part, 2, 4, tl.where(odd, r0, p0), tl.where(odd, r1, p1), tl.where(odd, r2, p2))
                    end = of_segment(part, 2, 4, tl.where(odd, s0, q0), tl.where(odd, s1, q1), tl.where(odd, s2, q2))
                    ends = _search(
                        arena, token, matched + step, begin, tl.where(part < 6, end, begin),
                        of_segment(part, 2, 4, first0, first1 - end0, first2 - end1),
                        of_segment(part, 2, 4, text_at(words, 0), text_at(words, 1), text_at(words, 2)),
                    )  # fmt: skip
                    c0 = _at_part(ends, 0)
                    d0 = _at_part(ends, 1)
                    c1 = _at_part(ends, 2)
                    d1 = _at_part(ends, 3)
                    c2 = _at_part(ends, 4)
                    d2 = _at_part(ends, 5)
                    exact = (d0 - c0) + (d1 - c1) + (d2 - c2)
                    its_latest = zero - 1
                    if exact <= LANES:
                        its_latest = _latest_of(
                            arena, words, first0 + c0, first1 - end0 + c1, first2 - end1 + c2, d0 - c0, d1 - c1, d2 - c2
                        )
                    is_tie = (exact == most) & (exact <= LANES)
                    tie = tl.where(exact > most, 0, tl.maximum(tie, is_tie.to(tl.int32)))
                    wins_tie = tl.where(exact <= LANES, its_latest > latest, token < best)
                    if (exact > most) | ((exact == most) & wins_tie):
                        best = token
                        most = exact
                        latest = its_latest
                        a0 = c0
                        b0 = d0
                        a1 = c1
                        b1 = d1
                        a2 = c2
                        b2 = d2
                        f0 = sample0 + below0
                        f1 = sample1 + below1
                        f2 = sample2 + below2
                        n0 = same0
                        n1 = same1
                        n2 = same2
                # What any that is left may have.
                left = tl.minimum(rest, (top >> TOKEN_BITS) * (SLOTS // LANES))
                left = tl.minimum(count, tl.where(finer == 1, slack, left * stride + slack))
                top = tl.where(left < tl.maximum(most, needed), -1, top)
            passes = zero
            if finer == 1:
                first += SLOTS * stride
                passes = (first < end2).to(tl.int32)
            elif slack >= tl.maximum(most, needed):
                # A token that no sample has hit may win: once more, with samples that cannot miss it.
                finer = zero + 1
                passes = finer
                first = zero
                stride = tl.maximum(1, (tl.maximum(most, needed) + 2) // 3)
        survival = prob * tl.div_rn(most.to(tl.float32), count.to(tl.float32))
        count = most
        if (most == 0) | (survival < floor):
            count = zero
        else:
            tl.store(tokens + step, best)
            tl.store(probs + step, survival)
            by_recency = tl.maximum(by_recency, tie)
            prob = survival
            score += survival
            step += 1
            low0 = a0
            high0 = b0
            low1 = a1
            high1 = b1
            low2 = a2
            high2 = b2
            sample0 = f0
            sample1 = f1
            sample2 = f2
            samples0 = n0
            samples1 = n1
            samples2 = n2
            alive = alive & (following == best)
            following = ahead
            # A finer pass leaves the samples of a part.
            stride = tl.where(finer == 1, 0, stride)
            first = zero
    tl.debug_barrier()
    return (
        step, count, prob, by_recency, first0 + low0, first1 + low1 - end0, first2 + low2 - end1, high0 - low0, high1 - low1, high2 - low2
    )  # fmt: skip
