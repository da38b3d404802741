"""Chains of all suffix lengths over at most 32 occurrences, in step: a lane an occurrence, and a lane a chain.

The occurrences of a longer suffix are some of those of a shorter one, so they are read once, whatever the lengths. Who is in a chain and
who goes on with the same token are sets of lanes; counting is a population count.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.ops.warp import LANES, bit_count, highest_bit, lanes_where, lanes_with_same, union, value_of


@triton.jit
def few_chains(
    base: tensor, places: tensor, stop: tensor, age: tensor, matched: tensor, expected: tensor, cap: tensor, min_prob: tensor,
    start: tensor,
    total: tensor, prob: tensor, score: tensor, drafted: tensor, going: tensor, tokens: tensor, probs: tensor,
    LENGTHS: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Follows the most frequent continuation in every chain; of equals the most recent.

    Args:
        base: int32 pointer; places: int64 [32]; base + places[i] + d is what follows occurrence i after d drafted tokens.
        stop: Place where the text ends. age: int32 [32]; how recent each occurrence is, all different.
        matched: int32 [32]; an occurrence is in the chains of lengths up to this, 0 if there is none.
        expected, cap: int32 [LENGTHS]; occurrences that each chain must have to be followed, and its most tokens.
        start: Tokens that each going chain has drafted before.
        total, prob, score, drafted, going: [LENGTHS], int32, float32, float32, int32, int1; where each chain is; total: its occurrences.
        tokens: int32 pointer, probs: float32 pointer [LENGTHS, K]; out.

    Returns:
        drafted, score, [LENGTHS] 1 where recency has decided between tokens of equal count, and which chains were not followed.
    """
    lane = tl.arange(0, LANES)
    length = tl.arange(0, LENGTHS)
    # In the order of recency, so that of equal counts the higher lane wins. [other, own]
    age = tl.where(matched > 0, age, 0x7FFFFFFF)
    earlier = (age[:, None] < age[None, :]) | ((age[:, None] == age[None, :]) & (lane[:, None] < lane[None, :]))
    rank = tl.sum(earlier.to(tl.int32), axis=0)
    order = tl.sum(tl.where(rank[:, None] == lane[None, :], lane[:, None], 0), axis=0)
    places = tl.gather(places, order, axis=0)
    matched = tl.gather(matched, order, axis=0)
    some = matched > 0
    members = (matched[:, None] > 0) & (matched[:, None] >= length[None, :])
    alive = tl.sum(tl.where(members, (1 << lane)[:, None], 0), axis=0)
    missing = going & (bit_count(alive) != expected)
    going = going & ~missing
    tied = tl.zeros_like(drafted)
    any_going = tl.max(going.to(tl.int32), axis=0)
    for step in range(start, tl.max(tl.where(going, cap, 0), axis=0)):
        if any_going > 0:
            following = tl.load(base + places + step, mask=some & (places + step < stop), other=-1)
            following = tl.where(some & (following >= 0), following, -1 - lane)
            # Only what follows in a chain that goes on.
            group = lanes_with_same(following) & union(tl.where(going, alive, 0))
            todo = lanes_where((following >= 0) & (highest_bit(group) == lane))
            best_key = tl.zeros_like(length) - 1
            best = tl.zeros_like(length) - 1
            best_alive = tl.zeros_like(length)
            is_tie = tl.zeros_like(length)
            while todo != 0:
                leader = highest_bit(todo)
                mine = alive & value_of(group, leader)
                count = bit_count(mine)
                key = count * LANES + highest_bit(mine)
                is_tie = tl.where(
                    count * LANES > (best_key | (LANES - 1)), 0, tl.where((count > 0) & (key // LANES == best_key // LANES), 1, is_tie)
                )
                best = tl.where(key > best_key, value_of(following, leader), best)
                best_alive = tl.where(key > best_key, mine, best_alive)
                best_key = tl.maximum(best_key, key)
                todo = todo & ~(1 << leader)
            most = best_key // LANES
            survival = prob * tl.div_rn(most.to(tl.float32), tl.maximum(total, 1).to(tl.float32))
            going = going & (most > 0) & (survival >= min_prob) & (step < cap)
            tl.store(tokens + length * K + step, best, mask=going)
            tl.store(probs + length * K + step, survival, mask=going)
            prob = tl.where(going, survival, prob)
            score += tl.where(going, survival, 0.0)
            total = tl.where(going, most, total)
            drafted += going.to(tl.int32)
            tied = tl.where(going, tl.maximum(tied, is_tie), tied)
            alive = best_alive
            any_going = tl.max(going.to(tl.int32), axis=0)
    return drafted, score, tied, missing
