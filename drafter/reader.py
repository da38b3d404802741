"""Drafting from mapped indexes: what an engine's process and the service's own RPCs use, with no writer at hand.

A reader keeps drafting from an index whose writer has died. Rows whose namespace is not there draft from their own tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.drafts import Drafts, RowLessons
from draftd.drafter.groups import NO_GROUPS, GroupTexts
from draftd.drafter.layout import CONTROL_EPOCH, CONTROL_HEARTBEAT_NS, HEADER_VOCAB, ROWS_HEADER_WORDS, ROWS_PIN, BlockSpec
from draftd.drafter.lessons import Learned, Lesson
from draftd.drafter.ops.calibrated.cpu import draft_calibrated
from draftd.drafter.ops.calibrated.cpu_versioned import draft_calibrated_versioned
from draftd.drafter.ops.draft.cpu import draft_rows
from draftd.drafter.ops.draft.versioned import draft_versioned
from draftd.drafter.ops.intrinsics import observe, publish
from draftd.drafter.params import DraftParams
from draftd.drafter.policy import shipped_prior
from draftd.drafter.rows import RowBlock
from draftd.drafter.shm import SharedBlock

_NO_TOKENS: NDArray[np.int32] = np.zeros(1, np.int32)


class TornRead(RuntimeError):
    """The index was overwritten under every try; draft without it."""


def draft_local(addresses: NDArray[np.int64], lengths: NDArray[np.int64], params: DraftParams) -> Drafts:
    """Drafts from each row's own tokens only.

    Args:
        addresses: int64 [n]; address of each row's int32 tokens.
        lengths: int64 [n]; tokens of each row.
    """
    n = len(addresses)
    drafts = Drafts.empty(n, params.k)
    none = _NO_TOKENS
    if params.policy == "calibrated":
        lesson = Lesson.unset(drafts, None)
        lesson.parents[:] = -1
        draft_calibrated(
            addresses, lengths, np.zeros(n, np.bool_), params.use_local,
            none, none, 0, none, 0, none, 0, none, none, 0, 0, 1, 1,
            shipped_prior(), params.branches, params.tau, int(lengths.max(initial=0)), *NO_GROUPS,
            drafts.tokens, drafts.probabilities, lesson.parents, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences,
            lesson.ints, lesson.floats,
        )  # fmt: skip
        drafts.parents = lesson.parents if params.branches > 1 else None
        return drafts
    draft_rows(
        addresses, lengths, np.zeros(n, np.bool_), params.use_local,
        none, none, 0, none, 0, none, 0, none, none, 0, 0, 1,
        params.k, params.max_depth, params.spec_factor, params.spec_offset, params.min_token_prob, int(lengths.max(initial=0)),
        drafts.tokens, drafts.probabilities, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences,
    )  # fmt: skip
    return drafts


def propose_local(tokens: NDArray[np.int32], lengths: NDArray[np.int64], slots: NDArray[np.int32], params: DraftParams) -> Drafts:
    """Drafts from each row's own tokens only.

    Args:
        tokens: int32 [rows, max_length], C-contiguous.
        lengths: integer [rows]; tokens of each row.
        slots: integer [n]; the rows to draft for.
    """
    return draft_local(row_addresses(tokens, slots), np.asarray(lengths, np.int64)[slots], params)


def row_addresses(tokens: NDArray[np.int32], slots: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """int64 [n]; address of the first token of each slot's row."""
    return tokens.ctypes.data + np.asarray(slots, np.int64) * np.int64(tokens.strides[0])


class MappedIndex:
    """The arrays of one namespace's index, read-only.

    Attributes:
        learned: Where what its drafts teach goes; None: nowhere.
    """

    def __init__(self, spec: BlockSpec) -> None:
        _, arrays = SharedBlock.from_spec(spec)
        self.handle = spec.handle
        self.header = cast(NDArray[np.int64], arrays["header"])
        self.arrays = tuple(cast(NDArray[np.int32], arrays[n]) for n in ("text", "main", "buckets", "recent", "live_text", "live"))
        self.calibration = cast(NDArray[np.float32], arrays["calibration"])
        self.learned: Learned | None = None
        self.ring = self.arrays[1].shape[1]
        self.vocab_size = int(self.header[HEADER_VOCAB])

    def draft(
        self,
        control: NDArray[np.int64],
        pins: NDArray[np.int64],
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        params: DraftParams,
        groups: GroupTexts = NO_GROUPS,
    ) -> Drafts:
        """Drafts for rows of this namespace; see draft_versioned and draft_calibrated_versioned.

        Args:
            groups: Of the rows; for the rule `calibrated`.

        Raises:
            TornRead: Every version read was overwritten meanwhile.
        """
        n = len(addresses)
        drafts = Drafts.unset(n, params.k)
        lesson: Lesson | None = None
        if params.policy == "calibrated":
            lesson = Lesson.unset(drafts, self.learned)
            version = draft_calibrated_versioned(
                control, pins, self.header, *self.arrays, self.ring, self.calibration,
                addresses, lengths, np.full(n, params.use_corpus), params.use_local,
                params.branches, params.tau, int(lengths.max(initial=0)), *groups,
                drafts.tokens, drafts.probabilities, lesson.parents, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences,
                lesson.ints, lesson.floats,
            )  # fmt: skip
        else:
            version = draft_versioned(
                control, pins, self.header, *self.arrays, self.ring,
                addresses, lengths, np.full(n, params.use_corpus), params.use_local,
                params.k, params.max_depth, params.spec_factor, params.spec_offset, params.min_token_prob, int(lengths.max(initial=0)),
                drafts.tokens, drafts.probabilities, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences,
            )  # fmt: skip
        if version < 0:
            raise TornRead("the index was overwritten under every try")
        if version == 0:
            return draft_local(addresses, lengths, params)
        drafts.version[:] = version
        if lesson is not None:
            drafts.parents = lesson.parents if params.branches > 1 else None
            if self.learned is not None:
                drafts.lessons.append(RowLessons(np.arange(n), np.arange(n), lesson))
        return drafts


