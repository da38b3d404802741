"""The service's side of a row block: at each refresh it takes what the engine has written since, and tells it what is visible.

The engine may be wrong, slow or dead: everything read from the block is checked, and nothing here waits for the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import layout
from draftd.drafter.documents import LEAD_TOKENS
from draftd.drafter.errors import DraftdError
from draftd.drafter.layout import row_block_spec
from draftd.drafter.ops.intrinsics import observe, publish
from draftd.drafter.rows import RowBlock


class Take(Enum):
    """What to do with the tokens of a row."""

    APPEND = "append"
    COMMIT = "commit"
    DISCARD = "discard"


class Seen(NamedTuple):
    """How far a slot was read."""

    slot: int
    generation: int
    length: int
    drained: bool


Ingest = Callable[[str, str, int, NDArray[np.int32], NDArray[np.int32], Take, str, float], None]
"""(namespace, document id, offset, what stands before the document, tokens, what to do, owner, when they came)"""


class PolledRows:
    """A row block as the service reads it.

    Attributes:
        errors: Rows that could not be taken; each is drained and forgotten.
        namespaces: Names that SLOT_NAMESPACE counts.
    """

    def __init__(self, path: str, owner: str, max_rows: int, max_length: int, namespaces: list[str]) -> None:
        self.spec = row_block_spec(path, max_rows, max_length)
        self.rows = RowBlock(self.spec, create=True)
        self.namespaces = list(namespaces)
        self.errors = 0
        self._owner = owner
        self._taken = np.zeros((self.rows.n_slots, 3), np.int64)  # generation, length, state
        self._refused = np.zeros(self.rows.n_slots, np.int64)  # generation that was refused
        self._last_poll = time.perf_counter()
        self._learned = [self.rows.learned(i) for i in range(layout.LEARNING_NAMESPACES)]

    @property
    def rows_in_use(self) -> int:
        """Rows that hold a request that goes on."""
        return int((self.rows.slots[:, layout.SLOT_STATE] == layout.STATE_OPEN).sum())

    def poll(self, ingest: Ingest) -> list[Seen]:
        """Takes what is new and answers how far each changed slot was read."""
        now = time.perf_counter()
        arrived, self._last_poll = self._last_poll, now
        words = self.rows.slots[:, [layout.SLOT_GENERATION, layout.SLOT_LENGTH, layout.SLOT_STATE]]
        changed = np.flatnonzero((words != self._taken).any(axis=1) & (words[:, 0] % 2 == 0) & (words[:, 2] != layout.STATE_FREE))
        changed = changed[np.argsort(self.rows.slots[changed, layout.SLOT_ORDER], kind="stable")]
        return [seen for slot in changed if (seen := self._take(int(slot), ingest, arrived)) is not None]

    def _take(self, slot: int, ingest: Ingest, arrived: float) -> Seen | None:
        words = self.rows.slots[slot]
        generation = int(observe(words, layout.SLOT_GENERATION))
        state = int(observe(words, layout.SLOT_STATE))
        length = int(observe(words, layout.SLOT_LENGTH))
        if generation == int(words[layout.SLOT_DRAINED_GENERATION]):
            return None
        same = generation == self._taken[slot, 0]
        prompt = int(words[layout.SLOT_PROMPT_LENGTH])
        start = int(self._taken[slot, 1]) if same else prompt
        namespace = int(words[layout.SLOT_NAMESPACE])
        id_length = int(words[layout.SLOT_ID_LENGTH])
        document_id = bytes(self.rows.document_ids[slot, : max(0, id_length)])
        fits = 0 <= prompt <= start <= length <= self.rows.max_length
        tokens = self.rows.tokens[slot, start:length].copy() if fits else np.empty(0, np.int32)
        lead = self.rows.tokens[slot, max(0, prompt - LEAD_TOKENS) : prompt].copy() if fits else tokens
        if int(observe(words, layout.SLOT_GENERATION)) != generation:
            return None  # The engine has reused the slot meanwhile; the next poll takes what it holds then.
        self._taken[slot] = (generation, length, state)
        ended = state != layout.STATE_OPEN
        if namespace >= 0 and self._refused[slot] != generation:
            take = {layout.STATE_OPEN: Take.APPEND, layout.STATE_FINISHED: Take.COMMIT}.get(state, Take.DISCARD)
            try:
                if not fits or namespace >= len(self.namespaces) or not 1 <= id_length <= layout.MAX_DOCUMENT_ID_BYTES:
                    raise ValueError("slot is not well-formed")
                ingest(self.namespaces[namespace], document_id.decode(), start - prompt, lead, tokens, take, self._owner, arrived)
            except (DraftdError, ValueError):
                self.errors += 1
                self._refused[slot] = generation
        return Seen(slot, generation, length, ended)

    def take_learned(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """What the engine has learned since the last call, by namespace."""
        for namespace, learned in zip(self.namespaces, self._learned, strict=False):
            delta = learned.take()
            if delta is not None:
                yield namespace, delta

    def mark_visible(self, seen: list[Seen]) -> None:
        """Tells the engine that what was read is visible, and which slots it may use again."""
        for slot, generation, length, drained in seen:
            words = self.rows.slots[slot]
            if int(observe(words, layout.SLOT_GENERATION)) != generation:
                continue
            publish(words, layout.SLOT_VISIBLE_LENGTH, length)
            if drained:
                publish(words, layout.SLOT_DRAINED_GENERATION, generation)

    def unlink(self) -> None:
        """Removes the block's name; the engine's mapping stays valid."""
        self.rows.unlink()
