"""Where each array lies in a block of shared memory, and the version of that agreement.

Three kinds of block: `control` (one a service), `index` (one a namespace), `rows` (one an attachment that maps). A client that does not
know LAYOUT_VERSION must not map any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from draftd.drafter.policy import CALIBRATION_WORDS

LAYOUT_VERSION = 3

ITEM_SIZES = {"uint8": 1, "int32": 4, "float32": 4, "int64": 8}
_ALIGNMENT = 64

# Words of the control block (int64).
CONTROL_WORDS = 64
CONTROL_EPOCH = 0
"""Counts publications over all namespaces; what readers pin."""
CONTROL_HEARTBEAT_NS = 8
"""CLOCK_MONOTONIC when the writer last showed that it lives, in nanoseconds."""

# Words of an index block's header (int64).
HEADER_WORDS = 128
HEADER_VERSION = 0
"""Current version: the descriptor in force is `version % DESCRIPTORS`."""
HEADER_RECLAIMED = 8
"""Versions up to this one may be overwritten at any time; what was read from them does not count."""
HEADER_VOCAB = 16
HEADER_DEPTH = 17
HEADER_BUCKET_SHIFT = 18
HEADER_DROPPED = 19
"""1 when the namespace is gone: readers draft from their own tokens only."""
HEADER_CALIBRATION = 20
"""Counts publications of the calibration: the copy in force is `count % 2`."""
HEADER_DESCRIPTORS = 64
"""First word of the descriptors."""

DESCRIPTORS = 4
DESCRIPTOR_WORDS = 16
DESC_VERSION = 0
DESC_MAIN_BUFFER = 1
DESC_MAIN_LENGTH = 2
DESC_RECENT_BUFFER = 3
DESC_RECENT_LENGTH = 4
DESC_LIVE_BUFFER = 5
DESC_LIVE_LENGTH = 6
DESC_RING_START = 7
"""Position of the oldest committed text, from which recency is counted."""

# Words of a row block's header (int64).
ROWS_HEADER_WORDS = 64
ROWS_PIN = 0
"""Epoch that the engine is drafting from, 0 when it is not drafting."""
ROWS_HEARTBEAT_NS = 8
"""CLOCK_MONOTONIC when the engine's client last showed that it lives, in nanoseconds."""

# Words beside what an engine learns in one namespace (int64); see draftd.drafter.lessons.
LEARNING_WORDS = 24
LEARNING_HALF = 0
"""The half that is added to: the service turns it over and takes what is in the other."""
LEARNING_BUSY = 8
"""1 + the half that is being added to at the moment, 0 for none."""
LEARNING_STATES = 16
"""Of each half: drafts that it has learned from since it was taken."""
LEARNING_NAMESPACES = 8
"""As many of an attachment's namespaces, the first ones, are learned in."""

# Words of a slot in a row block (int64).
SLOT_WORDS = 16
SLOT_GENERATION = 0
"""Counts requests that used the slot; odd while it is being filled."""
SLOT_STATE = 1
SLOT_LENGTH = 2
SLOT_PROMPT_LENGTH = 3
SLOT_NAMESPACE = 4
SLOT_VISIBLE_LENGTH = 5
SLOT_DRAINED_GENERATION = 6
SLOT_ID_LENGTH = 7
SLOT_ORDER = 8
"""Counts the starts in a row block: the service takes requests in that order."""

STATE_FREE = 0
STATE_OPEN = 1
STATE_FINISHED = 2
STATE_DISCARDED = 3

MAX_DOCUMENT_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a block: its name, byte offset, dtype name and shape."""

    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def byte_size(self) -> int:
        """Bytes that the array takes."""
        return ITEM_SIZES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block: its handle (a path), size in bytes, layout version and arrays."""

    handle: str
    byte_size: int
    layout_version: int
    arrays: tuple[ArraySpec, ...]


def _block(handle: str, arrays: Iterable[tuple[str, str, tuple[int, ...]]]) -> BlockSpec:
    specs, offset = [], 0
    for name, dtype, shape in arrays:
        spec = ArraySpec(name, offset, dtype, shape)
        specs.append(spec)
        offset += -(-spec.byte_size // _ALIGNMENT) * _ALIGNMENT
    return BlockSpec(handle, offset, LAYOUT_VERSION, tuple(specs))


def control_block_spec(handle: str) -> BlockSpec:
    """The control block: int64 [CONTROL_WORDS]."""
    return _block(handle, [("control", "int64", (CONTROL_WORDS,))])


def index_block_spec(handle: str, *, quota_tokens: int, recent_tokens: int, live_tokens: int, depth: int, buckets: int) -> BlockSpec:
    """An index block for `quota_tokens` of committed text.

    `text` and `live_text` end in `depth` guard tokens, so that a comparison may run past the last suffix. Everything that a refresh
    replaces is there twice; which copy is current is in the descriptors.
    """
    return _block(
        handle,
        [
            ("header", "int64", (HEADER_WORDS,)),
            ("text", "int32", (quota_tokens + depth + 1,)),
            ("main", "int32", (2, quota_tokens)),
            ("buckets", "int32", (2, buckets + 1)),
            ("recent", "int32", (2, recent_tokens)),
            ("live_text", "int32", (2, live_tokens + depth + 1)),
            ("live", "int32", (2, live_tokens)),
            ("calibration", "float32", (2, CALIBRATION_WORDS)),
        ],
    )


def row_block_spec(handle: str, max_rows: int, max_length: int) -> BlockSpec:
    """An attachment's row block.

    There are twice as many slots as rows, so that a finished request can wait to be drained while its engine row is in use again.
    """
    from draftd.drafter.stats import STATS_WORDS

    slots = 2 * max_rows
    return _block(
        handle,
        [
            ("header", "int64", (ROWS_HEADER_WORDS,)),
            ("slots", "int64", (slots, SLOT_WORDS)),
            ("document_ids", "uint8", (slots, MAX_DOCUMENT_ID_BYTES)),
            ("stats", "int64", (STATS_WORDS,)),
            ("learning", "int64", (LEARNING_NAMESPACES, LEARNING_WORDS)),
            ("tokens", "int32", (slots, max_length)),
            ("learned", "float32", (LEARNING_NAMESPACES, 2, CALIBRATION_WORDS)),
        ],
    )
