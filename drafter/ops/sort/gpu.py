"""Sorting suffixes to a bounded depth on a GPU: by a 63-bit key of their first tokens, then equal keys by more of the text.

A few at a time by merging sorted runs, a whole text by doubling ranks. Launches depend on sizes alone, so that the host need not wait.
"""

from __future__ import annotations

import torch
import triton

from draftd.drafter.ops.sort.gpu_doubling import join_ranks, keep_wanted, mark_groups, spread_ranks
from draftd.drafter.ops.sort.gpu_runs import merge_runs
from draftd.drafter.ops.sort.gpu_tiles import order_tiles, pack_keys

MAX_VOCABULARY = (1 << 21) - 1
_KEY_BITS = 63
_MIN_TOKEN_BITS, _MAX_TOKEN_BITS = 12, 21
_BLOCK = 512
_LOG_TILE = 6
_MAX_JOINED = 4
"""Ranks that one key may hold."""
_MANY = 1 << 18
"""Up to so many suffixes the launches are what costs, and more runs are merged at a time."""
SCRATCH_BYTES = 53
"""Working memory a suffix, at most; a larger text can be sorted in parts and merged."""


def sort_positions(
    text: torch.Tensor, positions: torch.Tensor, depth: int, vocab_size: int = MAX_VOCABULARY, span: tuple[int, int] | None = None
) -> torch.Tensor:
    """Positions in the order of their suffixes. Does not wait for the device, and can be captured.

    It takes about SCRATCH_BYTES a suffix from torch's allocator until it is done.

    Args:
        text: int32 [t]; tokens below vocab_size and separators (-1), with at least `depth` more elements after the last position.
        positions: int32 [m]; where the suffixes start.
        depth: Tokens of a suffix that count.
        vocab_size: A smaller one lets more tokens into a key.
        span: The lowest position and one more than the highest. If there are many and they are most of what lies between, all of it is
            sorted by doubling: faster, and as fast for any text.

    Returns:
        int32 [m]; equal suffixes in the order of their positions.
    """
    count = positions.shape[0]
    if count == 0:
        return torch.empty_like(positions)
    if span is not None and count >= _MANY and span[1] - span[0] <= 1.5 * count:
        # What follows the last suffix within the depth counts too.
        start, end = span[0], span[1] + depth
        return _of_positions(sort_span(text, start, end, depth), positions, start, end)
    bits = max(_MIN_TOKEN_BITS, vocab_size.bit_length())
    whole = _KEY_BITS // bits
    keys = torch.empty(count, dtype=torch.int64, device=text.device)
    pack_keys[(triton.cdiv(count, _BLOCK),)](text, positions, keys, count, depth, WHOLE=whole, BITS=bits, BLOCK=_BLOCK)
    keys, order = torch.sort(keys)
    suffixes = torch.empty_like(positions)
    order_tiles[(triton.cdiv(count, 1 << _LOG_TILE),)](
        text, positions, keys, order, suffixes, count, depth, WHOLE=whole, BITS=bits, TILE=1 << _LOG_TILE, num_warps=2
    )
    del order
    spare = torch.empty_like(positions)
    log_runs, block = (2, 8) if count <= _MANY else (1, 32)
    for log_width in range(_LOG_TILE, (count - 1).bit_length(), log_runs):
        merge_runs[(triton.cdiv(count, block),)](
            text, keys, suffixes, spare, count, log_width, depth,
            WHOLE=whole, BITS=bits, LOG_RUNS=log_runs, BLOCK=block, CHUNK=4, num_warps=1,
        )  # fmt: skip
        suffixes, spare = spare, suffixes
    return suffixes


def _of_positions(suffixes: torch.Tensor, positions: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """int32 [m]; those of `suffixes`, int64 and counted from `start`, that are among `positions`."""
    wanted = torch.zeros(end - start, dtype=torch.bool, device=positions.device)
    wanted.index_fill_(0, (positions - start).long(), True)
    is_wanted = wanted[suffixes]
    places = torch.cumsum(is_wanted, dim=0, dtype=torch.int32)
    out = torch.empty_like(positions)
    keep_wanted[(triton.cdiv(end - start, _BLOCK),)](suffixes, is_wanted, places, out, end - start, start, BLOCK=_BLOCK)
    return out


def sort_text(text: torch.Tensor, length: int, depth: int, count: int | None = None) -> torch.Tensor:
    """All suffixes of text[:length], in their order.

    Args:
        text: int32 [t]; tokens and separators (-1). A separator is at `length` or just before it, and `depth` more elements follow.
        depth: Tokens of a suffix that count.
        count: Tokens in text[:length]; without it, waits once for the device to count them.

    Returns:
        int32 [count]; positions of tokens, equal suffixes in the order of their positions.
    """
    if count is None:
        count = int((text[:length] >= 0).sum())
    return sort_span(text, 0, length, depth)[length - count :].to(torch.int32)


def sort_span(text: torch.Tensor, start: int, end: int, depth: int) -> torch.Tensor:
    """All elements of text[start:end] in the order of their suffixes: separators first, then tokens.

    Ranks are doubled as by Manber and Myers (1993), with a radix sort of all of them each time: it takes as long for any text.

    Args:
        text, depth: As in sort_text; after `end` there need be no separator, but then the order of the last `depth` elements is not theirs.

    Returns:
        int64 [end - start]; positions counted from `start`, equal suffixes in their order.
    """
    device, length = text.device, end - start
    if length == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    grid = (triton.cdiv(length, _BLOCK),)
    covered = _KEY_BITS // _MAX_TOKEN_BITS
    keys = torch.empty(length, dtype=torch.int64, device=device)
    positions = torch.arange(start, end, dtype=torch.int32, device=device)
    pack_keys[grid](text, positions, keys, length, depth, WHOLE=covered, BITS=_MAX_TOKEN_BITS, BLOCK=_BLOCK)
    del positions
    keys, order = torch.sort(keys, stable=True)
    rank_bits = (2 * length + 1).bit_length()
    joined = min(_KEY_BITS // rank_bits, _MAX_JOINED)
    ranks = torch.zeros(length + depth, dtype=torch.int32, device=device)
    key_bits, of_ranks = _MAX_TOKEN_BITS, False
    while covered < depth:
        groups = torch.empty(length, dtype=torch.int32, device=device)
        mark_groups[grid](keys, groups, length, BLOCK=_BLOCK)
        groups.cumsum_(dim=0)
        spread_ranks[grid](keys, order, groups, ranks, length, BITS=key_bits, OF_RANKS=of_ranks, BLOCK=_BLOCK)
        del order, groups
        join_ranks[grid](ranks, keys, length, covered, depth, COUNT=joined, BITS=rank_bits, BLOCK=_BLOCK)
        keys, order = torch.sort(keys, stable=True)
        covered = min(covered * joined, depth)
        key_bits, of_ranks = rank_bits, True
    return order
