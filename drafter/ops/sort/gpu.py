"""Sorting suffixes to a bounded depth on a GPU: three tokens make one 63-bit key, then ranks are doubled where keys were equal.

Ranks are doubled as in Larsson and Sadakane, "Faster suffix sorting" (2007): only suffixes that are not told apart yet are touched again.
"""

from __future__ import annotations

import torch

_KEY_TOKENS = 3
_TOKEN_BITS = 21


def first_keys(text: torch.Tensor, positions: torch.Tensor, depth: int) -> torch.Tensor:
    """int64 [m]; the first three tokens of each suffix, zero from its separator on.

    Args:
        text: int32 [t]; positions: integer [m].
    """
    key = torch.zeros(positions.shape, dtype=torch.int64, device=text.device)
    alive = torch.ones(positions.shape, dtype=torch.bool, device=text.device)
    for j in range(_KEY_TOKENS):
        token = text[positions + j]
        alive = alive & (token >= 0) if j < depth else torch.zeros_like(alive)
        key = (key << _TOKEN_BITS) | torch.where(alive, token.to(torch.int64) + 1, 0)
    return key


def _group_starts(is_first: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """For each element the index of its group's first one."""
    return torch.cummax(torch.where(is_first, index, 0), dim=0).values


def sort_text(text: torch.Tensor, length: int, depth: int) -> torch.Tensor:
    """All suffixes of text[:length], in their order.

    Waits for the device a few times.

    Args:
        text: int32 [t]; tokens and separators (-1). A separator is at `length` or just before it, and `depth` more elements follow.
        depth: Tokens of a suffix that count.

    Returns:
        int32 [m]; positions of tokens, equal suffixes in the order of their positions.
    """
    device = text.device
    is_token = text[:length] >= 0
    positions = is_token.nonzero().squeeze(1)
    count = positions.shape[0]
    if count == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    separators = (text[: length + 1] < 0).nonzero().squeeze(1)
    keys, order = torch.sort(first_keys(text, positions, depth), stable=True)
    suffixes = positions[order]
    index = torch.arange(count, device=device)
    is_first = torch.ones(count, dtype=torch.bool, device=device)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:])
    # Rank of each position by its first `sorted_depth` tokens; 0 is left for what comes after a document's end.
    rank = torch.zeros(length + depth + 1, dtype=torch.int32, device=device)
    rank[suffixes] = (_group_starts(is_first, index) + 1).to(torch.int32)
    del keys, order
    # Elements that are not told apart yet: their index, in rising order; equal ones are neighbours.
    open_ = _not_alone(is_first)
    sorted_depth = min(_KEY_TOKENS, depth)
    while sorted_depth < depth and open_.shape[0] > 0:
        step = min(sorted_depth, depth - sorted_depth)
        at = suffixes[open_]
        rest = separators[torch.searchsorted(separators, at)] - at
        # Suffixes that ended before are equal as a whole group.
        more = rest >= sorted_depth
        open_, at = open_[more], at[more]
        if open_.shape[0] == 0:
            break
        group = rank[at].to(torch.int64)
        key = (group << 32) | rank[at + step].to(torch.int64)
        key, order = torch.sort(key, stable=True)
        at = at[order]
        suffixes[open_] = at
        first = torch.ones(open_.shape[0], dtype=torch.bool, device=device)
        torch.ne(key[1:], key[:-1], out=first[1:])
        rank[at] = (_group_starts(first, open_) + 1).to(torch.int32)
        open_ = open_[_not_alone(first)]
        sorted_depth += step
    return suffixes.to(torch.int32)


def _not_alone(is_first: torch.Tensor) -> torch.Tensor:
    """int64 [m]; indices of elements whose group has others."""
    alone = is_first.clone()
    alone[:-1] &= is_first[1:]
    return (~alone).nonzero().squeeze(1)
