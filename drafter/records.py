"""What a corpus takes and answers: rows, documents, the state of a namespace; and the checks on ids and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.errors import InvalidArgument


class Decile(NamedTuple):
    """Drafted tokens whose survival was predicted in one tenth of [0, 1]: how many, the mean prediction, the share accepted."""

    drafted: int
    predicted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """State of a namespace; the fields are those of draftd.v1.Namespace, Segments and Calibration."""

    name: str
    vocab_size: int
    tokenizer_fingerprint: str
    tokens: int
    quota_tokens: int
    documents: int
    open_documents: int
    evicted_tokens: int
    generation: int
    version: int
    main: int
    recent: int
    live: int
    bytes: int
    deciles: tuple[Decile, ...] = ()
    brier_score: float = 0.0


class StoredDocument(NamedTuple):
    """A committed document: its id, int32 tokens, generation, and when it was committed, in microseconds of Unix time."""

    document_id: str
    tokens: NDArray[np.int32]
    generation: int
    committed_us: int = 0


class Comparison(Enum):
    """What a namespace holds under a document's id, compared with some tokens."""

    ABSENT = "absent"
    IN_FLIGHT = "in flight"
    SAME = "same"
    OTHER = "other"


class RowContext(NamedTuple):
    """A row to draft for: int32 tokens (C-contiguous), its namespace, and whether it drafts from its own tokens only."""

    tokens: NDArray[np.int32]
    namespace: str
    private: bool


def check_document_id(document_id: str) -> None:
    """Raises InvalidArgument unless the id has 1 to 128 bytes."""
    size = len(document_id.encode())
    if not 1 <= size <= 128:
        raise InvalidArgument(f"document_id has {size} bytes; it must have 1 to 128", "document_id")


def check_tokens(tokens: NDArray[np.int32], vocab_size: int, field: str = "tokens") -> None:
    """Raises InvalidArgument unless all tokens are in [0, vocab_size)."""
    if len(tokens) == 0:
        return
    # As unsigned numbers negative tokens are above every vocabulary.
    if int(tokens.view(np.uint32).max()) >= vocab_size:
        bad = int(np.flatnonzero(tokens.view(np.uint32) >= vocab_size)[0])
        raise InvalidArgument(f"{field}[{bad}] is {int(tokens[bad])}; it must be in [0, {vocab_size})", f"{field}[{bad}]")
