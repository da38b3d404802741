"""Filling an empty index with committed documents at once: one write of the text, one sort, one version with all of it in `main`.

Restoring a corpus document by document would merge it into `main` many times over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from draftd.drafter.documents import LEAD_TOKENS, Documents
from draftd.drafter.index import MAIN, IndexArrays, MainMerge
from draftd.drafter.records import StoredDocument

_SEPARATOR = -1


def load(index: IndexArrays, documents: Documents, newest_first: Iterable[StoredDocument], max_piece: int) -> int:
    """Places as many of the newest documents as the ring holds and publishes them; answers the elements of the ring they take.

    Of several documents of one id the newest is taken. `index` and `documents` must be empty, and known to nobody else yet.

    Args:
        newest_first: Documents with at least one token each, all in the vocabulary.
        max_piece: Most tokens of a piece.
    """
    taken: dict[str, StoredDocument] = {}
    used = 0
    for stored in newest_first:
        if stored.document_id in taken:
            continue
        size = sum(lead + tokens + 2 for _, tokens, _, lead in _cuts(len(stored.tokens), max_piece, index.depth))
        if size > index.ring:
            continue
        if used + size > index.ring:
            break
        used += size
        taken[stored.document_id] = stored
    if not taken:
        return 0
    text = np.full(used, _SEPARATOR, np.int32)
    is_suffix = np.zeros(used, np.bool_)
    at = 0
    for stored in reversed(taken.values()):
        document = documents.restore(stored)
        for offset, tokens, indexed, lead in _cuts(document.length, max_piece, index.depth):
            text[at : at + lead] = stored.tokens[offset - lead : offset]
            at += lead + 1
            text[at : at + tokens] = stored.tokens[offset : offset + tokens]
            is_suffix[at : at + indexed] = True
            documents.reserve(document, offset, at, tokens + 1, indexed, lead + 1)
            at += tokens + 1
    index.write_text(0, text)
    positions = np.flatnonzero(is_suffix).astype(np.int32)
    length = index.merge_main(MainMerge(index.recent_copy(), positions, evict_start=0, evict_size=0, evicted=0))
    index.publish(index.current.with_segment(MAIN, length))
    return used


def _cuts(length: int, max_piece: int, depth: int) -> Iterator[tuple[int, int, int, int]]:
    """The pieces of a document: offset, tokens, how many of them are suffixes, and tokens of lead.

    Each piece but the last overlaps the next by `depth`.
    """
    offset = 0
    while offset < length:
        tokens = min(length - offset, max_piece)
        indexed = tokens if offset + tokens == length else tokens - depth
        yield offset, tokens, indexed, min(offset, LEAD_TOKENS)
        offset += indexed
