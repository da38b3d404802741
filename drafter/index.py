"""One namespace's index in shared memory, as its only writer sees it: arrays, versions, publication.

What a refresh replaces is there twice. A version names the copies in force; the copy that it replaced is overwritten only after
`reclaim`, so that a reader's drafts are exact for the version it read, or it knows that they are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import layout
from draftd.drafter.epochs import Epochs
from draftd.drafter.layout import BlockSpec, index_block_spec
from draftd.drafter.ops.intrinsics import publish
from draftd.drafter.ops.merge.cpu import fill_buckets, merge
from draftd.drafter.ops.sort.cpu import sort_suffixes
from draftd.drafter.shm import SharedBlock

_RESERVE_BYTES = 1 << 16


MAIN, RECENT, LIVE = range(3)
"""The segments, from the oldest to the most recent."""
SEGMENT_NAMES = ("main", "recent", "live")

Array = Any
"""int32 suffix positions where the index keeps them: a NumPy array, or a tensor on its device."""


@dataclass(frozen=True, slots=True)
class Version:
    """What is in force: for main, recent and live which copy and how many suffixes; where the oldest text starts.

    `evicted` counts the ring's elements that were ever evicted: when a whole ring of them goes, ring_start stays where it is.
    """

    number: int = 0
    copies: tuple[int, int, int] = (0, 0, 0)
    lengths: tuple[int, int, int] = (0, 0, 0)
    ring_start: int = 0
    evicted: int = 0

    def with_segment(self, segment: int, length: int) -> Version:
        """The version after a refresh that has filled the other copy of a segment with `length` suffixes."""
        copies, lengths = list(self.copies), list(self.lengths)
        copies[segment], lengths[segment] = 1 - copies[segment], length
        return replace(self, copies=(copies[0], copies[1], copies[2]), lengths=(lengths[0], lengths[1], lengths[2]))


@dataclass(slots=True)
class MainMerge:
    """A merge into `main`: what it takes in and leaves out.

    Attributes:
        recent: int32 [r]; a copy of the suffixes of `recent` that it takes in.
        placed: int32 [p]; positions of further suffixes, in any order.
        evict_start: Where the evicted text starts; it takes evict_size elements of the ring.
        evicted: Suffixes in that text.
    """

    recent: Array
    placed: NDArray[np.int32]
    evict_start: int
    evict_size: int
    evicted: int


class IndexImage(NamedTuple):
    """A version's text and suffixes on the host: text int32 [>= ring + depth], live_text int32, suffixes of main, recent and live."""

    version: Version
    ring: int
    text: NDArray[np.int32]
    live_text: NDArray[np.int32]
    suffixes: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class IndexArrays(Protocol):
    """What Segments asks of an index: its shape, and what a refresh does to its arrays.

    The methods fill copies that are not in force and answer the version that has them, or its length; `publish` puts it in force.
    `merge_main` may run on another thread than the others.
    """

    depth: int
    ring: int
    recent_capacity: int
    live_capacity: int
    current: Version

    @property
    def host_text(self) -> NDArray[np.int32]:
        """int32 [>= ring + depth]; the ring's text on the host."""

    def host_copy(self) -> IndexImage:
        """The version in force as the host sees it, for people; valid while it is whole."""

    def is_whole(self, number: int) -> bool:
        """Nothing of that version has been overwritten yet."""

    def resident_bytes(self) -> int:
        """Memory that the index takes now."""

    def close(self) -> None:
        """Tells readers that the namespace is gone, and gives back its memory."""

    def write_text(self, start: int, tokens: NDArray[np.int32]) -> None:
        """Writes text into the ring, separators included. Nothing reads it before a version with its suffixes is published."""

    def fill_live(self, version: Version, text: NDArray[np.int32], positions: NDArray[np.int32]) -> Version:
        """Makes `live` anew from its text and the positions of its suffixes."""

    def add_recent(self, version: Version, positions: NDArray[np.int32]) -> Version:
        """Takes the suffixes at `positions` of the ring into `recent`."""

    def drop_recent(self, version: Version, start: int, size: int, dropped: int) -> Version:
        """Leaves out of `recent` its `dropped` suffixes in the `size` elements of the ring from `start` on."""

    def recent_copy(self) -> Array:
        """A copy of the current suffixes of `recent`, for a merge."""

    def merge_main(self, merge_in: MainMerge) -> int:
        """Fills the other copy of `main` and answers how many suffixes it has."""

    def publish(self, version: Version) -> Version:
        """Makes `version` the one in force, under the next number, and answers it."""

    def publish_calibration(self, calibration: NDArray[np.float32]) -> None:
        """Puts what has been learned in force, float32 [CALIBRATION_WORDS]."""


