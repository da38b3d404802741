"""The draft rule `tree`, plainly (arXiv 2411.04975): what every backend must answer, to the last token and count.

For each suffix length of a request's tail and for each source, follow the most frequent continuation while its survival probability
allows it; the best sum of survival probabilities wins, a longer match first on a tie, own tokens before the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from draftd.drafter.drafts import SOURCE_CORPUS, SOURCE_LOCAL, SOURCE_NONE
from draftd.drafter.params import DraftParams

RECENT_LIMIT = 32
"""Corpus counts up to which a tie goes to the most recent occurrence; above, to the smaller token."""

Occurrence = TypeVar("Occurrence")


class Stretch(NamedTuple):
    """A run of corpus text: its tokens, and how many of its positions count as starts of suffixes."""

    tokens: Sequence[int]
    indexed: int


class Place(NamedTuple):
    """An occurrence in the corpus: the stretch, and the position in it. Later is more recent."""

    stretch: int
    position: int


class Chain(NamedTuple):
    """A draft of one suffix: tokens, survival probabilities, and their sum."""

    tokens: list[int]
    probabilities: list[float]
    score: float


@dataclass(frozen=True, slots=True)
class OracleDraft:
    """The winning draft of a row and where it came from."""

    chain: Chain
    source: int
    match_length: int
    occurrences: int


def chain_of(
    occurrences: Sequence[Occurrence],
    token_after: Callable[[Occurrence, int], int | None],
    *,
    extra: int,
    cap: int,
    min_token_prob: float,
    recent_limit: int,
) -> Chain:
    """Follows the most frequent continuation.

    Args:
        occurrences: From the oldest to the most recent.
        token_after: The token that follows an occurrence after `offset` drafted ones; None at the end of its text.
        extra: Occurrences without a continuation that `occurrences` does not list.
        cap: Most tokens.
        min_token_prob: Smallest survival probability.
        recent_limit: Counts above it resolve ties by the smaller token instead of the most recent occurrence.
    """
    prob, score = np.float32(1), np.float32(0)
    tokens: list[int] = []
    probabilities: list[float] = []
    current = list(occurrences)
    total = len(current) + extra
    while len(tokens) < cap:
        following: dict[int, list[int]] = {}
        for i, occurrence in enumerate(current):
            token = token_after(occurrence, len(tokens))
            if token is not None:
                following.setdefault(token, []).append(i)
        if not following:
            break
        most = max(map(len, following.values()))
        tied = [t for t, where in following.items() if len(where) == most]
        best = max(tied, key=lambda t: following[t][-1]) if most <= recent_limit else min(tied)
        prob = prob * (np.float32(most) / np.float32(total))
        if prob < np.float32(min_token_prob):
            break
        tokens.append(best)
        probabilities.append(float(prob))
        score = score + prob
        current = [current[i] for i in following[best]]
        total = len(current)
    return Chain(tokens, probabilities, float(score))


def cap_of(length: int, params: DraftParams) -> int:
    """Most tokens that a match of `length` tokens may give."""
    allowed = int(float(np.float32(length) * np.float32(params.spec_factor) + np.float32(params.spec_offset)) + 1e-6)
    return max(0, min(params.k, allowed, params.max_depth - length))


def local_occurrences(row: Sequence[int], length: int) -> list[int]:
    """End positions of the earlier occurrences of the row's last `length` tokens, oldest first."""
    tail = list(row[len(row) - length :])
    return [end for end in range(length - 1, len(row) - 1) if list(row[end - length + 1 : end + 1]) == tail]


def corpus_occurrences(corpus: Sequence[Stretch], pattern: Sequence[int]) -> list[Place]:
    """Every place where `pattern` begins at an indexed position, oldest first."""
    wanted = list(pattern)
    return [
        Place(s, p)
        for s, stretch in enumerate(corpus)
        for p in range(stretch.indexed)
        if list(stretch.tokens[p : p + len(wanted)]) == wanted
    ]


def local_chain(row: Sequence[int], length: int, params: DraftParams) -> tuple[Chain, int]:
    """The draft of the row's last `length` tokens from the row itself, and their occurrences (the tail itself counts)."""
    occurrences = local_occurrences(row, length)

    def token_after(end: int, offset: int) -> int | None:
        at = end + 1 + offset
        return int(row[at]) if at < len(row) else None

    chain = chain_of(
        occurrences, token_after, extra=1, cap=cap_of(length, params), min_token_prob=params.min_token_prob, recent_limit=len(row)
    )
    return chain, len(occurrences) + 1


def corpus_chain(corpus: Sequence[Stretch], pattern: Sequence[int], params: DraftParams) -> tuple[Chain, int]:
    """The draft of `pattern` from the corpus, and its occurrences."""
    occurrences = corpus_occurrences(corpus, pattern)

    def token_after(place: Place, offset: int) -> int | None:
        text, at = corpus[place.stretch].tokens, place.position + len(pattern) + offset
        return int(text[at]) if at < len(text) else None

    chain = chain_of(
        occurrences,
        token_after,
        extra=0,
        cap=cap_of(len(pattern), params),
        min_token_prob=params.min_token_prob,
        recent_limit=RECENT_LIMIT,
    )
    return chain, len(occurrences)


def propose(row: Sequence[int], corpus: Sequence[Stretch], params: DraftParams) -> OracleDraft:
    """The draft for a row.

    Args:
        row: The request's tokens.
        corpus: The corpus, oldest first.
    """
    best = OracleDraft(Chain([], [], 0.0), SOURCE_NONE, 0, 0)
    for source, wanted in ((SOURCE_LOCAL, params.use_local), (SOURCE_CORPUS, params.use_corpus)):
        own = OracleDraft(Chain([], [], 0.0), source, 0, 0)
        for length in range(1, min(params.max_depth, len(row))) if wanted else ():
            if source == SOURCE_LOCAL:
                chain, count = local_chain(row, length, params)
            else:
                chain, count = corpus_chain(corpus, row[len(row) - length :], params)
            if count == 0:
                break
            if chain.tokens and chain.score >= own.chain.score:
                own = OracleDraft(chain, source, length, count)
        if own.chain.tokens and own.chain.score > best.chain.score:
            best = own
    return best
