"""Why a draft is what it is: every matched suffix with its exact counts, what followed it, and the documents that hold it.

For people: it reads whole loci, where drafting only samples them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.drafts import SOURCE_CORPUS, SOURCE_LOCAL, Drafts
from draftd.drafter.index import LIVE, IndexImage
from draftd.drafter.ops.draft.oracle import RECENT_LIMIT, cap_of, chain_of, local_chain, local_occurrences
from draftd.drafter.ops.search.cpu import locus
from draftd.drafter.params import DraftParams
from draftd.drafter.segments import Segments

_MAX_OCCURRENCES = 100_000


class DocumentMatch(NamedTuple):
    """Where a document holds a suffix."""

    document_id: str
    position: int
    generation: int


@dataclass(frozen=True, slots=True)
class MatchInfo:
    """One matched suffix; the fields are those of draftd.v1.SuffixMatch."""

    source: int
    length: int
    occurrences: int
    next_tokens: list[tuple[int, int]]
    distinct_next_tokens: int
    documents: list[DocumentMatch]
    draft: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """All matches, longest first, the draft that they give, and the version of the index."""

    matches: list[MatchInfo]
    drafts: Drafts
    version: int


def explain(
    image: IndexImage, segments: Segments, tokens: NDArray[np.int32], params: DraftParams, limit: int, drafts: Drafts
) -> Explanation:
    """Every matched suffix of `tokens`; valid if the index is still whole for the image's version.

    Args:
        tokens: int32 [n].
        limit: Most next tokens and documents to list a match.
        drafts: The draft of `tokens`.
    """
    matches = []
    longest = min(params.max_depth, len(tokens)) - 1
    for length in range(1, longest + 1):
        if params.use_corpus and (match := _corpus_match(image, segments, tokens, length, params, limit)) is not None:
            matches.append(match)
        if params.use_local and (match := _local_match(tokens, length, params, limit)) is not None:
            matches.append(match)
    matches.sort(key=lambda m: (-m.length, m.source))
    return Explanation(matches, drafts, image.version.number)


class _Hit(NamedTuple):
    """An occurrence: its segment, how recent it is there, and its position."""

    segment: int
    age: int
    position: int


def _corpus_match(
    image: IndexImage, segments: Segments, tokens: NDArray[np.int32], length: int, params: DraftParams, limit: int
) -> MatchInfo | None:
    start = len(tokens) - length
    hits: list[_Hit] = []
    for segment, array in enumerate(image.suffixes):
        text, count = image.live_text if segment == LIVE else image.text, len(array)
        low, high = locus(text, array, 0, count, tokens, start, length)
        for position in array[low:high].tolist():
            age = position if segment == LIVE else (position - image.version.ring_start) % image.ring
            hits.append(_Hit(segment, age, position))
    if not hits:
        return None
    hits.sort()

    def token_after(hit: _Hit, offset: int) -> int | None:
        token = int((image.live_text if hit.segment == LIVE else image.text)[hit.position + length + offset])
        return token if token >= 0 else None

    chain = chain_of(
        hits[-_MAX_OCCURRENCES:], token_after, extra=0, cap=cap_of(length, params), min_token_prob=params.min_token_prob,
        recent_limit=RECENT_LIMIT,
    )  # fmt: skip
    counts = Counter(t for hit in hits if (t := token_after(hit, 0)) is not None)
    documents = list(_documents(image, segments, hits[: -limit - 1 : -1]))
    return MatchInfo(SOURCE_CORPUS, length, len(hits), counts.most_common(limit), len(counts), documents, chain.tokens, chain.score)


def _local_match(tokens: NDArray[np.int32], length: int, params: DraftParams, limit: int) -> MatchInfo | None:
    row = tokens.tolist()
    ends = local_occurrences(row, length)
    if not ends:
        return None
    chain, occurrences = local_chain(row, length, params)
    counts = Counter(row[end + 1] for end in ends)
    return MatchInfo(SOURCE_LOCAL, length, occurrences, counts.most_common(limit), len(counts), [], chain.tokens, chain.score)


def _documents(image: IndexImage, segments: Segments, hits: list[_Hit]) -> Iterator[DocumentMatch]:
    """The documents behind hits; pieces lie in the ring in their order, so their start tells which one it is."""
    pieces = list(segments.documents.pieces)
    starts = [(p.start - image.version.ring_start) % image.ring for p in pieces]
    spans = segments.live_spans.get(image.version.number, [])
    span_starts = [s.start for s in spans]
    for hit in hits:
        if hit.segment == LIVE:
            span = spans[bisect_right(span_starts, hit.position) - 1]
            yield DocumentMatch(span.document.id, span.offset + hit.position - span.start, span.document.generation)
        else:
            piece = pieces[bisect_right(starts, hit.age) - 1]
            yield DocumentMatch(piece.document.id, piece.offset + hit.position - piece.start, piece.document.generation)
