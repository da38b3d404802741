"""From the occurrences that a draft follows to the token that comes next, on the GPU: what the CPU's tally and mixer do, by one warp.

A lane is an occurrence where followers are counted, and a vote where votes are weighed. The occurrences of a level are a set of lanes, and
so are those that the same token follows: counts are population counts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter import policy
from draftd.drafter.ops.calibrated import gpu_levels as levels
from draftd.drafter.ops.calibrated.cpu_mixer import (
    CANDIDATE_COUNT,
    CANDIDATE_TOKENS,
    FEATURE_VALUES,
    PROBABILITIES,
    VOTE_CELLS,
    VOTE_COUNT,
    VOTE_TOKENS,
    WEIGHTS,
)
from draftd.drafter.ops.calibrated.gpu_levels import length_of, level_of
from draftd.drafter.ops.calibrated.gpu_refine import clip, logit, pair, ratio, sigmoid
from draftd.drafter.ops.warp import bit_count, highest_bit, lanes_where, lanes_with_same

_TOP_LEVELS = tl.constexpr(policy.TOP_LEVELS)
_ROWS = tl.constexpr(2 * policy.TOP_LEVELS)
_LEVELS = tl.constexpr(policy.LEVELS)
_GAPS = tl.constexpr(policy.GAPS)
_COUNT_BUCKETS = tl.constexpr(policy.COUNT_BUCKETS)
_SHARE_BUCKETS = tl.constexpr(policy.SHARE_BUCKETS)
_KINDS = tl.constexpr(policy.KINDS)
_LENGTH_BUCKETS = tl.constexpr(policy.LENGTH_BUCKET_COUNT)
_FINE_AT = tl.constexpr(policy.FINE_AT)
_COARSE_AT = tl.constexpr(policy.COARSE_AT)
_WEIGHTS_AT = tl.constexpr(policy.WEIGHTS_AT)
_WEIGHT_WORDS = tl.constexpr(policy.WEIGHT_WORDS)
_CANDIDATES = tl.constexpr(policy.CANDIDATES)
_FEATURES = tl.constexpr(policy.FEATURES)
_FINE_WEIGHT = tl.constexpr(policy.FINE_WEIGHT)
_COARSE_WEIGHT = tl.constexpr(policy.COARSE_WEIGHT)
_LATEST_FLOOR = tl.constexpr(policy.LATEST_FLOOR)
_SUM_LEAST = tl.constexpr(policy.SUM_LEAST)
_SUM_MOST = tl.constexpr(policy.SUM_MOST)
_ESCAPE_FLOOR = tl.constexpr(policy.ESCAPE_FLOOR)
_VOTE_COUNT = tl.constexpr(VOTE_COUNT)
_WEIGHTS = tl.constexpr(WEIGHTS)
_CANDIDATE_COUNT = tl.constexpr(CANDIDATE_COUNT)
_CANDIDATE_TOKENS = tl.constexpr(CANDIDATE_TOKENS)
_VOTE_TOKENS = tl.constexpr(VOTE_TOKENS)
_VOTE_CELLS = tl.constexpr(VOTE_CELLS)
_PROBABILITIES = tl.constexpr(PROBABILITIES)
_FEATURE_VALUES = tl.constexpr(FEATURE_VALUES)
_FIXED = tl.constexpr(1 << 20)
_SAMPLES = tl.constexpr(levels.SAMPLES)
_SAMPLED_TOKENS = tl.constexpr(levels.SAMPLED_TOKENS)
_SAMPLED_COUNTS = tl.constexpr(levels.SAMPLED_COUNTS)
_SAMPLES_WEIGHT = tl.constexpr(levels.SAMPLES_WEIGHT)
_FAR = tl.constexpr(64)
# Above a level's votes for three candidates: how many there are, and how many different ones.
_SEEN = tl.constexpr(1 << 18)
_DISTINCT = tl.constexpr(1 << 24)
# No token: what does not match, and a candidate that there is not.
_NONE = tl.constexpr(-1)
_NOTHING = tl.constexpr(-2)

# What the kernel spells out.
assert policy.CALIBRATION_WORDS - policy.DECILES_AT >= policy.WEIGHT_WORDS
assert policy.SHARE_BOUNDS == (0.3, 0.5, 0.7, 0.9)
assert policy.COUNT_BOUNDS == (1, 2, 4, 8, 24)
assert policy.LENGTH_BUCKETS == (0, 1, 2, 3, 4, 4, 5, 6, 7)
assert policy.CANDIDATES == 3


@triton.jit
def _length_bucket(level: tensor) -> tensor:
    return tl.where(level <= 4, level, level - 1)


@triton.jit
def _third(candidate: tensor, of0: tensor, of1: tensor, of2: tensor) -> tensor:
    return tl.where(candidate == 0, of0, tl.where(candidate == 1, of1, tl.where(candidate == 2, of2, of2 * 0)))


@triton.jit
def _take(left: tensor, tokens: tensor, own: tensor, corpus: tensor, bits: tensor) -> tensor:
    """The token of the best vote that is left, its best estimate in each source and the sum of all, and what is left without it."""
    best = tl.max(left, axis=0)
    token = tl.max(tl.where((left == best) & (best > 0), tokens, -1), axis=0)
    mine = (bits > 0) & (tokens == token)
    in_own = tl.max(tl.where(mine & own, bits, 0), axis=0).to(tl.float32, bitcast=True)
    in_corpus = tl.max(tl.where(mine & corpus, bits, 0), axis=0).to(tl.float32, bitcast=True)
    fixed = (bits.to(tl.float32, bitcast=True) * _FIXED + 0.5).to(tl.int32)
    total = tl.sum(tl.where(mine, fixed, 0), axis=0).to(tl.float32) / _FIXED
    return token, in_own, in_corpus, total, tl.where(mine, 0, left)


@triton.jit
def _members(below: tensor, same: tensor, gap: tl.constexpr, complete: tensor) -> tensor:
    """The occurrences that a level votes with, as a set of lanes, and which of them stands for the most frequent follower.

    Args:
        below: How many levels below the longest the longest is that each occurrence matches; complete: how many from there on are.
    """
    here = (below <= gap) & (complete >= gap)
    members = lanes_where(here)
    return members, tl.max(tl.where(here, (bit_count(same & members) << 5) | tl.arange(0, 32), 0), axis=0) & 31


@triton.jit
def _votes(x: tensor, token0: tensor, token1: tensor, token2: tensor) -> tensor:
    """For which of three candidates each occurrence is: six bits each, and in six more that it is one."""
    votes = tl.where(x == tl.where(token0 >= 0, token0, _NOTHING), _SEEN + 1, _SEEN)
    votes += tl.where(x == tl.where(token1 >= 0, token1, _NOTHING), 1 << 6, 0)
    return votes + tl.where(x == tl.where(token2 >= 0, token2, _NOTHING), 1 << 12, 0)


@triton.jit
def _tally(votes: tensor, same: tensor, members: tensor) -> tensor:
    """The votes of some occurrences together, and above them how many different followers they have."""
    lane = tl.arange(0, 32).to(tl.uint32)
    from_here = members.to(tl.uint32, bitcast=True) >> lane
    latest = ((same & members).to(tl.uint32, bitcast=True) >> lane) == 1
    return tl.sum(tl.where((from_here & 1) == 1, votes + tl.where(latest, _DISTINCT, 0), 0), axis=0)


@triton.jit
def _tally_samples(work: tensor, level: tl.constexpr, words: tensor, token0: tensor, token1: tensor, token2: tensor) -> tensor:
    """The same of a level's samples."""
    x = tl.load(work + _SAMPLES + level * 32 + tl.arange(0, 32))
    votes = tl.sum(tl.where(x >= 0, _votes(x, token0, token1, token2), 0), axis=0)
    return votes + ((words >> 16) & 255) * _DISTINCT


