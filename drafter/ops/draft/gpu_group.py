"""The chain of one group of suffix lengths on the GPU, those that have the same occurrences, by one warp.

Up to SLOTS occurrences are held in registers. While there are more, each step counts them where they are: see
draftd.drafter.ops.draft.gpu_corpus and gpu_local.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.draft.gpu_corpus import follow_locus
from draftd.drafter.ops.draft.gpu_local import LENGTH_BITS, LENGTH_MASK, follow_hits, gather_hits
from draftd.drafter.ops.draft.gpu_words import floor_of, locus_of, of_segment, recency, text_at
from draftd.drafter.ops.warp import LANES, TOKEN_BITS, TOKENS, bit_count, lanes_with_same

_ENDLESS = tl.constexpr(1 << 30)


@triton.jit
def group_chain(
    arena: tensor, words: tensor, locus: tensor, row: tensor, n: tensor, hits: tensor, found: tensor, is_local: tensor, matched: tensor,
    size: tensor, members: tensor, cap: tensor, min_prob: tensor, best_key: tensor, scratch: tensor,
    USE_LOCAL: tl.constexpr, USE_CORPUS: tl.constexpr, LENGTHS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
) -> tensor:  # fmt: skip
    """Follows the most frequent continuation; of equals the most recent, for corpus counts above 32 the smaller token.

    Args:
        arena: int32 pointer; words: int64 pointer to the row's record; locus: int32 pointer to the first segment's, see match_rows.
        row, hits: int32 pointers; found: hits, at least those that match as much.
        is_local: 1 to draft from the row itself, else 0. matched: tokens of the suffix that is followed; size: its occurrences.
        members: int1 [LENGTHS]; the group. cap: int32 [LENGTHS]; most tokens of each length.
        best_key: int64 pointer; the row's best so far: a chain that cannot beat it is given up.
        scratch: int32 pointer [ROOM + 2 * K]; this program's own.

    Returns:
        The chain's tokens and survival probabilities [K]; drafted and score [LENGTHS]; 1 if recency has decided in the corpus, else 0.
    """
    length = tl.arange(0, LENGTHS)
    kth = tl.arange(0, K)
    slot = tl.arange(0, SLOTS)
    most_cap = tl.max(tl.where(members, cap, 0), axis=0)
    chain = tl.zeros_like(kth) - 1
    chain_probs = tl.zeros_like(kth).to(tl.float32)
    drafted = tl.zeros_like(length)
    score = drafted.to(tl.float32)
    prob = tl.full([], 1.0, tl.float32)
    zero = size * 0
    count = size
    total = size + is_local
    tied = zero
    start = zero
    first0 = tl.full([], 0, tl.int64)
    first1 = first0
    first2 = first0
    size0 = zero
    size1 = zero
    size2 = zero
    if USE_CORPUS:
        first0, first1, first2, size0, size1, size2 = locus_of(words, locus)

    if size > SLOTS:
        chain_at = scratch + ROOM
        far_probs = (chain_at + K).to(tl.pointer_type(tl.float32))
        if (is_local == 1) & USE_LOCAL:
            start, count, prob = follow_hits(
                hits, found, matched, row, n, size, most_cap, min_prob, best_key, chain_at, far_probs, scratch, ROOM, SLOTS, BLOCK
            )
        else:
            start, count, prob, tied, first0, first1, first2, size0, size1, size2 = follow_locus(
                arena, words, first0, first1, first2, size0, size1, size2, matched, most_cap, min_prob, best_key,
                chain_at, far_probs, SLOTS,
            )  # fmt: skip
        chain = tl.load(chain_at + kth, mask=kth < start, other=-1)
        chain_probs = tl.load(far_probs + kth, mask=kth < start, other=0.0)
        total = tl.where(start > 0, count, total)
        for step in range(start):
            going = members & (cap > step)
            score += tl.where(going, tl.sum(tl.where(kth == step, chain_probs, 0.0), axis=0), 0.0)
            drafted += going.to(tl.int32)

    if (count > 0) & (start < most_cap):
        # Where each occurrence goes on, how much text is there, and how recent it is.
        end1 = size0 + size1
        text = arena
        alive = slot < count
        room = tl.zeros_like(slot) + _ENDLESS
        age = slot
        if (is_local == 1) & USE_LOCAL:
            held_hits = hits
            held = found
            if size > SLOTS:
                held = count
                held_hits = scratch
            elif found > SLOTS:
                held = gather_hits(hits, found, matched, row, n, scratch, ROOM, BLOCK)
                held_hits = scratch
            hit = tl.load(held_hits + slot, mask=slot < held, other=0)
            alive = (hit & LENGTH_MASK) >= matched
            age = hit >> LENGTH_BITS
            room = n - 1 - age
            place = (age + 1).to(tl.int64)
            text = row
        else:
            position = tl.load(arena + of_segment(slot, size0, end1, first0, first1 - size0, first2 - end1) + slot, mask=alive, other=0)
            place = of_segment(slot, size0, end1, text_at(words, 0), text_at(words, 1), text_at(words, 2)) + position + matched
            age = recency(words, of_segment(slot, size0, end1, 0, 1, 2), position)
        at = text + place
        best_yet = tl.load(best_key, volatile=True)
        following = tl.load(at + start, mask=alive & (start < room), other=-1)
        for step in range(start, most_cap):
            if count > 0:
                # The next step's tokens are on their way while this one is decided.
                ahead = tl.load(at + step + 1, mask=alive & (step + 1 < room), other=-1)
                floor = floor_of(best_yet, tl.max(score, axis=0), most_cap - step, min_prob)
                best_yet = tl.load(best_key, volatile=True)
                needed = tl.maximum(1, (floor * total.to(tl.float32) / prob * 0.999).to(tl.int32))
                x = tl.where(alive & (following < TOKENS), following, -1)
                # Most frequent first: how often a token is in its register, then the token itself.
                keys = tl.where(x >= 0, (bit_count(lanes_with_same(x)) << TOKEN_BITS) | x, -1)
                rest = count
                best = zero - 1
                most = zero
                by_recency = zero
                top = tl.max(keys, axis=0)
                while top >= 0:
                    token = top & (TOKENS - 1)
                    same = x == token
                    seen = tl.sum(same.to(tl.int32), axis=0)
                    keys = tl.where(same, -1, keys)
                    rest -= seen
                    wins = seen > most
                    if seen == most:
                        wins = token < best
                        if (is_local == 1) | (seen <= LANES):
                            wins = tl.max(tl.where(same, age, -1), axis=0) > tl.max(tl.where(x == best, age, -1), axis=0)
                            by_recency = zero + 1
                    by_recency = tl.where(seen > most, 0, by_recency)
                    best = tl.where(wins, token, best)
                    most = tl.maximum(most, seen)
                    top = zero - 1
                    # No token that is left can win, or live.
                    if rest >= tl.maximum(most, needed):
                        top = tl.max(keys, axis=0)
                        top = tl.where((top >> TOKEN_BITS) * (SLOTS // LANES) < tl.maximum(most, needed), -1, top)
                survival = prob * tl.div_rn(most.to(tl.float32), total.to(tl.float32))
                if (most == 0) | (survival < floor):
                    count = zero
                else:
                    going = members & (cap > step)
                    chain = tl.where(kth == step, best, chain)
                    chain_probs = tl.where(kth == step, survival, chain_probs)
                    score += tl.where(going, survival, 0.0)
                    drafted += going.to(tl.int32)
                    tied = tl.maximum(tied, tl.where(is_local == 1, 0, by_recency))
                    prob = survival
                    count = most
                    total = most
                    alive = alive & (following == best)
                    following = ahead
    return chain, chain_probs, drafted, score, tied
