"""The engine's side of its row block: it writes what its requests hold, the service reads it, and no message is sent.

One thread of the engine writes. A slot is reused only when the service has taken all of it (`is_drained`).
"""

from __future__ import annotations

import time
from typing import cast

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import layout
from draftd.drafter.layout import BlockSpec
from draftd.drafter.lessons import Learned
from draftd.drafter.ops.intrinsics import observe, publish, publish_column
from draftd.drafter.shm import SharedBlock
from draftd.drafter.stats import EngineStats

_RESERVE_TOKENS = 4096


def put_tokens(
    into: NDArray[np.int32], rows: NDArray[np.int64], at: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]
) -> None:
    """Writes the first counts[i] of tokens[i] into into[rows[i]] from at[i] on.

    into: int32 [any, any]; rows, at, counts: int64 [n]; tokens: int32 [n, w].
    """
    places = np.arange(tokens.shape[1])
    given = places < counts[:, None]
    into[np.repeat(rows, counts), (at[:, None] + places)[given]] = tokens[given]


class RowBlock:
    """A row block, mapped.

    Attributes:
        header: int64 [ROWS_HEADER_WORDS].
        slots: int64 [n_slots, SLOT_WORDS].
        document_ids: uint8 [n_slots, 128].
        tokens: int32 [n_slots, max_length].
        lengths: int64 [n_slots]; a view of `slots`.
        stats: The engine's counters.
    """

    def __init__(self, spec: BlockSpec, *, create: bool = False) -> None:
        """Maps a row block; `create` makes it, which is the service's part.

        Raises:
            OSError, ValueError: It cannot be mapped or made.
        """
        self._block, arrays = SharedBlock.from_spec(spec, create=create, writable=True)
        self._tokens_offset = next(a.offset for a in spec.arrays if a.name == "tokens")
        if create:
            self._block.reserve(0, self._tokens_offset)
        self.header = cast(NDArray[np.int64], arrays["header"])
        self.slots = cast(NDArray[np.int64], arrays["slots"])
        self.document_ids = cast(NDArray[np.uint8], arrays["document_ids"])
        self.tokens = cast(NDArray[np.int32], arrays["tokens"])
        self.lengths: NDArray[np.int64] = self.slots[:, layout.SLOT_LENGTH]
        self.stats = EngineStats(cast(NDArray[np.int64], arrays["stats"]))
        self._learning = cast(NDArray[np.int64], arrays["learning"])
        self._halves = cast(NDArray[np.float32], arrays["learned"])
        self._learned_offset = next(a.offset for a in spec.arrays if a.name == "learned")
        self.n_slots, self.max_length = self.tokens.shape
        self._reserved = np.zeros(self.n_slots, np.int64)
        self._starts = 0

    @staticmethod
    def open(spec: BlockSpec) -> RowBlock:
        """Maps a row block that the service has made; see the constructor for errors."""
        return RowBlock(spec)

    def _reserve(self, slot: int, length: int) -> None:
        """Takes the memory of the first `length` tokens of a slot, in steps of 16 KiB."""
        if length > self._reserved[slot]:
            want = min(self.max_length, -(-length // _RESERVE_TOKENS) * _RESERVE_TOKENS)
            first = slot * self.max_length + int(self._reserved[slot])
            self._block.reserve(self._tokens_offset + 4 * first, 4 * (want - int(self._reserved[slot])))
            self._reserved[slot] = want

    def learned(self, namespace_index: int, *, reserve: bool = False) -> Learned:
        """What the engine learns in one of the attachment's namespaces; who learns says `reserve`, which takes the memory.

        Raises:
            OSError: There is not enough.
        """
        halves = self._halves[namespace_index]
        if reserve:
            self._block.reserve(self._learned_offset + namespace_index * halves.nbytes, halves.nbytes)
        return Learned(self._learning[namespace_index], halves)

    def unlink(self) -> None:
        """Removes the block's name; mappings stay valid."""
        self._block.unlink()

    def beat(self) -> None:
        """Shows the service that the engine's client lives."""
        publish(self.header, layout.ROWS_HEARTBEAT_NS, time.monotonic_ns())

    def start(
        self, slot: int, document_id: str, tokens: NDArray[np.int32], prompt_length: int, namespace_index: int, private: bool
    ) -> None:
        """Fills a slot with a request.

        Args:
            document_id: The request's id, 1 to 128 bytes.
            tokens: int32 [n]; what it holds already, prompt first.
            prompt_length: How many of them are the prompt.
            namespace_index: Position of its namespace in the attachment's list.
            private: The service must not read it.

        Raises:
            ValueError: The tokens do not fit, or the id is too long.
            OSError: There is no memory for them.
        """
        encoded = document_id.encode()
        if len(tokens) > self.max_length:
            raise ValueError(f"row of {len(tokens)} tokens is longer than {self.max_length}")
        if not 1 <= len(encoded) <= layout.MAX_DOCUMENT_ID_BYTES:
            raise ValueError(f"document_id has {len(encoded)} bytes; it must have 1 to {layout.MAX_DOCUMENT_ID_BYTES}")
        self._reserve(slot, len(tokens))
        words = self.slots[slot]
        generation = int(words[layout.SLOT_GENERATION])
        publish(words, layout.SLOT_GENERATION, generation + 1)
        publish(words, layout.SLOT_STATE, layout.STATE_FREE)
        self.tokens[slot, : len(tokens)] = tokens
        self.document_ids[slot, : len(encoded)] = np.frombuffer(encoded, np.uint8)
        words[layout.SLOT_ID_LENGTH] = len(encoded)
        self._starts += 1
        words[layout.SLOT_ORDER] = self._starts
        words[layout.SLOT_PROMPT_LENGTH] = prompt_length
        words[layout.SLOT_NAMESPACE] = -1 if private else namespace_index
        words[layout.SLOT_VISIBLE_LENGTH] = 0
        publish(words, layout.SLOT_LENGTH, len(tokens))
        publish(words, layout.SLOT_STATE, layout.STATE_OPEN)
        publish(words, layout.SLOT_GENERATION, generation + 2)

    def append(self, slot: int, tokens: NDArray[np.int32]) -> None:
        """Adds what the engine committed.

        Args:
            tokens: int32 [n].

        Raises:
            ValueError: The row would be longer than max_length.
            OSError: There is no memory for them.
        """
        length = int(self.lengths[slot])
        if length + len(tokens) > self.max_length:
            raise ValueError(f"row of {length + len(tokens)} tokens is longer than {self.max_length}")
        self._reserve(slot, length + len(tokens))
        self.tokens[slot, length : length + len(tokens)] = tokens
        publish(self.slots[slot], layout.SLOT_LENGTH, length + len(tokens))

    def append_rows(self, slots: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Adds what the engine committed to several slots.

        Args:
            slots: int64 [n], distinct; tokens: int32 [n, w]; counts: int64 [n]; how many of each row's tokens count.

        Raises:
            ValueError, OSError: See append; nothing is added.
        """
        at = self.lengths[slots]
        ends = at + counts
        if ends.max(initial=0) > self.max_length:
            raise ValueError(f"row of {ends.max()} tokens is longer than {self.max_length}")
        outgrown = ends > self._reserved[slots]
        for slot, end in zip(slots[outgrown].tolist(), ends[outgrown].tolist(), strict=True):
            self._reserve(slot, end)
        put_tokens(self.tokens, slots, at, tokens, counts)
        publish_column(self.slots, slots, layout.SLOT_LENGTH, ends)

    def finish(self, slot: int, discard: bool = False) -> None:
        """Ends a request: the service commits its output as a document, or forgets it."""
        publish(self.slots[slot], layout.SLOT_STATE, layout.STATE_DISCARDED if discard else layout.STATE_FINISHED)

    def is_drained(self, slot: int) -> bool:
        """The service has taken the finished request: the slot may be used again."""
        words = self.slots[slot]
        return int(observe(words, layout.SLOT_DRAINED_GENERATION)) == int(words[layout.SLOT_GENERATION])

    def is_private(self, slot: int) -> bool:
        """The service does not read the slot."""
        return int(self.slots[slot, layout.SLOT_NAMESPACE]) < 0

    def visible_length(self, slot: int) -> int:
        """Tokens of the row (prompt counted) that every engine of the namespace can draft from."""
        return int(observe(self.slots[slot], layout.SLOT_VISIBLE_LENGTH))

    def length(self, slot: int) -> int:
        """Tokens of the row."""
        return int(self.lengths[slot])
