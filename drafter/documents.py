"""The documents of one namespace: what is open, what is committed, and where each one's text lies in the ring.

Ingest is idempotent by document id and offset. Nothing here touches shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.errors import FailedPrecondition, InvalidArgument, NotFound
from draftd.drafter.keeper import Keeper, UniqueClock
from draftd.drafter.records import StoredDocument

NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
LEAD_TOKENS = 8
"""Tokens before a stretch of a document that are kept beside it, so that what follows its first tokens has some context."""


@dataclass(frozen=True, slots=True)
class IngestResult:
    """What was kept of a document: new tokens, tokens in all, and whether it is committed."""

    kept_tokens: int
    total_tokens: int
    committed: bool


@dataclass(slots=True)
class Document:
    """One request's output.

    Attributes:
        placed: Tokens whose suffixes are in the ring's segments; the rest is in `live`.
        buffer: int32 [capacity]; its tokens, until all are placed.
        lead: int32 [<= LEAD_TOKENS]; what stands before its first token that is not placed: the end of the prompt, or of what is placed.
        length: Tokens in all.
        released: Tokens that have left the buffer; the ring has them.
        gone: Tokens that were evicted.
        pieces: Its pieces in the ring, oldest first.
        committed_us: When it was committed, on the corpus's UniqueClock; 0 while it is open.
    """

    id: str
    owner: str
    generation: int
    buffer: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    lead: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    length: int = 0
    placed: int = 0
    released: int = 0
    gone: int = 0
    committed: bool = False
    pieces: tuple[Piece, ...] = ()
    committed_us: int = 0

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Adds tokens at the end."""
        need = self.length - self.released + len(tokens)
        if need > len(self.buffer):
            grown = np.empty(max(need, 2 * len(self.buffer), 64), np.int32)
            grown[: self.length - self.released] = self.buffer[: self.length - self.released]
            self.buffer = grown
        self.buffer[self.length - self.released : need] = tokens
        self.length += len(tokens)

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """int32 [stop - start]; tokens that are still in the buffer (start >= released)."""
        return self.buffer[start - self.released : stop - self.released]

    def lead_of(self, offset: int) -> NDArray[np.int32]:
        """int32 [<= LEAD_TOKENS]; what stands before a token that is not placed."""
        return self.lead if offset == self.placed else self.tokens(max(self.placed, offset - LEAD_TOKENS), offset)

    def release(self, keep_from: int) -> None:
        """Drops the buffer's tokens before `keep_from`."""
        if keep_from == self.length and self.committed:
            self.buffer, self.released = NO_TOKENS, keep_from
        elif keep_from > self.released:
            self.buffer = self.buffer[keep_from - self.released : self.length - self.released].copy()
            self.released = keep_from


@dataclass(slots=True)
class Piece:
    """A stretch of a document in the ring: its text from `offset` on, of which the first `indexed` suffixes belong to it.

    Before `start` are `lead` elements more: what stands before the text in its document, and a separator. No suffix starts there.
    """

    document: Document
    offset: int
    start: int
    size: int
    indexed: int
    lead: int


