"""Sorting suffixes to a bounded depth on a GPU: by a 63-bit key of their first tokens, then equal keys by merging sorted runs.

A merge sort by comparisons, but only where keys are equal. Nothing waits for the host, and launches depend on sizes alone.
"""

from __future__ import annotations

import torch
import triton

from draftd.drafter.ops.sort.gpu_runs import merge_runs
from draftd.drafter.ops.sort.gpu_tiles import order_tiles, pack_keys

MAX_VOCABULARY = (1 << 21) - 1
_KEY_BITS = 63
_MIN_TOKEN_BITS = 12
_LOG_TILE = 5
_FEW = 1 << 20
"""Up to so many suffixes launches are what costs, and more runs are merged at once."""


def sort_positions(text: torch.Tensor, positions: torch.Tensor, depth: int, vocab_size: int = MAX_VOCABULARY) -> torch.Tensor:
    """Positions in the order of their suffixes. Does not wait for the device, and can be captured.

    While it sorts by keys it takes about 50 bytes a suffix from torch's allocator, then 24 until it is done.

    Args:
        text: int32 [t]; tokens below vocab_size and separators (-1), with at least `depth` more elements after the last position.
        positions: int32 [m]; where the suffixes start.
        depth: Tokens of a suffix that count.
        vocab_size: A smaller one lets more tokens into a key.

    Returns:
        int32 [m]; equal suffixes in the order of their positions.
    """
    count = positions.shape[0]
    if count == 0:
        return torch.empty_like(positions)
    bits = max(_MIN_TOKEN_BITS, vocab_size.bit_length())
    whole = _KEY_BITS // bits
    keys = torch.empty(count, dtype=torch.int64, device=text.device)
    pack_keys[(triton.cdiv(count, 512),)](text, positions, keys, count, depth, WHOLE=whole, BITS=bits, BLOCK=512)
    keys, order = torch.sort(keys)
    suffixes = torch.empty_like(positions)
    order_tiles[(triton.cdiv(count, 1 << _LOG_TILE),)](
        text, positions, keys, order, suffixes, count, depth, WHOLE=whole, BITS=bits, TILE=1 << _LOG_TILE, num_warps=1
    )
    del order
    log_width = _LOG_TILE
    log_runs = 2 if count <= _FEW else 1
    spare = torch.empty_like(positions)
    while count > 1 << log_width:
        block = 32 if log_width < 10 else 128
        merge_runs[(triton.cdiv(count, block),)](
            text, keys, suffixes, spare, count, log_width, depth,
            WHOLE=whole, BITS=bits, LOG_RUNS=log_runs, BLOCK=block, CHUNK=4, num_warps=1,
        )  # fmt: skip
        suffixes, spare = spare, suffixes
        log_width += log_runs
    return suffixes


def sort_text(text: torch.Tensor, length: int, depth: int, vocab_size: int = MAX_VOCABULARY) -> torch.Tensor:
    """All suffixes of text[:length], in their order. Waits for the device once, to learn how many there are.

    Args:
        text: int32 [t]; tokens and separators (-1). A separator is at `length` or just before it, and `depth` more elements follow.
        depth: Tokens of a suffix that count.

    Returns:
        int32 [m]; positions of tokens, equal suffixes in the order of their positions.
    """
    return sort_positions(text, (text[:length] >= 0).nonzero().squeeze(1).to(torch.int32), depth, vocab_size)
