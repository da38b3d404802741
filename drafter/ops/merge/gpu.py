"""Merging sorted suffixes into a suffix array on a GPU: ranks by search, then one streaming pass that leaves evicted ones out.

Nothing waits for the host, so that a merge can run on a side stream; lengths are known beforehand from what is merged and evicted.
"""

from __future__ import annotations

import torch
import triton

from draftd.drafter.device_layout import SIGN_STRIDE
from draftd.drafter.ops.merge.gpu_places import count_kept, place_new, place_old
from draftd.drafter.ops.merge.gpu_ranks import find_buckets, find_ranks
from draftd.drafter.ops.merge.gpu_signs import write_signs

_SEARCHES = 32
"""New suffixes that a program searches for; one warp."""
_GROUP = 256
_BLOCK = 1024


def merge(
    text: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    out: torch.Tensor,
    *,
    depth: int,
    buckets: torch.Tensor | None = None,
    shift: int = 0,
    evict_start: int = 0,
    evict_length: int = 0,
    ring: int = 1,
) -> None:
    """Writes the merge of `old` and `new` to `out`. Does not wait for the device, and can be captured.

    It takes 4 bytes for each new suffix and at most 1/50 of `old` from torch's allocator.

    Args:
        text: int32 [t]; tokens and separators (-1).
        old: int32 [n]; sorted positions. Those in the ring segment of `evict_length` tokens from `evict_start` are left out.
        new: int32 [m]; sorted positions, none of them evicted.
        out: int32 [>= what is kept]; must not overlap the inputs.
        depth: Tokens of a suffix that count.
        buckets: int32; the first-token table of `old`, with its shift; makes the search shorter.
        ring: Size of the ring of text, in tokens; positions are in [0, ring).
    """
    n, m = old.shape[0], new.shape[0]
    if n == 0:
        out[:m].copy_(new)
        return
    if m == 0 and evict_length == 0:
        out[:n].copy_(old)
        return
    device = text.device
    evict = (evict_start, evict_length, ring)
    ranks = torch.empty(m, dtype=torch.int32, device=device)
    if m:
        find_ranks[(triton.cdiv(m, _SEARCHES),)](
            text, old, new, old if buckets is None else buckets, ranks, out, n, m, shift, n.bit_length(), depth,
            NARROW=buckets is not None, PLACE=evict_length == 0, BLOCK=_SEARCHES, CHUNK=4, num_warps=1,
        )  # fmt: skip
    kept_before = ranks
    if evict_length:
        groups = triton.cdiv(n, _GROUP)
        counts = torch.empty(groups + 1, dtype=torch.int32, device=device)
        count_kept[(triton.cdiv(groups, 8),)](old, counts, n, *evict, GROUP=_GROUP, GROUPS=8)
        kept_before = torch.cumsum(counts, dim=0, dtype=torch.int32)
        if m:
            place_new[(triton.cdiv(m, 8),)](old, new, ranks, kept_before, out, n, m, *evict, GROUP=_GROUP, BLOCK=8)
    blocks = triton.cdiv(n, _BLOCK)
    edges = torch.arange(0, (blocks + 1) * _BLOCK, _BLOCK, dtype=torch.int32, device=device)
    new_before = torch.searchsorted(ranks, edges, out_int32=True)
    place_old[(blocks,)](old, ranks, new_before, kept_before, out, n, *evict, EVICT=evict_length > 0, GROUP=_GROUP, BLOCK=_BLOCK)


def fill_signs(text: torch.Tensor, suffixes: torch.Tensor, signs: torch.Tensor) -> None:
    """Fills signs[i] with the first tokens of suffix i * SIGN_STRIDE.

    Args:
        suffixes: int32 [n]; sorted positions.
        signs: int64 [>= ceil(n / SIGN_STRIDE)]; out.
    """
    n = suffixes.shape[0]
    if n:
        write_signs[(triton.cdiv(n, SIGN_STRIDE * 128),)](text, suffixes, signs, n, BLOCK=128, num_warps=4)


def fill_buckets(text: torch.Tensor, suffixes: torch.Tensor, shift: int, buckets: torch.Tensor) -> None:
    """Fills buckets[b] with the first suffix whose first token is at least b << shift; the last one is the number of suffixes.

    Args:
        suffixes: int32 [n]; sorted positions.
        buckets: int32 [buckets + 1]; out.
    """
    n, size = suffixes.shape[0], buckets.shape[0]
    find_buckets[(triton.cdiv(size, 128),)](text, suffixes, buckets, n, size, shift, n.bit_length(), BLOCK=128)
