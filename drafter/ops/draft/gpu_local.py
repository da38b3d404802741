"""The continuations of many occurrences in a row itself, on the GPU: they are not sorted, so each pass reads all of the row's hits.

For loops and other repetitive rows; a few occurrences are held in registers (see draftd.drafter.ops.draft.gpu_group).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import HIT_LENGTH_BITS
from draftd.drafter.ops.draft.gpu_words import floor_of
from draftd.drafter.ops.warp import TOKEN_BITS, TOKENS, bit_count, lanes_with_same

LENGTH_BITS = tl.constexpr(HIT_LENGTH_BITS)
LENGTH_MASK = tl.constexpr((1 << HIT_LENGTH_BITS) - 1)
_BINS = tl.constexpr(256)
_NEVER = tl.constexpr(0x7FFFFFFF)

# What a pass over the hits is for: a token to try, its count, the other tokens by bins, a bin's next token, that one's count.
_FIND_FIRST = tl.constexpr(0)
_COUNT_FIRST = tl.constexpr(1)
_FILL_BINS = tl.constexpr(2)
_FIND = tl.constexpr(3)
_COUNT = tl.constexpr(4)
_DONE = tl.constexpr(5)


@triton.jit
def _followed(hit: tensor, is_hit: tensor, length: tensor, row: tensor, n: tensor, chain: tensor, known: tensor, drafted: tensor) -> tensor:
    """Whether hits match `length` tokens and go on with the drafted ones, which they do with the first `known`."""
    at = (hit >> LENGTH_BITS) + 1
    alive = is_hit & ((hit & LENGTH_MASK) >= length)
    for j in range(known, drafted):
        token = tl.load(chain + j)
        # Not masked with `alive`: these loads need not wait for one another.
        alive = alive & (tl.load(row + at + j, mask=at + j < n, other=-1) == token)
    return alive


@triton.jit
def _bin(x: tensor) -> tensor:
    """A token's bin; all bits count."""
    return ((x * 0x1E3779B1) >> 20) & (_BINS - 1)


