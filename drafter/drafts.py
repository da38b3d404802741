"""The result of drafting for a batch of rows, as arrays; the same on every transport and backend."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

SOURCE_NONE = 0
SOURCE_LOCAL = 1
SOURCE_CORPUS = 2


@dataclass(slots=True)
class Drafts:
    """Drafts of n rows with at most k tokens each.

    Attributes:
        tokens: int32 [n, k]; unused slots are -1.
        probabilities: float32 [n, k]; survival probability of each token, never rising along a row; unused slots are 0.
        counts: int32 [n]; tokens drafted.
        source: int32 [n]; 0 none, 1 the row's own tokens, 2 the corpus.
        match_length: int32 [n]; tokens of the matched suffix, 0 without a draft.
        occurrences: int32 [n]; occurrences of the matched suffix in its source, 0 without a draft.
        version: int64 [n]; version of the index the row was drafted from, 0 if none was read.
    """

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    counts: NDArray[np.int32]
    source: NDArray[np.int32]
    match_length: NDArray[np.int32]
    occurrences: NDArray[np.int32]
    version: NDArray[np.int64]

    @staticmethod
    def empty(n: int, k: int) -> Drafts:
        """Drafts of n rows without any token."""
        drafts = Drafts.unset(n, k)
        drafts.tokens[:] = -1
        for array in (drafts.probabilities, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences):
            array[:] = 0
        return drafts

    @staticmethod
    def unset(n: int, k: int) -> Drafts:
        """Drafts of n rows for a kernel to fill: all but `version` hold anything."""
        return Drafts(
            tokens=np.empty((n, k), np.int32),
            probabilities=np.empty((n, k), np.float32),
            counts=np.empty(n, np.int32),
            source=np.empty(n, np.int32),
            match_length=np.empty(n, np.int32),
            occurrences=np.empty(n, np.int32),
            version=np.zeros(n, np.int64),
        )

    def put(self, rows: slice | NDArray[np.int64], part: Drafts) -> None:
        """Replaces the drafts of `rows` by those of `part`."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(part, field.name)

    def first(self, n: int) -> Drafts:
        """The drafts of the first n rows, as views."""
        return Drafts(*(getattr(self, field.name)[:n] for field in fields(self)))

    def row(self, i: int) -> list[int]:
        """The tokens drafted for row i."""
        return [int(t) for t in self.tokens[i, : self.counts[i]]]