class IndexReader:
    """Drafts for rows from the indexes of several namespaces.

    Args:
        control: The service's control block.
        pins: int64 block whose word ROWS_PIN is this reader's; None makes a private one that no writer waits for.
    """

    def __init__(self, control: NDArray[np.int64], pins: NDArray[np.int64] | None = None) -> None:
        self._control = control
        self._pins = np.zeros(ROWS_HEADER_WORDS, np.int64) if pins is None else pins
        self._indexes: dict[str, MappedIndex] = {}
        self._learned: dict[str, Learned] = {}
        self._rows: RowBlock | None = None

    @staticmethod
    def open(control: BlockSpec, indexes: dict[str, BlockSpec], rows: RowBlock) -> IndexReader:
        """Maps a service's control block and indexes; the writer waits for this reader by the pin in `rows`.

        Raises:
            OSError, ValueError: A block cannot be mapped.
        """
        _, arrays = SharedBlock.from_spec(control)
        reader = IndexReader(cast(NDArray[np.int64], arrays["control"]), rows.header)
        reader._rows = rows
        for name, spec in indexes.items():
            reader.add_index(name, spec)
        return reader

    def add_index(self, name: str, spec: BlockSpec) -> None:
        """Maps a namespace's index, in place of one of the same name."""
        index = MappedIndex(spec)
        index.learned = self._learned.get(name)
        self._indexes[name] = index

    def learn_into(self, name: str, learned: Learned) -> None:
        """What drafts from a namespace teach goes there, also when its index is mapped later."""
        self._learned[name] = learned
        if name in self._indexes:
            self._indexes[name].learned = learned

    def remove_index(self, name: str) -> None:
        """Forgets a namespace's index."""
        self._indexes.pop(name, None)
        self._learned.pop(name, None)

    def writer_heartbeat_age_s(self) -> float:
        """Seconds since the writer last showed that it lives."""
        return (time.monotonic_ns() - int(observe(self._control, CONTROL_HEARTBEAT_NS))) / 1e9

    def propose(self, slots: NDArray[np.int32], namespace_of: Sequence[str] | None, params: DraftParams) -> Drafts:
        """Drafts for slots of the row block.

        Args:
            slots: int32 [n]; slots of the row block.
            namespace_of: The namespace of each, "" for a private row; None if all are of the only namespace.

        Raises:
            TornRead: Every version read was overwritten meanwhile.
        """
        assert self._rows is not None
        return self.draft(row_addresses(self._rows.tokens, slots), self._rows.lengths[slots], namespace_of, params)

    def draft(
        self,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        namespace_of: Sequence[str] | None,
        params: DraftParams,
        groups: GroupTexts = NO_GROUPS,
    ) -> Drafts:
        """Drafts for rows anywhere in this process; see `propose`.

        Args:
            addresses: int64 [n]; address of each row's int32 tokens, valid during the call.
            lengths: int64 [n]; tokens of each row.
            groups: Of the rows: NO_GROUPS, or of all n.
        """
        if namespace_of is None:
            (namespace_of,) = ([name] * len(addresses) for name in self._indexes)
        names = set(namespace_of)
        if len(names) == 1:
            return self._draft_one(names.pop(), addresses, lengths, params, groups)
        drafts = Drafts.empty(len(addresses), params.k)
        for name in names:
            rows = np.array([i for i, n in enumerate(namespace_of) if n == name])
            of_rows = groups.of(rows) if groups is not NO_GROUPS else groups
            drafts.put(rows, self._draft_one(name, addresses[rows], lengths[rows], params, of_rows))
        return drafts

    def _draft_one(
        self, name: str, addresses: NDArray[np.int64], lengths: NDArray[np.int64], params: DraftParams, groups: GroupTexts
    ) -> Drafts:
        index = self._indexes.get(name)
        if index is None:
            return draft_local(addresses, lengths, params)
        return index.draft(self._control, self._pins, addresses, lengths, params, groups)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """The writer waits for this reader while the context lasts."""
        publish(self._pins, ROWS_PIN, int(observe(self._control, CONTROL_EPOCH)))
        try:
            yield
        finally:
            publish(self._pins, ROWS_PIN, 0)

    def close(self) -> None:
        """Forgets all mappings."""
        self._indexes.clear()
        self._rows = None
