"""The engine's requests as its client knows them: every token of every row, kept so that a new service can be told all of it again.

The decode thread writes; the background threads read under `lock`. Nothing here talks to the service.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftd.drafter.errors import FailedPrecondition, InvalidArgument
from draftd.drafter.groups import check_group
from draftd.drafter.layout import MAX_DOCUMENT_ID_BYTES
from draftd.drafter.rows import put_tokens


def is_row(row: object, rows: int) -> bool:
    """Whether this is one of so many rows."""
    return isinstance(row, int | np.integer) and not isinstance(row, bool) and 0 <= int(row) < rows


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        document_id: Its id, 1 to 128 bytes.
        namespace: What it may draft from and is kept in.
        private: It drafts from its own tokens only, and the service never hears of it.
        prompt_length: Leading tokens that are the prompt.
        group: What requests that sample the same prompt share; empty for none.
        kept_as: Id of the document that its output becomes part of at the service.
        kept_from: Tokens of the row before that document's first one.
        published: It is in a slot that the service reads; nothing needs to be sent.
        row_held: Tokens of the row that the service is known to hold, prompt counted.
        document_held: Tokens of the row whose output is known to have reached the corpus, prompt counted.
        visible: Tokens of the row whose output is known to be visible to others, prompt counted.
        refusals: Times in a row that the service refused a batch because of it.
        given_up: The service refused it again and again; it drafts from its own tokens until there is another service.
    """

    document_id: str
    namespace: str
    private: bool
    prompt_length: int
    group: str = ""
    kept_as: str = ""
    kept_from: int = 0
    published: bool = False
    row_held: int = 0
    document_held: int = 0
    visible: int = 0
    refusals: int = 0
    reopened: int = 0
    given_up: bool = False

    def __post_init__(self) -> None:
        self.forget()

    @property
    def shared(self) -> bool:
        """The service may, and does, hear of it."""
        return not self.private and not self.given_up

    def forget(self) -> None:
        """A service that knows nothing of it begins with its first token."""
        self.refusals = 0
        self._begin(self.document_id, self.prompt_length)

    def reopen(self) -> None:
        """A service that may have closed its document gets what it is not known to have as a further document.

        It may have taken more than it said; that is then there twice, which is better than not at all.
        """
        self.reopened += 1
        suffix = f"~{self.reopened}"
        kept_as = self.document_id.encode()[: MAX_DOCUMENT_ID_BYTES - len(suffix)].decode(errors="ignore") + suffix
        self._begin(kept_as, self.document_held)

    def _begin(self, kept_as: str, kept_from: int) -> None:
        self.kept_as = kept_as
        self.kept_from = self.document_held = self.visible = kept_from
        self.row_held = 0
        self.published = self.given_up = False


@dataclass(slots=True)
class Parked:
    """A preempted request: its tokens, int32 [n]."""

    request: Request
    tokens: NDArray[np.int32]