@triton.jit
def _best_child(
    hits: tensor, size: tensor, length: tensor, row: tensor, n: tensor, chain: tensor, known: tensor, drafted: tensor,
    alive_count: tensor, total: tensor, prob: tensor, score: tensor, left: tensor, min_prob: tensor, best_key: tensor, BLOCK: tl.constexpr,
) -> tensor:  # fmt: skip
    """The most frequent continuation, the most recent of equals, and its count; (-1, 0) if none can make the chain the row's best.

    A frequent token of the middle of the list is tried first; if it has no majority, the other tokens are counted by bins, which bound
    each token's count, and then exactly, from the fullest bin on.

    Args:
        hits: int32 pointer [size]; see draftd.drafter.ops.local.gpu.
        chain: int32 pointer [drafted]; what was drafted; all hits go on with the first `known`. alive_count: those that go on with all.
        total: alive_count, or one more before the first token. prob, score, left: survival probability and score of the chain, and
            how many tokens it may still take.
    """
    best_yet = tl.load(best_key, volatile=True)
    lane = tl.arange(0, BLOCK)
    bin_ = tl.arange(0, _BINS)
    zero = total * 0
    counts = tl.zeros_like(bin_)
    # A bin's tokens from here on were counted, the largest first.
    limits = tl.zeros_like(bin_) + _NEVER
    best = zero - 1
    best_count = zero
    best_end = zero - 1
    tried = zero - 1
    token = zero - 1
    which = zero
    limit = zero
    rest = alive_count
    stage = zero + _FIND_FIRST
    while stage != _DONE:
        found = zero - 1
        count = zero
        end = zero - 1
        first = zero
        last = size
        if stage == _FIND_FIRST:
            first = tl.maximum(0, size // 2 - BLOCK // 2)
            last = tl.minimum(size, first + BLOCK)
        floor = floor_of(best_yet, score, left, min_prob)
        next_hit = tl.load(hits + first + lane, mask=first + lane < last, other=0)
        for i in range(first, last, BLOCK):
            hit = next_hit
            next_hit = tl.load(hits + i + BLOCK + lane, mask=i + BLOCK + lane < last, other=0)
            best_yet = tl.load(best_key, volatile=True)
            # Another chain may have made this one hopeless: then the passes read no more.
            most = tl.where(floor_of(best_yet, score, left, min_prob) > prob, 0, last)
            alive = _followed(hit, i + lane < most, length, row, n, chain, known, drafted)
            at = (hit >> LENGTH_BITS) + 1 + drafted
            x = tl.load(row + at, mask=alive & (at < n), other=-1)
            x = tl.where(x < TOKENS, x, -1)
            other = (x >= 0) & (x != tried)
            if stage == _FIND_FIRST:
                found = tl.max(tl.where(other, (bit_count(lanes_with_same(x)) << TOKEN_BITS) | x, -1), axis=0)
            elif stage == _FILL_BINS:
                counts += tl.histogram(_bin(x), _BINS, mask=other)
            elif stage == _FIND:
                found = tl.maximum(found, tl.max(tl.where(other & (_bin(x) == which) & (x < limit), x, -1), axis=0))
            else:
                same = (x >= 0) & (x == token)
                count += tl.sum(same.to(tl.int32), axis=0)
                end = tl.maximum(end, tl.max(tl.where(same, at, -1), axis=0))
        if (count > best_count) | ((count == best_count) & (end > best_end)):
            best = token
            best_count = count
            best_end = end
        if stage == _FIND_FIRST:
            token = tl.where(found >= 0, found & (TOKENS - 1), -1)
            stage = zero + _COUNT_FIRST
        elif stage == _FIND:
            token = found
            stage = tl.where(found >= 0, _COUNT, _DONE)
        else:
            if stage == _COUNT_FIRST:
                tried = token
                rest = alive_count - count
                stage = zero + _FILL_BINS
            else:
                here = (bin_ == which) & (stage == _COUNT)
                counts -= tl.where(here, count, 0)
                limits = tl.where(here, token, limits)
                rest = tl.max(counts, axis=0)
                which = tl.max(tl.where(counts == rest, bin_, -1), axis=0)
                limit = tl.max(tl.where(bin_ == which, limits, -1), axis=0)
                stage = zero + _FIND
            # No token that is left can win, or live.
            lives = prob * tl.div_rn(rest.to(tl.float32), total.to(tl.float32)) >= floor
            if (rest < tl.maximum(best_count, 1)) | (lives == 0):
                stage = zero + _DONE
    hopeless = floor_of(best_yet, score, left, min_prob) > prob
    return tl.where(hopeless, -1, best), tl.where(hopeless, 0, best_count)


@triton.jit
def _gather(
    hits: tensor, size: tensor, length: tensor, row: tensor, n: tensor, chain: tensor, known: tensor, drafted: tensor, out: tensor,
    room: tensor, BLOCK: tl.constexpr,
) -> tensor:  # fmt: skip
    """Writes the hits that match `length` tokens and go on with the drafted ones, at most `room`; answers how many there are.

    Args:
        chain, known: As in _best_child. out: int32 pointer [room], this program's own; it may be `hits`.
    """
    lane = tl.arange(0, BLOCK)
    found = drafted * 0
    next_hit = tl.load(hits + lane, mask=lane < size, other=0)
    for i in range(0, size, BLOCK):
        hit = next_hit
        next_hit = tl.load(hits + i + BLOCK + lane, mask=i + BLOCK + lane < size, other=0)
        ones = _followed(hit, i + lane < size, length, row, n, chain, known, drafted).to(tl.int32)
        at = found + tl.cumsum(ones, axis=0) - 1
        tl.store(out + at, hit, mask=(ones > 0) & (at < room))
        found += tl.sum(ones, axis=0)
    tl.debug_barrier()
    return found


@triton.jit(noinline=True)
def gather_hits(
    hits: tensor, size: tensor, length: tensor, row: tensor, n: tensor, out: tensor, room: tensor, BLOCK: tl.constexpr
) -> tensor:
    """Writes the hits that match `length` tokens, at most `room`; answers how many there are.

    Args:
        hits: int32 pointer [size]; see draftd.drafter.ops.local.gpu. out: int32 pointer [room], this program's own.
    """
    return _gather(hits, size, length, row, n, hits, size * 0, size * 0, out, room, BLOCK)


@triton.jit(noinline=True)
def follow_hits(
    hits: tensor, size: tensor, length: tensor, row: tensor, n: tensor, count: tensor, most_steps: tensor, min_prob: tensor,
    best_key: tensor, tokens: tensor, probs: tensor, out: tensor, room: tensor, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
) -> tensor:  # fmt: skip
    """Follows the most frequent continuation of a row's hits while more than SLOTS go on; of equals the most recent.

    Args:
        hits: int32 pointer [size]; see draftd.drafter.ops.local.gpu. count: those that match `length` tokens.
        most_steps, min_prob, best_key, tokens, probs: As in draftd.drafter.ops.draft.gpu_corpus.
        out: int32 pointer [room], this program's own; out: the hits that are left, if not more than SLOTS.

    Returns:
        Steps, the occurrences that are left (0: the chain has ended), and the survival probability.
    """
    prob = tl.full([], 1.0, tl.float32)
    score = prob * 0.0
    step = count * 0
    known = step
    total = count + 1
    going = step + 1
    while going > 0:
        if (count <= room) & (2 * count <= size):
            # From here on only those that are left are read.
            size = _gather(hits, size, length, row, n, tokens, known, step, out, room, BLOCK)
            hits = out
            known = step
        going = ((count > SLOTS) & (step < most_steps)).to(tl.int32)
        if going > 0:
            best, count = _best_child(
                hits, size, length, row, n, tokens, known, step, count, total, prob, score, most_steps - step, min_prob, best_key, BLOCK
            )
            survival = prob * tl.div_rn(count.to(tl.float32), total.to(tl.float32))
            total = count
            if (count == 0) | (survival < min_prob):
                count = step * 0
                going = step * 0
            else:
                tl.store(tokens + step, best)
                tl.store(probs + step, survival)
                tl.debug_barrier()
                prob = survival
                score += survival
                step += 1
    # Those that are left are among others still, or alone in `out`.
    if (count > 0) & (count <= SLOTS) & (size > count):
        _gather(hits, size, length, row, n, tokens, known, step, out, room, BLOCK)
    return step, count, prob
