"""Chains of all suffix lengths over at most 32 occurrences, in step: a lane an occurrence, and a lane a chain.

The occurrences of a longer suffix are some of those of a shorter one, so they are read once, whatever the lengths. Who is in a chain and
who goes on with the same token are sets of lanes; counting is a population count.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.draft.gpu_words import locus_of, of_segment, recency, text_at
from draftd.drafter.ops.warp import LANES, bit_count, highest_bit, lanes_with_same, union, value_of

_BACK = tl.constexpr(4)
_NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def few_in_corpus(arena: tensor, words: tensor, locus: tensor, row: tensor, n: tensor, longest: tensor, shortest: tensor) -> tensor:
    """The occurrences of the row's last `shortest` tokens in the corpus, at most 32.

    Args:
        arena: int32 pointer; words: int64 pointer to the row's record; locus: int32 pointer to the first segment's, see match_rows.

    Returns:
        places int64 [32]: where in the arena each goes on; age int32 [32]; matched int32 [32]: how many tokens of the row's tail it
        matches, at most `longest`, 0 if there is none.
    """
    lane = tl.arange(0, LANES)
    first0, first1, first2, size0, size1, size2 = locus_of(words, locus)
    end1 = size0 + size1
    some = lane < end1 + size2
    first = of_segment(lane, size0, end1, first0, first1 - size0, first2 - end1)
    position = tl.load(arena + first + lane, mask=some, other=0)
    places = of_segment(lane, size0, end1, text_at(words, 0), text_at(words, 1), text_at(words, 2)) + shortest + position
    age = recency(words, of_segment(lane, size0, end1, 0, 1, 2), position)
    matched = tl.where(some, shortest, 0)
    limit = longest - shortest
    looking = some
    any_looking = tl.max(some.to(tl.int32), axis=0)
    before = arena + (places - shortest - 1)
    wanted = row + n - shortest - 1
    for start in range(0, limit, _BACK):
        if any_looking > 0:
            for i in tl.static_range(_BACK):
                back = start + i
                # Not masked with `looking`: these loads need not wait for one another. A piece begins after a separator.
                seen = some & (position > back) & (back < limit)
                token = tl.load(wanted - back, mask=back < limit, other=-2)
                looking = looking & (tl.load(before - back, mask=seen, other=-1) == token)
                matched += looking.to(tl.int32)
            any_looking = tl.max(looking.to(tl.int32), axis=0)
    return places, age, matched


@triton.jit
def few_chains(
    base: tensor, places: tensor, stop: tensor, age: tensor, matched: tensor, sizes: tensor, tail: tensor, cap: tensor, min_prob: tensor,
    tokens: tensor, probs: tensor, LENGTHS: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Follows the most frequent continuation of each suffix length with at most 32 occurrences; of equals the most recent.

    Args:
        base: int32 pointer; places: int64 [32]; base + places[i] + d is what follows occurrence i after d drafted tokens.
        stop: Place where the text ends. age: int32 [32]; how recent each occurrence is, all different.
        matched: int32 [32]; an occurrence is in the chains of lengths up to this, 0 if there is none.
        sizes, cap: int32 [LENGTHS]; occurrences that each chain must have to be followed, and its most tokens.
        tail: 1 if the row's tail counts as an occurrence without a continuation.
        tokens: int32 pointer, probs: float32 pointer [LENGTHS, K]; out.

    Returns:
        drafted, score [LENGTHS], and which chains were not followed: some of their occurrences are not among these.
    """
    lane = tl.arange(0, LANES)
    length = tl.arange(0, LENGTHS)
    # In the order of recency, so that of equal counts the higher lane wins. [other, own]
    age = tl.where(matched > 0, age, _NEVER)
    earlier = (age[:, None] < age[None, :]) | ((age[:, None] == age[None, :]) & (lane[:, None] < lane[None, :]))
    rank = tl.sum(earlier.to(tl.int32), axis=0)
    order = tl.sum(tl.where(rank[:, None] == lane[None, :], lane[:, None], 0), axis=0)
    places = tl.gather(places, order, axis=0)
    matched = tl.gather(matched, order, axis=0)
    some = matched > 0
    members = (matched[:, None] > 0) & (matched[:, None] >= length[None, :])
    alive = tl.sum(tl.where(members, (1 << lane)[:, None], 0), axis=0)
    going = (sizes > 0) & (sizes <= LANES) & (cap > 0)
    missing = going & (bit_count(alive) != sizes)
    going = going & ~missing
    total = sizes + tail
    drafted = tl.zeros_like(length)
    score = drafted.to(tl.float32)
    prob = score + 1.0
    most_cap = tl.max(tl.where(going, cap, 0), axis=0)
    any_going = most_cap
    following = tl.load(base + places, mask=some & (places < stop), other=-1)
    for step in range(most_cap):
        if any_going > 0:
            # The next step's tokens are on their way while this one is decided.
            ahead = tl.load(base + places + step + 1, mask=some & (places + step + 1 < stop), other=-1)
            following = tl.where(some & (following >= 0), following, -1 - lane)
            # Only what follows in a chain that goes on; the largest group first, until no other can win anywhere.
            group = lanes_with_same(following) & union(tl.where(going, alive, 0))
            open_ = (following >= 0) & (highest_bit(group) == lane)
            leaders = tl.where(open_, bit_count(group) * LANES + lane, -1)
            leader = tl.max(leaders, axis=0)
            rest = alive
            best_key = tl.zeros_like(length) - 1
            best = tl.zeros_like(length) - 1
            best_alive = tl.zeros_like(length)
            while leader >= 0:
                chosen = leader % LANES
                mine = value_of(group, chosen)
                rest = rest & ~mine
                mine = mine & alive
                key = bit_count(mine) * LANES + highest_bit(mine)
                wins = key > best_key
                best = tl.where(wins, value_of(following, chosen), best)
                best_alive = tl.where(wins, mine, best_alive)
                best_key = tl.maximum(best_key, key)
                leaders = tl.where(lane == chosen, -1, leaders)
                leader = tl.max(leaders, axis=0)
                undecided = tl.max(tl.where(going, bit_count(rest) - best_key // LANES, -1), axis=0)
                leader = tl.where(undecided < 0, -1, leader)
            most = best_key // LANES
            survival = prob * tl.div_rn(most.to(tl.float32), tl.maximum(total, 1).to(tl.float32))
            going = going & (most > 0) & (survival >= min_prob) & (step < cap)
            tl.store(tokens + length * K + step, best, mask=going)
            tl.store(probs + length * K + step, survival, mask=going)
            prob = tl.where(going, survival, prob)
            score += tl.where(going, survival, 0.0)
            total = tl.where(going, most, total)
            drafted += going.to(tl.int32)
            alive = best_alive
            any_going = tl.max(going.to(tl.int32), axis=0)
            following = ahead
    return drafted, score, missing
