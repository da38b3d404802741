"""Probabilities on a GPU: cells of hits and trials, logits, and what a probability has turned out to be after a draft so far."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor
from triton.language.extra import libdevice

from draftd.drafter import policy
from draftd.drafter.ops.warp import INTERPRETED

_REFINED_AT = tl.constexpr(policy.REFINED_AT)
_LEAST = tl.constexpr(policy.LEAST_PROBABLE)
_MOST = tl.constexpr(policy.MOST_PROBABLE)
_KNOTS = tl.constexpr(policy.KNOTS)
_SPACING = tl.constexpr(policy.KNOT_SPACING)
_REFINED_WEIGHT = tl.constexpr(policy.REFINED_WEIGHT)
_INTERPRETED = tl.constexpr(INTERPRETED)

# What the kernel spells out.
assert policy.SURVIVAL_BOUNDS == (0.3, 0.55, 0.8)
assert policy.KNOTS == 33


@triton.jit
def clip(probability: tensor) -> tensor:
    """Within the bounds of every probability."""
    return tl.minimum(tl.maximum(probability, _LEAST), _MOST)


@triton.jit
def ratio(a: tensor, b: tensor) -> tensor:
    """a / b, to some units in the last place: a division that is right takes ten instructions."""
    if _INTERPRETED:
        return a / b
    else:  # noqa: RET505 (decided when compiled)
        return libdevice.fast_dividef(a, b)


@triton.jit
def logit(probability: tensor) -> tensor:
    """The logarithm of the odds."""
    odds = ratio(probability, 1.0 - probability)
    if _INTERPRETED:
        return tl.log(odds)
    else:  # noqa: RET505 (decided when compiled)
        return libdevice.fast_logf(odds)


@triton.jit
def sigmoid(score: tensor) -> tensor:
    """The probability of a logit."""
    return ratio(tl.full([], 1.0, tl.float32), 1.0 + tl.exp(-score))


@triton.jit
def pair(table: tensor, cell: tensor) -> tensor:
    """Hits and trials of cells, read at once."""
    words = tl.load(table.to(tl.pointer_type(tl.int64)) + cell)
    return words.to(tl.int32).to(tl.float32, bitcast=True), (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def knots_after(calibration: tensor, survival: tensor) -> tensor:
    """What probabilities have turned out to be after tokens of that survival (1: none): float32 [32], at each knot and at the next."""
    knot = tl.arange(0, 32)
    bucket = 1 + (survival >= 0.3).to(tl.int32) + (survival >= 0.55).to(tl.int32) + (survival >= 0.8).to(tl.int32)
    bucket = tl.where(survival >= 1.0, 0, bucket)
    hits, trials = pair(calibration + _REFINED_AT, bucket * _KNOTS + knot)
    next_hits, next_trials = pair(calibration + _REFINED_AT, bucket * _KNOTS + knot + 1)
    own = sigmoid((knot.to(tl.float32) - (_KNOTS - 1) / 2) * _SPACING)
    next_own = sigmoid((knot.to(tl.float32) - ((_KNOTS - 1) / 2 - 1)) * _SPACING)
    value = ratio(hits + _REFINED_WEIGHT * own, trials + _REFINED_WEIGHT)
    return value, ratio(next_hits + _REFINED_WEIGHT * next_own, next_trials + _REFINED_WEIGHT)


@triton.jit
def refine(value: tensor, next_value: tensor, probability: tensor) -> tensor:
    """What the likeliest candidate's mixed probability has turned out to be; see knots_after."""
    at = tl.minimum(tl.maximum(logit(clip(probability)) / _SPACING + (_KNOTS - 1) / 2, 0.0), _KNOTS - 1.001)
    knot = at.to(tl.int32)
    above = at - knot.to(tl.float32)
    between = clip(value * (1.0 - above) + next_value * above)
    # Above zero: the bits have the order of the values.
    bits = tl.where(tl.arange(0, 32) == knot, between.to(tl.int32, bitcast=True), 0)
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)