@dataclass(slots=True)
class RowTable:
    """All rows of an engine.

    Attributes:
        tokens: int32 [max_rows, max_length], C-contiguous.
        lengths: int32 [max_rows]; tokens of each row.
        vocab_size: Tokens are in [0, vocab_size).
        requests: The request in each row, or None.
        parked: Preempted requests by document id.
        lock: Held while rows change, and while a background thread copies from them.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    vocab_size: int
    requests: list[Request | None] = field(default_factory=list)
    parked: dict[str, Parked] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.requests = [None] * self.max_rows

    @property
    def max_rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def max_length(self) -> int:
        """Longest row, in tokens."""
        return int(self.tokens.shape[1])

    def check_row(self, row: int) -> int:
        """The row's index; InvalidArgument if there is no such row."""
        if not is_row(row, self.max_rows):
            raise InvalidArgument(f"row is {row!r}; it must be an integer in [0, {self.max_rows})", "row")
        return int(row)

    def started(self, row: int) -> Request:
        """The request in a row; FailedPrecondition if there is none."""
        request = self.requests[self.check_row(row)]
        if request is None:
            raise FailedPrecondition(f"row {row} has no request; start one first", "row")
        return request

    def check_tokens(self, tokens: ArrayLike) -> NDArray[np.int32]:
        """Tokens as int32 [n]; InvalidArgument if they are not integers in the vocabulary."""
        given: NDArray[Any] = np.asarray(tokens)
        if given.ndim != 1:
            raise InvalidArgument(f"tokens has {given.ndim} dimensions; it must have 1", "tokens")
        if len(given) == 0:
            return np.empty(0, np.int32)
        if given.dtype.kind not in "iu":
            raise InvalidArgument(f"tokens are {given.dtype}; they must be integers", "tokens")
        # Negative tokens are the largest unsigned ones: one pass over short arrays is what this costs.
        if int(np.ascontiguousarray(given, np.int64).view(np.uint64).max()) >= self.vocab_size:
            wrong = next(int(token) for token in given if not 0 <= token < self.vocab_size)
            raise InvalidArgument(f"tokens has {wrong}; they must be in [0, {self.vocab_size})", "tokens")
        return given.astype(np.int32, copy=False)

    def check_request(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """InvalidArgument if the request cannot start with these tokens."""
        if not 1 <= len(request.document_id.encode()) <= MAX_DOCUMENT_ID_BYTES:
            raise InvalidArgument(f"document_id must have 1 to {MAX_DOCUMENT_ID_BYTES} bytes", "document_id")
        check_group(request.group)
        if not 0 <= request.prompt_length <= len(tokens):
            raise InvalidArgument(
                f"prompt_length is {request.prompt_length}; it must be in [0, {len(tokens)}], the tokens given", "prompt_length"
            )
        self.check_length(len(tokens))

    def check_length(self, length: int) -> None:
        """InvalidArgument if a row cannot have so many tokens."""
        if length > self.max_length:
            raise InvalidArgument(f"the row would have {length} tokens; max_length is {self.max_length}", "tokens")

    def put(self, row: int, request: Request, tokens: NDArray[np.int32]) -> None:
        """Fills a row."""
        with self.lock:
            self.tokens[row, : len(tokens)] = tokens
            self.lengths[row] = len(tokens)
            self.requests[row] = request

    def extend(self, row: int, tokens: NDArray[np.int32]) -> None:
        """Adds tokens to a row in which they fit."""
        with self.lock:
            length = int(self.lengths[row])
            self.tokens[row, length : length + len(tokens)] = tokens
            self.lengths[row] = length + len(tokens)

    def fits(self, rows: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> bool:
        """Whether `extend_rows` may be called with these: distinct rows with requests, tokens of the vocabulary that fit."""
        if not len(rows) or rows.min() < 0 or rows.max() >= self.max_rows or len(set(rows.tolist())) < len(rows):
            return False
        if counts.min() < 0 or counts.max() > tokens.shape[1] or not all(self.requests[row] for row in rows.tolist()):
            return False
        if (self.lengths[rows] + counts).max() > self.max_length:
            return False
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        return not (wrong & (np.arange(tokens.shape[1]) < counts[:, None])).any()

    def extend_rows(self, rows: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Adds the first counts[i] of tokens[i] to row rows[i]: int64 [n], int32 [n, w], int64 [n]; see `fits`."""
        with self.lock:
            put_tokens(self.tokens, rows, self.lengths[rows].astype(np.int64), tokens, counts)
            self.lengths[rows] += counts.astype(np.int32)

    def clear(self, row: int) -> None:
        """Empties a row."""
        with self.lock:
            self.requests[row] = None
            self.lengths[row] = 0

    def row_tokens(self, row: int) -> NDArray[np.int32]:
        """int32 [n]; a view of a row's tokens."""
        return self.tokens[row, : self.lengths[row]]

    def row_of(self, document_id: str) -> int | None:
        """The row that a document's request is in."""
        return next((row for row, request in enumerate(self.requests) if request and request.document_id == document_id), None)

    def shared(self) -> Iterator[tuple[Request, NDArray[np.int32]]]:
        """Every shared request in flight, with a view of its tokens; hold `lock` on a background thread."""
        for row, request in enumerate(self.requests):
            if request is not None and request.shared:
                yield request, self.row_tokens(row)
        for parked in self.parked.values():
            if parked.request.shared:
                yield parked.request, parked.tokens
