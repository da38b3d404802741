"""One namespace's index in shared memory, as its only writer sees it: arrays, versions, publication.

What a refresh replaces is there twice. A version names the copies in force; the copy that it replaced is overwritten only after
`reclaim`, so that a reader's drafts are exact for the version it read, or it knows that they are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import cast

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import layout
from draftd.drafter.epochs import Epochs
from draftd.drafter.layout import BlockSpec, index_block_spec
from draftd.drafter.ops.intrinsics import publish
from draftd.drafter.shm import SharedBlock

_RESERVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Version:
    """What is in force: for each double segment which copy and how many suffixes; where the oldest text starts.

    `evicted` counts the ring's elements that were ever evicted: when a whole ring of them goes, ring_start stays where it is.
    """

    number: int = 0
    main_buffer: int = 0
    main_length: int = 0
    recent_buffer: int = 0
    recent_length: int = 0
    live_buffer: int = 0
    live_length: int = 0
    ring_start: int = 0
    evicted: int = 0


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
        words[layout.DESC_MAIN_BUFFER] = version.main_buffer
        words[layout.DESC_MAIN_LENGTH] = version.main_length
        words[layout.DESC_RECENT_BUFFER] = version.recent_buffer
        words[layout.DESC_RECENT_LENGTH] = version.recent_length
        words[layout.DESC_LIVE_BUFFER] = version.live_buffer
        words[layout.DESC_LIVE_LENGTH] = version.live_length
        words[layout.DESC_RING_START] = version.ring_start
        publish(self.header, layout.HEADER_VERSION, version.number)
        epoch = self._epochs.advance()
        for segment in ("main", "recent", "live"):
            before = getattr(old, f"{segment}_buffer")
            if before != getattr(version, f"{segment}_buffer"):
                self._retired[segment, before] = (old.number, epoch)
        if old.evicted != version.evicted:
            self._retired["text", 0] = (old.number, epoch)
        self.current = version
        return version

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

    def is_whole(self, version: int) -> bool:
        """Nothing of that version has been overwritten yet."""
        newer = int(self.header[layout.HEADER_VERSION]) - version
        return int(self.header[layout.HEADER_RECLAIMED]) < version and newer < layout.DESCRIPTORS - 1

    def mark_dropped(self) -> None:
        """Tells readers that the namespace is gone."""
        publish(self.header, layout.HEADER_DROPPED, 1)

    def main_suffixes(self) -> NDArray[np.int32]:
        """int32 [n]; the current copy of `main`."""
        return self.main[self.current.main_buffer, : self.current.main_length]

    def recent_suffixes(self) -> NDArray[np.int32]:
        """int32 [n]; the current copy of `recent`."""
        return self.recent[self.current.recent_buffer, : self.current.recent_length]

    def live_suffixes(self) -> NDArray[np.int32]:
        """int32 [n]; the current copy of `live`; positions are in `live_text`'s current copy."""
        return self.live[self.current.live_buffer, : self.current.live_length]
