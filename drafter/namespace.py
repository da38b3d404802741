"""One namespace of a corpus: its documents, its index, and the lock that both are touched under."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.calibration import Calibration
from draftd.drafter.documents import Document, Documents
from draftd.drafter.index import LIVE, MAIN, RECENT, IndexArrays
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.records import NamespaceInfo
from draftd.drafter.segments import Segments


@dataclass(slots=True)
class Namespace:
    """A namespace.

    Attributes:
        arrivals: When tokens came that are not visible yet, seconds.
        used_at: When a call last named it, seconds.
        told_changes: The calibration's changes of which the keeper has been told; told_at: when, seconds.
    """

    name: str
    vocab_size: int
    fingerprint: str
    index: IndexArrays
    documents: Documents
    segments: Segments
    lock: Lock
    calibration: Calibration
    arrivals: list[float] = field(default_factory=list)
    used_at: float = field(default_factory=time.monotonic)
    told_changes: int = 0
    told_at: float = field(default_factory=time.monotonic)

    def tokens_of(self, document: Document) -> NDArray[np.int32]:
        """int32 [n]; all tokens of a document of which nothing was evicted. Call it under the lock."""
        tokens = np.empty(document.length, np.int32)
        for piece in document.pieces:
            tokens[piece.offset : piece.offset + piece.indexed] = self.index.host_text[piece.start : piece.start + piece.indexed]
        if document.length > document.released:
            tokens[document.released :] = document.tokens(document.released, document.length)
        return tokens

    def agrees(self, document: Document, offset: int, tokens: NDArray[np.int32]) -> bool:
        """Whether a committed document has these tokens at an offset; taken for granted where some were evicted. Call it under the lock."""
        return bool(document.gone) or np.array_equal(self.tokens_of(document)[offset : offset + len(tokens)], tokens)

    def kept(self) -> KeptNamespace:
        """What outlives the index."""
        return KeptNamespace(
            key=self.documents.key,
            name=self.name,
            vocab_size=self.vocab_size,
            fingerprint=self.fingerprint,
            generation=self.documents.generation,
            evict_before=self.segments.evict_before,
            calibration=self.calibration.to_bytes() if self.calibration.changes else self.calibration.start,
        )

    def info(self) -> NamespaceInfo:
        """Its state."""
        with self.lock:
            documents, version = self.documents, self.index.current
            return NamespaceInfo(
                name=self.name,
                vocab_size=self.vocab_size,
                tokenizer_fingerprint=self.fingerprint,
                tokens=documents.tokens_held(),
                quota_tokens=self.index.ring,
                documents=len(documents.committed),
                open_documents=len(documents.open),
                evicted_tokens=documents.evicted_tokens,
                generation=documents.generation,
                version=version.number,
                main=version.lengths[MAIN],
                recent=version.lengths[RECENT],
                live=version.lengths[LIVE],
                bytes=self.index.resident_bytes(),
                deciles=self.calibration.deciles(),
                brier_score=self.calibration.brier_score(),
            )
