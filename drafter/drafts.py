"""The result of drafting for a batch of rows, as arrays; the same on every transport and backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

SOURCE_NONE = 0
SOURCE_LOCAL = 1
SOURCE_CORPUS = 2
SOURCE_GROUP = 3


if TYPE_CHECKING:
    from draftd.drafter.lessons import Lesson


def chains(n: int, k: int) -> NDArray[np.int32]:
    """int32 [n, k]; the parents of n chains."""
    return np.tile(np.arange(-1, k - 1, dtype=np.int32), (n, 1))


def accepted_of(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens of a draft came true: the way through it that `truth` takes."""
    place = -1
    for depth, token in enumerate(truth):
        following = [i for i, parent in enumerate(parents) if parent == place and tokens[i] == token]
        if not following:
            return depth
        place = following[0]
    return len(truth)


class RowLessons(NamedTuple):
    """Some rows of a Drafts, and where in a lesson each of them is, int64 [m] both."""

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    lesson: Lesson


@dataclass(slots=True)
class Drafts:
    """Drafts of n rows with at most k tokens each.

    Attributes:
        tokens: int32 [n, k]; unused slots are -1.
        probabilities: float32 [n, k]; survival probability of each token, never rising along a row; unused slots are 0.
        counts: int32 [n]; tokens drafted.
        source: int32 [n]; 0 none, 1 the row's own tokens, 2 the corpus, 3 what the row's group has generated.
        match_length: int32 [n]; tokens of the matched suffix, 0 without a draft.
        occurrences: int32 [n]; occurrences of the matched suffix in its source, 0 without a draft.
        version: int64 [n]; version of the index the row was drafted from, 0 if none was read.
        parents: int32 [n, k]; of trees: the place of the token before each one, -1 for first tokens; None: each draft is a chain.
        lessons: What can be learned from the drafts.
    """

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    counts: NDArray[np.int32]
    source: NDArray[np.int32]
    match_length: NDArray[np.int32]
    occurrences: NDArray[np.int32]
    version: NDArray[np.int64]
    parents: NDArray[np.int32] | None = None
    lessons: list[RowLessons] = field(default_factory=list)

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
        """Replaces the drafts of `rows` by those of `part`, of which each has at most as many tokens."""
        k = part.tokens.shape[1]
        self.tokens[rows, :k] = part.tokens
        self.probabilities[rows, :k] = part.probabilities
        for name in ("counts", "source", "match_length", "occurrences", "version"):
            getattr(self, name)[rows] = getattr(part, name)
        if part.parents is not None:
            if self.parents is None:
                self.parents = chains(*self.tokens.shape)
            self.parents[rows, :k] = part.parents
        if part.lessons:
            numbers = np.arange(len(self.counts))[rows]
            self.lessons += [RowLessons(numbers[lessons.rows], lessons.places, lessons.lesson) for lessons in part.lessons]

    def take(self, rows: NDArray[np.int64]) -> Drafts:
        """The drafts of some rows, copied."""
        taken = Drafts(*(getattr(self, f.name)[rows] for f in fields(self)[:7]))
        taken.parents = None if self.parents is None else self.parents[rows]
        for of in self.lessons:
            where = np.full(len(self.counts), -1)
            where[rows] = np.arange(len(rows))
            there = where[of.rows] >= 0
            taken.lessons.append(RowLessons(where[of.rows][there], of.places[there], of.lesson))
        return taken

    def first(self, n: int) -> Drafts:
        """The drafts of the first n rows, as views, without lessons."""
        return Drafts(*(getattr(self, f.name)[:n] for f in fields(self)[:7]))

    def row(self, i: int) -> list[int]:
        """The tokens drafted for row i."""
        return [int(t) for t in self.tokens[i, : self.counts[i]]]