class Documents:
    """Open and committed documents of one namespace, in the order of their arrival.

    Attributes:
        pending: Documents with tokens that are not placed yet, by id, oldest first.
        pieces: The ring's pieces, oldest first.

    Args:
        key: The namespace's, for the keeper.
        keeper: Told of every document that is committed, and of every committed one that has been evicted.
    """

    def __init__(self, key: int = 0, clock: UniqueClock | None = None, keeper: Keeper | None = None) -> None:
        self.key = key
        self.generation = 0
        self._clock = clock or UniqueClock()
        self._keeper = keeper
        self.open: dict[str, Document] = {}
        self.committed: dict[str, Document] = {}
        self.pending: dict[str, Document] = {}
        self.pieces: deque[Piece] = deque()
        self.changed = 0
        self.indexed_tokens = 0
        self.evicted_tokens = 0

    def ingest(
        self,
        document_id: str,
        offset: int,
        tokens: NDArray[np.int32],
        complete: bool,
        owner: str,
        generation: int | None = None,
        lead: NDArray[np.int32] = NO_TOKENS,
    ) -> IngestResult:
        """Adds tokens to a document, which is opened at offset 0, in `generation` or the current one, with what stands before it.

        Raises:
            InvalidArgument: A gap before `offset`.
            FailedPrecondition: The document is committed and the tokens are not in it, they differ from what is held, or another
                attachment has opened it.
        """
        done = self.committed.get(document_id)
        if done is not None:
            if offset + len(tokens) > done.length:
                raise FailedPrecondition(
                    f"document_id {document_id!r} is committed with {done.length} tokens; nothing can be appended", "document_id"
                )
            return IngestResult(0, done.length, True)
        document = self.open.get(document_id)
        if document is None:
            if offset != 0:
                raise InvalidArgument(f"offset is {offset}; document_id {document_id!r} is not known, so it must be 0", "offset")
            document = Document(document_id, owner, self.generation if generation is None else generation)
            self.open[document_id] = document
        elif document.owner != owner:
            raise FailedPrecondition(f"document_id {document_id!r} was opened by another attachment", "document_id")
        if len(lead) and not document.length:
            document.lead = lead[-LEAD_TOKENS:].copy()
        if offset > document.length:
            raise InvalidArgument(
                f"offset is {offset}; document_id {document_id!r} holds {document.length} tokens, so it must be at most that", "offset"
            )
        known = document.length - offset
        first = max(offset, document.released)
        overlap = tokens[first - offset : known]
        if len(overlap) and not np.array_equal(overlap, document.tokens(first, first + len(overlap))):
            raise FailedPrecondition(f"tokens sent again for document_id {document_id!r} differ from those held", "tokens")
        new = tokens[known:] if known < len(tokens) else tokens[:0]
        if len(new):
            document.append(new)
            self.pending[document_id] = document
            self.changed += 1
        if complete:
            self.commit(document_id, owner)
        return IngestResult(len(new), document.length, complete)

    def commit(self, document_id: str, owner: str) -> IngestResult:
        """Closes an open document; a committed one stays as it is.

        Raises:
            NotFound: There is no such document.
            FailedPrecondition: Another attachment has opened it.
        """
        if document_id in self.committed:
            return IngestResult(0, self.committed[document_id].length, True)
        document = self._owned(document_id, owner)
        del self.open[document_id]
        document.committed = True
        if document.length:
            document.committed_us = self._clock.now_us()
            self.committed[document_id] = document
            if self._keeper is not None:
                self._keeper.committed(self.key, document)
            if document.placed < document.length:
                self.pending[document_id] = document
        self.changed += 1
        return IngestResult(0, document.length, True)

    def discard(self, document_id: str, owner: str) -> IngestResult:
        """Forgets an open document's tokens that are not placed yet, and takes no more.

        Raises:
            NotFound: There is no such open document.
            FailedPrecondition: Another attachment has opened it.
        """
        self._owned(document_id, owner)
        del self.open[document_id]
        self.pending.pop(document_id, None)
        self.changed += 1
        return IngestResult(0, 0, False)

    def _owned(self, document_id: str, owner: str) -> Document:
        document = self.open.get(document_id)
        if document is None:
            raise NotFound(f"document_id {document_id!r} does not exist", "document_id")
        if document.owner != owner:
            raise FailedPrecondition(f"document_id {document_id!r} was opened by another attachment", "document_id")
        return document

    def owned_by(self, owner: str) -> list[str]:
        """Ids of the open documents of an attachment."""
        return [d.id for d in self.open.values() if d.owner == owner]

    def reserve(self, document: Document, offset: int, start: int, size: int, indexed: int, lead: int) -> Piece:
        """Notes that the ring holds `size` elements of text (separator included) of the document from `offset` on, `lead` before them."""
        piece = Piece(document, offset, start, size, indexed, lead)
        self.pieces.append(piece)
        document.pieces += (piece,)
        return piece

    def take_back(self, pieces: list[Piece]) -> None:
        """Undoes `reserve` for the newest pieces, given in their order."""
        for piece in reversed(pieces):
            assert self.pieces.pop() is piece
            piece.document.pieces = piece.document.pieces[:-1]

    def place(self, piece: Piece) -> None:
        """Notes that the piece's suffixes are in the ring's segments."""
        document = piece.document
        self.indexed_tokens += piece.indexed
        placed = piece.offset + piece.indexed
        document.lead = document.tokens(max(document.released, placed - LEAD_TOKENS), placed).copy()
        document.placed = placed
        document.release(document.placed)
        if document.committed and document.placed == document.length:
            self.pending.pop(document.id, None)

    def evict(self, piece: Piece) -> None:
        """Notes that the oldest piece has left the index."""
        document = piece.document
        document.pieces = document.pieces[1:]
        document.gone += piece.indexed
        self.indexed_tokens -= piece.indexed
        self.evicted_tokens += piece.indexed
        if document.committed and document.gone == document.length and self.committed.get(document.id) is document:
            self._forget(document)

    def give_up(self, document: Document) -> None:
        """Evicts the rest of a committed document that is not placed yet."""
        rest = document.length - document.placed
        document.gone += rest
        self.evicted_tokens += rest
        del self.pending[document.id]
        if document.gone == document.length:
            self._forget(document)

    def _forget(self, document: Document) -> None:
        del self.committed[document.id]
        if self._keeper is not None:
            self._keeper.evicted(self.key, document)

    def restore(self, stored: StoredDocument) -> Document:
        """Takes back a committed document whose pieces are about to be reserved; the keeper knows it."""
        length = len(stored.tokens)
        document = Document(stored.document_id, "", stored.generation, length=length, placed=length, released=length, committed=True)
        document.committed_us = stored.committed_us
        self.committed[document.id] = document
        self.indexed_tokens += length
        return document

    def tokens_held(self) -> int:
        """Tokens that are indexed or about to be."""
        return self.indexed_tokens + sum(d.length - d.placed for d in self.pending.values())

    def complete(self) -> Iterator[Document]:
        """Committed documents of which nothing was evicted, oldest first."""
        return (d for d in self.committed.values() if d.gone == 0)