@triton.jit
def mix(
    calibration: tensor, own_x: tensor, own_matched: tensor, own_top: tensor, own_lowest: tensor,
    held_x: tensor, held_matched: tensor, corpus_top: tensor, held_lowest: tensor, held_weight: tensor,
    searched: tensor, work: tensor, ints: tensor, floats: tensor, EVIDENCE: tl.constexpr,
) -> tensor:  # fmt: skip
    """The token that is the likeliest to come next.

    Args:
        calibration: float32 pointer [CALIBRATION_WORDS].
        own_x: int32 [32]; what follows each occurrence in the row, below 1 << 21, -1 for nothing; the most recent last; own_matched: int32
            [32]; how far each matches; own_top: the longest level, -1 for none; own_lowest: from which level on all are there.
        held_x ... held_lowest: The same of the corpus; held_weight: occurrences that one of them stands for.
        searched: Whether that has just been sought: levels that are not all there have samples in `work`, the row's workspace.
        ints: int32 pointer [EVIDENCE_INTS]; floats: float32 pointer [EVIDENCE_FLOATS]; out, if EVIDENCE.

    Returns:
        The token (-1: there is none) and its mixed probability; 0 if its best vote is of the row's own tokens, else 1; how many
        occurrences that source's longest level has.
    """
    lane = tl.arange(0, 32)
    longest = tl.maximum(own_top, corpus_top)
    bucket = tl.maximum(_length_bucket(longest), 0)
    candidate = tl.arange(0, 4)[:, None]
    feature = tl.arange(0, _FEATURES)[None, :]
    # The fourth candidate, which there is not, gets what stands behind the weights.
    mixer = tl.load(calibration + _WEIGHTS_AT + (bucket * _CANDIDATES + candidate) * _WEIGHT_WORDS + feature)
    # What does not match is all alike: the instruction takes the longer the more different values there are.
    own_below = tl.where((own_x >= 0) & (own_matched > 0), own_top - level_of(own_matched), _FAR)
    held_below = tl.where((held_x >= 0) & (held_matched > 0), corpus_top - level_of(held_matched), _FAR)
    own_same = lanes_with_same(tl.where(own_below < _FAR, own_x, _NONE))
    held_same = lanes_with_same(tl.where(held_below < _FAR, held_x, _NONE))
    # Right after a search the row's longest level is there, if only its most recent occurrences.
    own_complete = tl.where(own_top < 0, -1, tl.where(searched > 0, tl.maximum(own_top - own_lowest, 0), own_top - own_lowest))
    held_complete = tl.where(corpus_top < 0, -1, corpus_top - held_lowest)
    own0, own_most0 = _members(own_below, own_same, 0, own_complete)
    own1, own_most1 = _members(own_below, own_same, 1, own_complete)
    own2, own_most2 = _members(own_below, own_same, 2, own_complete)
    own3, own_most3 = _members(own_below, own_same, 3, own_complete)
    held0, held_most0 = _members(held_below, held_same, 0, held_complete)
    held1, held_most1 = _members(held_below, held_same, 1, held_complete)
    held2, held_most2 = _members(held_below, held_same, 2, held_complete)
    held3, held_most3 = _members(held_below, held_same, 3, held_complete)

    # A lane is a vote: the most frequent follower of a level, or the latest one; the row's levels first, the longest of them first.
    row = lane >> 1
    members = tl.where(row < 2, tl.where(row == 0, own0, own1), tl.where(row == 2, own2, own3))
    winner = tl.where(row < 2, tl.where(row == 0, own_most0, own_most1), tl.where(row == 2, own_most2, own_most3))
    held_members = tl.where(row < 6, tl.where(row == 4, held0, held1), tl.where(row == 6, held2, held3))
    held_winner = tl.where(row < 6, tl.where(row == 4, held_most0, held_most1), tl.where(row == 6, held_most2, held_most3))
    in_corpus = row >= _TOP_LEVELS
    members = tl.where(row < _ROWS, tl.where(in_corpus, held_members, members), 0)
    winner = tl.where(in_corpus, held_winner, winner)
    latest = tl.maximum(highest_bit(members), 0)
    is_second = (lane & 1) == 1
    at = tl.where(is_second, latest, winner)
    token = tl.where(in_corpus, tl.gather(held_x, at, axis=0), tl.gather(own_x, at, axis=0))
    same = tl.where(in_corpus, tl.gather(held_same, at, axis=0), tl.gather(own_same, at, axis=0))
    same_token = ((same >> tl.where(is_second, winner, latest)) & 1) == 1
    hits = bit_count(same & members)
    seen = bit_count(members)
    gap = row & (_TOP_LEVELS - 1)
    level = tl.where(in_corpus, corpus_top, own_top) - gap
    weight = tl.where(in_corpus, held_weight, 1.0)
    # Of the two longest levels in the corpus, if they are samples: how many, how many different followers, and what each stands for.
    sampled0 = searched * 0
    sampled1 = sampled0
    scale0 = held_weight
    scale1 = held_weight
    is_sampled = (searched > 0) & (corpus_top >= 0) & (tl.maximum(corpus_top - _TOP_LEVELS + 1, 0) < held_lowest)
    if is_sampled:
        vote = lane & (2 * _TOP_LEVELS - 1)
        here = in_corpus & (row < _ROWS) & (level >= 0) & (level < held_lowest)
        words = tl.load(work + _SAMPLED_COUNTS + vote)
        token = tl.where(here, tl.load(work + _SAMPLED_TOKENS + vote), token)
        hits = tl.where(here, words & 255, hits)
        seen = tl.where(here, (words >> 8) & 255, seen)
        same_token = tl.where(here, (words >> 24) != 0, same_token)
        weights = (work + _SAMPLES_WEIGHT).to(tl.pointer_type(tl.float32))
        weight = tl.where(here, tl.load(weights + gap), weight)
        if corpus_top < held_lowest:
            sampled0 = tl.load(work + _SAMPLED_COUNTS)
            scale0 = tl.load(weights)
        if (corpus_top >= 1) & (corpus_top - 1 < held_lowest):
            sampled1 = tl.load(work + _SAMPLED_COUNTS + 2)
            scale1 = tl.load(weights + 1)
    valid = (seen > 0) & ~(is_second & same_token)
    level = tl.maximum(level, 0)
    gap = tl.minimum(gap, _GAPS - 1)
    kind = tl.where(is_second, 2, tl.where(same_token, 0, 1))
    tenfold = hits * 10
    shares = (tenfold >= 3 * seen).to(tl.int32) + (tenfold >= 5 * seen).to(tl.int32)
    shares += (tenfold >= 7 * seen).to(tl.int32) + (tenfold >= 9 * seen).to(tl.int32) + (hits == seen).to(tl.int32)
    all_ = seen.to(tl.float32) * weight
    counts = (
        (all_ > 1).to(tl.int32) + (all_ > 2).to(tl.int32) + (all_ > 4).to(tl.int32) + (all_ > 8).to(tl.int32) + (all_ > 24).to(tl.int32)
    )
    length = length_of(level).to(tl.float32)
    guess = ratio(hits.to(tl.float32) * weight * length, (all_ + 1.0) * (length + 1.0))
    guess = tl.where(is_second, tl.maximum(guess, _LATEST_FLOOR), guess)
    source = in_corpus.to(tl.int32)
    fine = ((((source * _LEVELS + level) * _GAPS + gap) * _COUNT_BUCKETS + counts) * _SHARE_BUCKETS + shares) * _KINDS + kind
    coarse = (((source * _LENGTH_BUCKETS + _length_bucket(level)) * _GAPS + gap) * _SHARE_BUCKETS + shares) * _KINDS + kind
    # Cells of what is no vote are cells too: a mask would make these loads wait for one another.
    fine_hits, fine_trials = pair(calibration + _FINE_AT, fine)
    coarse_hits, coarse_trials = pair(calibration + _COARSE_AT, coarse)
    # The coarse estimate smooths the fine one; as one fraction.
    trials = coarse_trials + _COARSE_WEIGHT
    estimate = fine_hits * trials + _FINE_WEIGHT * (coarse_hits + _COARSE_WEIGHT * guess)
    estimate = clip(ratio(estimate, trials * (fine_trials + _FINE_WEIGHT)))

    # Estimates are above zero: their bits have their order.
    bits = tl.where(valid, estimate.to(tl.int32, bitcast=True), 0)
    in_own = ~in_corpus
    zero = tl.full([], 0.0, tl.float32)
    nothing = tl.full([], -1, tl.int32)
    token0, best_own0, best_corpus0, total0, left = _take(bits, token, in_own, in_corpus, bits)
    token1, best_own1, best_corpus1, total1 = nothing, zero, zero, zero
    token2, best_own2, best_corpus2, total2 = nothing, zero, zero, zero
    # Often all are for one token.
    if tl.max(left, axis=0) > 0:
        token1, best_own1, best_corpus1, total1, left = _take(left, token, in_own, in_corpus, bits)
        token2, best_own2, best_corpus2, total2, left = _take(left, token, in_own, in_corpus, bits)
    kept = (token0 >= 0).to(tl.int32) + (token1 >= 0).to(tl.int32) + (token2 >= 0).to(tl.int32)

    # Their counts at the two longest levels of both sources.
    own_votes = _votes(own_x, token0, token1, token2)
    held_votes = _votes(held_x, token0, token1, token2)
    own_tally0 = _tally(own_votes, own_same, own0)
    own_tally1 = _tally(own_votes, own_same, own1)
    held_tally0 = _tally(held_votes, held_same, held0)
    held_tally1 = _tally(held_votes, held_same, held1)
    if is_sampled:
        if sampled0 > 0:
            held_tally0 = _tally_samples(work, 0, sampled0, token0, token1, token2)
        if sampled1 > 0:
            held_tally1 = _tally_samples(work, 1, sampled1, token0, token1, token2)
    blend = tl.zeros_like(mixer) + _ESCAPE_FLOOR
    for below in tl.static_range(2):
        own_gap = own_top - longest + 1 - below
        held_gap = corpus_top - longest + 1 - below
        of_own = tl.where(own_gap == 0, own_tally0, tl.where(own_gap == 1, own_tally1, 0))
        of_held = tl.where(held_gap == 0, held_tally0, tl.where(held_gap == 1, held_tally1, 0))
        scale = tl.where(held_gap == 0, scale0, scale1)
        total_seen = ((of_own // _SEEN) & 63).to(tl.float32) + ((of_held // _SEEN) & 63).to(tl.float32) * scale
        distinct = (of_own // _DISTINCT + of_held // _DISTINCT).to(tl.float32)
        followed = ((of_own >> (6 * candidate)) & 63).to(tl.float32) + ((of_held >> (6 * candidate)) & 63).to(tl.float32) * scale
        there = total_seen > 0
        blend = tl.where(there, ratio(followed + distinct * blend, tl.where(there, total_seen + distinct, 1.0)), blend)

    # A lane is a feature of a candidate.
    best0 = tl.maximum(best_own0, best_corpus0)
    best1 = tl.maximum(best_own1, best_corpus1)
    first = _third(candidate, best0, best1, tl.maximum(best_own2, best_corpus2))
    other0 = tl.minimum(best_own0, best_corpus0)
    other1 = tl.minimum(best_own1, best_corpus1)
    second = _third(candidate, other0, other1, tl.minimum(best_own2, best_corpus2))
    rival = tl.where(kept > 1, tl.where(candidate == 0, best1, best0), 0.0)
    total = _third(candidate, total0, total1, total2)
    total = tl.minimum(tl.maximum(ratio(total, 1.0 + total), _SUM_LEAST), _SUM_MOST)
    blend = clip(blend)
    value = tl.where(feature == 0, first, tl.where(feature == 1, second, tl.where(feature == 2, rival, 0.0)))
    value = tl.where(feature == 6, total, tl.where(feature == 7, blend, value))
    there = (value > 0) & (candidate < kept)
    value = tl.where(there, logit(tl.where(there, value, 0.5)) + tl.where((feature == 1) | (feature == 2), 2.0, 0.0), 0.0)
    value = tl.where(feature == 3, 1.0, tl.where(feature == 4, (second > 0).to(tl.float32), value))
    value = tl.where(feature == 5, (rival > 0).to(tl.float32), value)
    score = tl.sum(value * mixer, axis=1)
    probability = clip(sigmoid(score))
    place = tl.arange(0, 4)
    ranked = tl.where(place < kept, probability, 0.0)
    highest = tl.max(ranked, axis=0)
    chosen = tl.min(tl.where(ranked == highest, place, 4), axis=0)
    answer = tl.where(kept > 0, _third(chosen, token0, token1, token2), -1)
    origin = _third(
        chosen, (best_corpus0 > best_own0).to(tl.int32), (best_corpus1 > best_own1).to(tl.int32), (best_corpus2 > best_own2).to(tl.int32)
    )
    if EVIDENCE:
        # The votes without gaps between them.
        there_ = lanes_where(valid)
        slot = bit_count(there_ & ((1 << lane) - 1))
        tl.store(ints + _VOTE_TOKENS + slot, token, mask=valid)
        tl.store(ints + _VOTE_CELLS + slot, fine, mask=valid)
        tl.store(ints + _VOTE_COUNT, bit_count(there_))
        tl.store(ints + _WEIGHTS, bucket)
        tl.store(ints + _CANDIDATE_COUNT, kept)
        tl.store(ints + _CANDIDATE_TOKENS + place, _third(place, token0, token1, token2), mask=place < kept)
        tl.store(floats + _PROBABILITIES + place, probability, mask=place < kept)
        tl.store(floats + _FEATURE_VALUES + candidate * _FEATURES + feature, value, mask=candidate < kept)
    return answer, highest, origin, tl.max(tl.where(lane == origin * (2 * _TOP_LEVELS), all_.to(tl.int32), 0), axis=0)