def bucket_shift(vocab_size: int, quota_tokens: int) -> int:
    """Bits by which a token is shifted to its bucket: a table no larger than an eighth of the quota."""
    shift = 0
    while (vocab_size >> shift) + 1 > max(64, quota_tokens // 8):
        shift += 1
    return shift


class Index:
    """The arrays of an index block and the version in force.

    Args:
        path: File to create for the block.
        vocab_size: Tokens are in [0, vocab_size).
        quota_tokens: Size of the ring of committed text, in tokens.
        recent_tokens: Most suffixes of the segment `recent`.
        live_tokens: Most tokens of the text of the segment `live`, separators included.
        depth: Depth to which suffixes are sorted, in tokens.
        epochs: The service's epochs.
    """

    def __init__(
        self, path: str, *, vocab_size: int, quota_tokens: int, recent_tokens: int, live_tokens: int, depth: int, epochs: Epochs
    ) -> None:
        self.depth = depth
        self.ring = quota_tokens
        self.recent_capacity = recent_tokens
        self.live_capacity = live_tokens
        self.shift = bucket_shift(vocab_size, quota_tokens)
        self.bucket_count = ((vocab_size - 1) >> self.shift) + 1
        self.spec: BlockSpec = index_block_spec(
            path, quota_tokens=quota_tokens, recent_tokens=recent_tokens, live_tokens=live_tokens, depth=depth, buckets=self.bucket_count
        )
        self._block, arrays = SharedBlock.from_spec(self.spec, create=True)
        self._specs = {a.name: a for a in self.spec.arrays}
        self._reserved: dict[tuple[str, int], int] = {}
        self._block.reserve(0, self._specs["header"].byte_size)
        self.header = cast(NDArray[np.int64], arrays["header"])
        self.text = cast(NDArray[np.int32], arrays["text"])
        self.main = cast(NDArray[np.int32], arrays["main"])
        self.buckets = cast(NDArray[np.int32], arrays["buckets"])
        self.recent = cast(NDArray[np.int32], arrays["recent"])
        self.live_text = cast(NDArray[np.int32], arrays["live_text"])
        self.live = cast(NDArray[np.int32], arrays["live"])
        self.calibration = cast(NDArray[np.float32], arrays["calibration"])
        self.header[layout.HEADER_VOCAB] = vocab_size
        self.header[layout.HEADER_DEPTH] = depth
        self.header[layout.HEADER_BUCKET_SHIFT] = self.shift
        self._epochs = epochs
        # For each segment and copy: the last version that it was part of, and the epoch that replaced it.
        self._reclaim_lock = Lock()
        self._retired: dict[tuple[str, int], tuple[int, int]] = {}
        self.current = Version()
        self.publish(self.current)

    def publish(self, version: Version) -> Version:
        """Makes `version` the one in force, under the next number, and answers it."""
        old = self.current
        version = replace(version, number=old.number + 1)
        base = layout.HEADER_DESCRIPTORS + (version.number % layout.DESCRIPTORS) * layout.DESCRIPTOR_WORDS
        words = self.header[base : base + layout.DESCRIPTOR_WORDS]
        words[layout.DESC_VERSION] = version.number
        for segment in (MAIN, RECENT, LIVE):
            words[layout.DESC_MAIN_BUFFER + 2 * segment] = version.copies[segment]
            words[layout.DESC_MAIN_BUFFER + 2 * segment + 1] = version.lengths[segment]
        words[layout.DESC_RING_START] = version.ring_start
        publish(self.header, layout.HEADER_VERSION, version.number)
        epoch = self._epochs.advance()
        for segment, name in enumerate(SEGMENT_NAMES):
            if old.copies[segment] != version.copies[segment]:
                self._retired[name, old.copies[segment]] = (old.number, epoch)
        if old.evicted != version.evicted:
            self._retired["text", 0] = (old.number, epoch)
        self.current = version
        return version

    def publish_calibration(self, calibration: NDArray[np.float32]) -> None:
        """See IndexArrays. Who reads the copy that is overwritten sees a part of the new one, which does no harm."""
        count = int(self.header[layout.HEADER_CALIBRATION]) + 1
        self.reserve("calibration", count % 2, len(calibration))
        self.calibration[count % 2] = calibration
        publish(self.header, layout.HEADER_CALIBRATION, count)

    def reclaim(self, segment: str, copy: int) -> None:
        """Returns when the copy that is not in force may be overwritten."""
        number, epoch = self._retired.get((segment, copy), (0, 0))
        if number == 0:
            return
        self._epochs.wait_for_readers(epoch)
        with self._reclaim_lock:
            if number > int(self.header[layout.HEADER_RECLAIMED]):
                publish(self.header, layout.HEADER_RECLAIMED, number)

    def reserve(self, name: str, copy: int, elements: int) -> None:
        """Takes the memory of the first `elements` of an array's copy, in steps of 64 KiB, before they are written.

        Raises:
            OSError: There is not enough.
        """
        spec = self._specs[name]
        row = spec.byte_size // (spec.shape[0] if len(spec.shape) == 2 else 1)
        have = self._reserved.get((name, copy), 0)
        if elements * 4 > have:
            want = min(row, -(-elements * 4 // _RESERVE_BYTES) * _RESERVE_BYTES)
            self._block.reserve(spec.offset + copy * row + have, want - have)
            self._reserved[name, copy] = want

    def resident_bytes(self) -> int:
        """Memory that the block takes now."""
        return self._block.resident_bytes()

    def is_whole(self, number: int) -> bool:
        """See IndexArrays."""
        newer = int(self.header[layout.HEADER_VERSION]) - number
        return int(self.header[layout.HEADER_RECLAIMED]) < number and newer < layout.DESCRIPTORS - 1

    def close(self) -> None:
        """Tells readers that the namespace is gone, and removes the block's name."""
        publish(self.header, layout.HEADER_DROPPED, 1)
        Path(self.spec.handle).unlink(missing_ok=True)

    @property
    def host_text(self) -> NDArray[np.int32]:
        """See IndexArrays."""
        return self.text

    def host_copy(self) -> IndexImage:
        """See IndexArrays. Nothing is copied."""
        version = self.current
        arrays = tuple(self._of(version, segment) for segment in (MAIN, RECENT, LIVE))
        return IndexImage(version, self.ring, self.text, self.live_text[version.copies[LIVE]], (arrays[0], arrays[1], arrays[2]))

    def suffixes(self, segment: int) -> NDArray[np.int32]:
        """int32 [n]; the current copy of a segment; positions of `live` are in `live_text`'s current copy."""
        array = (self.main, self.recent, self.live)[segment]
        return array[self.current.copies[segment], : self.current.lengths[segment]]

    # -- what a refresh does to the arrays; see IndexArrays --------------------------------------------------------------------

    def write_text(self, start: int, tokens: NDArray[np.int32]) -> None:
        """See IndexArrays."""
        self.reclaim("text", 0)
        self.reserve("text", 0, start + len(tokens) + self.depth + 1)
        self.text[start : start + len(tokens)] = tokens

    def fill_live(self, version: Version, text: NDArray[np.int32], positions: NDArray[np.int32]) -> Version:
        """See IndexArrays."""
        copy = self._free_copy(version, LIVE, len(positions))
        self.reserve("live_text", copy, len(text) + self.depth + 1)
        self.live_text[copy, : len(text)] = text
        order = sort_suffixes(self.live_text[copy], positions, self.depth)
        self.live[copy, : len(order)] = order
        return version.with_segment(LIVE, len(order))

    def add_recent(self, version: Version, positions: NDArray[np.int32]) -> Version:
        """See IndexArrays."""
        new = sort_suffixes(self.text, positions, self.depth)
        copy = self._free_copy(version, RECENT, version.lengths[RECENT] + len(new))
        length = merge(self.text, self._of(version, RECENT), new, self.recent[copy], depth=self.depth)
        return version.with_segment(RECENT, length)

    def drop_recent(self, version: Version, start: int, size: int, dropped: int) -> Version:
        """See IndexArrays."""
        copy = self._free_copy(version, RECENT, version.lengths[RECENT])
        none = np.empty(0, np.int32)
        out = self.recent[copy]
        evict = {"evict_start": start, "evict_length": size, "ring": self.ring}
        length = merge(self.text, self._of(version, RECENT), none, out, depth=self.depth, **evict)
        assert length == version.lengths[RECENT] - dropped, "what a merge took in is not what leaves recent"
        return version.with_segment(RECENT, length)

    def recent_copy(self) -> NDArray[np.int32]:
        """See IndexArrays."""
        return self.suffixes(RECENT).copy()

    def merge_main(self, merge_in: MainMerge) -> int:
        """See IndexArrays."""
        evict = {"depth": self.depth, "evict_start": merge_in.evict_start, "evict_length": merge_in.evict_size, "ring": self.ring}
        version = self.current
        new = sort_suffixes(self.text, merge_in.placed, self.depth)
        added = np.empty(len(merge_in.recent) + len(new), np.int32)
        added = added[: merge(self.text, merge_in.recent, new, added, **evict)]
        copy = self._free_copy(version, MAIN, version.lengths[MAIN] + len(added))
        self.reserve("buckets", copy, self.bucket_count + 1)
        out = self.main[copy]
        length = merge(self.text, self._of(version, MAIN), added, out, **evict)
        fill_buckets(self.text, out[:length], self.shift, self.buckets[copy])
        return length

    def _free_copy(self, version: Version, segment: int, length: int) -> int:
        """The copy of a segment that is not in force, ready to take `length` suffixes."""
        copy = 1 - version.copies[segment]
        self.reclaim(SEGMENT_NAMES[segment], copy)
        self.reserve(SEGMENT_NAMES[segment], copy, length)
        return copy

    def _of(self, version: Version, segment: int) -> NDArray[np.int32]:
        array = (self.main, self.recent, self.live)[segment]
        return array[version.copies[segment], : version.lengths[segment]]
