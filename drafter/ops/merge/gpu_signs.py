"""Signs along a suffix array on a GPU: the first tokens of every SIGN_STRIDE-th suffix, packed so that they compare as the suffixes do."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import SIGN_BITS, SIGN_STRIDE

_BITS = tl.constexpr(SIGN_BITS)
_MOST = tl.constexpr((1 << SIGN_BITS) - 1)
_STRIDE = tl.constexpr(SIGN_STRIDE)


@triton.jit
def sign_part(token: tensor) -> tensor:
    """A token's part of a sign: separators and what is below are 0, what no vocabulary has is the largest."""
    return tl.minimum(tl.maximum(token, -1) + 1, _MOST).to(tl.int64)


@triton.jit(do_not_specialize=["n"])
def write_signs(text: tensor, suffixes: tensor, signs: tensor, n: tensor, BLOCK: tl.constexpr) -> None:
    """Programs (block of signs).

    Args:
        text: int32; suffixes: int32 [n]; signs: int64 [ceil(n / SIGN_STRIDE)]; out.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < (n + _STRIDE - 1) // _STRIDE
    at = tl.load(suffixes + i.to(tl.int64) * _STRIDE, mask=inside, other=0)
    first = sign_part(tl.load(text + at, mask=inside, other=-1))
    second = sign_part(tl.load(text + at + 1, mask=inside & (first > 0), other=-1))
    third = sign_part(tl.load(text + at + 2, mask=inside & (second > 0), other=-1))
    tl.store(signs + i, (first << (2 * _BITS)) | (second << _BITS) | third, mask=inside)
