"""From the occurrences that a draft follows to the token that comes next, on the GPU: what the CPU's tally and mixer do, by one warp.

A lane is an occurrence where followers are counted, and a vote where votes are weighed. Rows of a table [8, 32] are levels: the four that
vote of the row's own tokens, the longest first, then those of the corpus.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter import policy
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
from draftd.drafter.ops.calibrated.gpu_levels import length_of, same_in_rows
from draftd.drafter.ops.warp import bit_count

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
_REFINED_AT = tl.constexpr(policy.REFINED_AT)
_WEIGHTS_AT = tl.constexpr(policy.WEIGHTS_AT)
_WEIGHT_WORDS = tl.constexpr(policy.WEIGHT_WORDS)
_CANDIDATES = tl.constexpr(policy.CANDIDATES)
_FEATURES = tl.constexpr(policy.FEATURES)
_FINE_WEIGHT = tl.constexpr(policy.FINE_WEIGHT)
_COARSE_WEIGHT = tl.constexpr(policy.COARSE_WEIGHT)
_LATEST_FLOOR = tl.constexpr(policy.LATEST_FLOOR)
_LEAST = tl.constexpr(policy.LEAST_PROBABLE)
_MOST = tl.constexpr(policy.MOST_PROBABLE)
_SUM_LEAST = tl.constexpr(policy.SUM_LEAST)
_SUM_MOST = tl.constexpr(policy.SUM_MOST)
_ESCAPE_FLOOR = tl.constexpr(policy.ESCAPE_FLOOR)
_KNOTS = tl.constexpr(policy.KNOTS)
_SPACING = tl.constexpr(policy.KNOT_SPACING)
_REFINED_WEIGHT = tl.constexpr(policy.REFINED_WEIGHT)
_VOTE_COUNT = tl.constexpr(VOTE_COUNT)
_WEIGHTS = tl.constexpr(WEIGHTS)
_CANDIDATE_COUNT = tl.constexpr(CANDIDATE_COUNT)
_CANDIDATE_TOKENS = tl.constexpr(CANDIDATE_TOKENS)
_VOTE_TOKENS = tl.constexpr(VOTE_TOKENS)
_VOTE_CELLS = tl.constexpr(VOTE_CELLS)
_PROBABILITIES = tl.constexpr(PROBABILITIES)
_FEATURE_VALUES = tl.constexpr(FEATURE_VALUES)
# A follower, and above it two numbers below 32, in one int32.
_TOKEN_BITS = tl.constexpr(21)
_TOKEN_MASK = tl.constexpr((1 << 21) - 1)
_HIGH_BITS = tl.constexpr(26)
_LOW_MASK = tl.constexpr((1 << 26) - 1)
_FIXED = tl.constexpr(1 << 20)
# How many different followers there are, above how many followers.
_DISTINCT = tl.constexpr(1 << 8)
# No token: what does not match, and a candidate that there is not.
_NONE = tl.constexpr(-1)
_NOTHING = tl.constexpr(-2)

# What the kernel spells out.
assert policy.CALIBRATION_WORDS - policy.DECILES_AT >= policy.WEIGHT_WORDS
assert policy.SHARE_BOUNDS == (0.3, 0.5, 0.7, 0.9)
assert policy.COUNT_BOUNDS == (1, 2, 4, 8, 24)
assert policy.SURVIVAL_BOUNDS == (0.3, 0.55, 0.8)
assert policy.LENGTH_BUCKETS == (0, 1, 2, 3, 4, 4, 5, 6, 7)
assert policy.CANDIDATES == 3


@triton.jit
def _clip(probability: tensor) -> tensor:
    return tl.minimum(tl.maximum(probability, _LEAST), _MOST)


@triton.jit
def _logit(probability: tensor) -> tensor:
    return tl.log(probability / (1.0 - probability))


@triton.jit
def _sigmoid(score: tensor) -> tensor:
    return 1.0 / (1.0 + tl.exp(-score))


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
def mix(
    calibration: tensor, members: tensor, x: tensor, order: tensor, own_top: tensor, corpus_top: tensor, weight: tensor, ints: tensor,
    floats: tensor, EVIDENCE: tl.constexpr,
) -> tensor:  # fmt: skip
    """The token that is the likeliest to come next.

    Args:
        calibration: float32 pointer [CALIBRATION_WORDS].
        members: int1 [8, 32]; which occurrences match a level; x: int32 [8, 32]; what follows them, below 1 << 21; anything where they
            do not match. order: int32 [8, 32]; the latest of a level has the highest, at most 31.
        own_top, corpus_top: Each source's longest level, -1 for none.
        weight: float32 [32], by vote; occurrences that one of its level stands for.
        ints: int32 pointer [EVIDENCE_INTS]; floats: float32 pointer [EVIDENCE_FLOATS]; out, if EVIDENCE.

    Returns:
        The token (-1: there is none) and its mixed probability; 0 if its best vote is of the row's own tokens, else 1; how many
        occurrences that source's longest level has.
    """
    row = tl.arange(0, _ROWS)
    lane = tl.arange(0, 32)
    longest = tl.maximum(own_top, corpus_top)
    bucket = tl.maximum(_length_bucket(longest), 0)
    candidate = tl.arange(0, 4)[:, None]
    feature = tl.arange(0, _FEATURES)[None, :]
    # The fourth candidate, which there is not, gets what stands behind the weights.
    mixer = tl.load(calibration + _WEIGHTS_AT + (bucket * _CANDIDATES + candidate) * _WEIGHT_WORDS + feature)
    # What does not match is all alike: the instruction takes the longer the more different values there are.
    x = tl.where(members, x, _NONE)
    same = same_in_rows(x)
    count = bit_count(same) - 1
    most = tl.max(tl.where(members, (count << _HIGH_BITS) | (lane[None, :] << _TOKEN_BITS) | x, -1), axis=1)
    latest = tl.max(tl.where(members, (order << _HIGH_BITS) | (count << _TOKEN_BITS) | x, -1), axis=1)
    is_last = (same.to(tl.uint32, bitcast=True) >> lane.to(tl.uint32)[None, :]) == 1
    tallied = tl.sum(tl.where(members, tl.where(is_last, 1 + _DISTINCT, 1), 0), axis=1)

    # A lane is a vote: the most frequent follower of a level, or the latest one.
    of = (lane >> 1)[None, :] == row[:, None]
    most = tl.sum(tl.where(of, most[:, None], 0), axis=0)
    latest = tl.sum(tl.where(of, latest[:, None], 0), axis=0)
    tallied = tl.sum(tl.where(of, tallied[:, None], 0), axis=0)
    seen = tallied & (_DISTINCT - 1)
    is_second = (lane & 1) == 1
    same_token = ((most ^ latest) & _TOKEN_MASK) == 0
    valid = (seen > 0) & ~(is_second & same_token)
    token = tl.where(is_second, latest, most) & _TOKEN_MASK
    hits = tl.where(is_second, (latest >> _TOKEN_BITS) & 31, most >> _HIGH_BITS) + 1
    in_corpus = lane >= 2 * _TOP_LEVELS
    gap = (lane >> 1) & (_TOP_LEVELS - 1)
    level = tl.maximum(tl.where(in_corpus, corpus_top, own_top) - gap, 0)
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
    guess = hits.to(tl.float32) * weight * length / ((all_ + 1.0) * (length + 1.0))
    guess = tl.where(is_second, tl.maximum(guess, _LATEST_FLOOR), guess)
    source = in_corpus.to(tl.int32)
    fine = ((((source * _LEVELS + level) * _GAPS + gap) * _COUNT_BUCKETS + counts) * _SHARE_BUCKETS + shares) * _KINDS + kind
    coarse = (((source * _LENGTH_BUCKETS + _length_bucket(level)) * _GAPS + gap) * _SHARE_BUCKETS + shares) * _KINDS + kind
    # Cells of what is no vote are cells too: a mask would make these loads wait for one another.
    fine_at = calibration + _FINE_AT + 2 * fine
    coarse_at = calibration + _COARSE_AT + 2 * coarse
    fine_trials = tl.load(fine_at + 1)
    fine_hits = tl.load(fine_at)
    coarse_trials = tl.load(coarse_at + 1)
    coarse_hits = tl.load(coarse_at)
    # The coarse estimate smooths the fine one; as one fraction.
    trials = coarse_trials + _COARSE_WEIGHT
    estimate = fine_hits * trials + _FINE_WEIGHT * (coarse_hits + _COARSE_WEIGHT * guess)
    estimate = _clip(estimate / (trials * (fine_trials + _FINE_WEIGHT)))

    # Estimates are above zero: their bits have their order.
    bits = tl.where(valid, estimate.to(tl.int32, bitcast=True), 0)
    in_own = in_corpus == 0
    token0, own0, corpus0, total0, left = _take(bits, token, in_own, in_corpus, bits)
    token1, own1, corpus1, total1, left = _take(left, token, in_own, in_corpus, bits)
    token2, own2, corpus2, total2, left = _take(left, token, in_own, in_corpus, bits)
    kept = (token0 >= 0).to(tl.int32) + (token1 >= 0).to(tl.int32) + (token2 >= 0).to(tl.int32)

    # Their counts at the two longest levels of both sources, in one sum a level.
    votes = tl.where(x == tl.where(token0 >= 0, token0, _NOTHING), 1, 0)
    votes += tl.where(x == tl.where(token1 >= 0, token1, _NOTHING), 1 << 8, 0)
    votes += tl.where(x == tl.where(token2 >= 0, token2, _NOTHING), 1 << 16, 0)
    votes = tl.sum(tl.where(of, tl.sum(votes, axis=1)[:, None], 0), axis=0)
    blend = tl.zeros_like(mixer) + _ESCAPE_FLOOR
    for below in tl.static_range(2):
        gap_own = own_top - longest + 1 - below
        gap_corpus = corpus_top - longest + 1 - below
        at_own = (lane == 2 * gap_own) & (gap_own >= 0) & (gap_own < _TOP_LEVELS)
        at_corpus = (lane == 2 * (gap_corpus + _TOP_LEVELS)) & (gap_corpus >= 0) & (gap_corpus < _TOP_LEVELS)
        own_all = tl.sum(tl.where(at_own, tallied, 0), axis=0)
        corpus_all = tl.sum(tl.where(at_corpus, tallied, 0), axis=0)
        own_votes = (tl.sum(tl.where(at_own, votes, 0), axis=0) >> (8 * candidate)) & 255
        corpus_votes = (tl.sum(tl.where(at_corpus, votes, 0), axis=0) >> (8 * candidate)) & 255
        scale = tl.max(tl.where(at_corpus, weight.to(tl.int32, bitcast=True), 0), axis=0).to(tl.float32, bitcast=True)
        total_seen = (own_all & (_DISTINCT - 1)).to(tl.float32) + (corpus_all & (_DISTINCT - 1)).to(tl.float32) * scale
        distinct = (own_all // _DISTINCT + corpus_all // _DISTINCT).to(tl.float32)
        followed = own_votes.to(tl.float32) + corpus_votes.to(tl.float32) * scale
        there = total_seen > 0
        blend = tl.where(there, (followed + distinct * blend) / tl.where(there, total_seen + distinct, 1.0), blend)

    # A lane is a feature of a candidate.
    best0 = tl.maximum(own0, corpus0)
    best1 = tl.maximum(own1, corpus1)
    first = _third(candidate, best0, best1, tl.maximum(own2, corpus2))
    second = _third(candidate, tl.minimum(own0, corpus0), tl.minimum(own1, corpus1), tl.minimum(own2, corpus2))
    rival = tl.where(kept > 1, tl.where(candidate == 0, best1, best0), 0.0)
    total = _third(candidate, total0, total1, total2)
    total = tl.minimum(tl.maximum(total / (1.0 + total), _SUM_LEAST), _SUM_MOST)
    blend = _clip(blend)
    value = tl.where(feature == 0, first, tl.where(feature == 1, second, tl.where(feature == 2, rival, 0.0)))
    value = tl.where(feature == 6, total, tl.where(feature == 7, blend, value))
    there = (value > 0) & (candidate < kept)
    value = tl.where(there, _logit(tl.where(there, value, 0.5)) + tl.where((feature == 1) | (feature == 2), 2.0, 0.0), 0.0)
    value = tl.where(feature == 3, 1.0, tl.where(feature == 4, (second > 0).to(tl.float32), value))
    value = tl.where(feature == 5, (rival > 0).to(tl.float32), value)
    score = tl.sum(value * mixer, axis=1)
    probability = _clip(_sigmoid(score))
    place = tl.arange(0, 4)
    ranked = tl.where(place < kept, probability, 0.0)
    highest = tl.max(ranked, axis=0)
    chosen = tl.min(tl.where(ranked == highest, place, 4), axis=0)
    answer = tl.where(kept > 0, _third(chosen, token0, token1, token2), -1)
    origin = _third(chosen, (corpus0 > own0).to(tl.int32), (corpus1 > own1).to(tl.int32), (corpus2 > own2).to(tl.int32))
    if EVIDENCE:
        # The votes without gaps between them.
        there_ = tl.sum(tl.where(valid, 1 << (lane & 15), 0), axis=0)
        slot = bit_count(there_ & ((1 << (lane & 15)) - 1))
        tl.store(ints + _VOTE_TOKENS + slot, token, mask=valid)
        tl.store(ints + _VOTE_CELLS + slot, fine, mask=valid)
        tl.store(ints + _VOTE_COUNT, bit_count(there_))
        tl.store(ints + _WEIGHTS, bucket)
        tl.store(ints + _CANDIDATE_COUNT, kept)
        tl.store(ints + _CANDIDATE_TOKENS + place, _third(place, token0, token1, token2), mask=place < kept)
        tl.store(floats + _PROBABILITIES + place, probability, mask=place < kept)
        tl.store(floats + _FEATURE_VALUES + candidate * _FEATURES + feature, value, mask=candidate < kept)
    return answer, highest, origin, tl.max(tl.where(lane == origin * (2 * _TOP_LEVELS), all_.to(tl.int32), 0), axis=0)


@triton.jit
def refine(calibration: tensor, probability: tensor, survival: tensor) -> tensor:
    """What the likeliest candidate's mixed probability has turned out to be after tokens of that survival (1: none)."""
    side = tl.arange(0, 2)
    at = tl.minimum(tl.maximum(_logit(_clip(probability)) / _SPACING + (_KNOTS - 1) / 2, 0.0), _KNOTS - 1.001)
    knot = at.to(tl.int32)
    above = at - knot.to(tl.float32)
    bucket = 1 + (survival >= 0.3).to(tl.int32) + (survival >= 0.55).to(tl.int32) + (survival >= 0.8).to(tl.int32)
    bucket = tl.where(survival >= 1.0, 0, bucket)
    cell = calibration + _REFINED_AT + 2 * (bucket * _KNOTS + knot + side)
    hits = tl.load(cell)
    trials = tl.load(cell + 1)
    own = _sigmoid(((knot + side).to(tl.float32) - (_KNOTS - 1) / 2) * _SPACING)
    value = (hits + _REFINED_WEIGHT * own) / (trials + _REFINED_WEIGHT)
    return _clip(tl.sum(value * tl.where(side == 1, above, 1.0 - above), axis=0))
