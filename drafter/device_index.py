"""One namespace's index in device memory, as its only writer sees it: two copies of what a refresh replaces, and publication.

The layout is in draftd.drafter.device_layout. A new version is in force from one 8-byte store on; kernels that have begun keep the
descriptor that they read, so a copy is overwritten when the launches before its replacement have ended, and the readers have moved on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock, RLock

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.drafter import device_layout as dl
from draftd.drafter.device_memory import DeviceMemory
from draftd.drafter.index import LIVE, MAIN, RECENT, IndexImage, MainMerge, Version, bucket_shift
from draftd.drafter.ops.merge.gpu import fill_buckets, fill_signs, merge
from draftd.drafter.ops.sort.gpu import sort_positions
from draftd.drafter.policy import CALIBRATION_WORDS

_NAMES = ("main", "recent", "live")
_TEXT = 3
"""Beside the segments: the ring's text."""


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """Sizes of an index, in tokens; depth: to which suffixes are sorted.

    Raises:
        ValueError: The quota is too large.
    """

    quota_tokens: int
    recent_tokens: int
    live_tokens: int
    vocab_size: int
    depth: int = 64

    def __post_init__(self) -> None:
        if self.quota_tokens > dl.MAX_RING:
            raise ValueError(f"quota_tokens is {self.quota_tokens}; at most {dl.MAX_RING} on a GPU")

    @property
    def shift(self) -> int:
        """Bits by which a token is shifted to its bucket."""
        return bucket_shift(self.vocab_size, self.quota_tokens)

    @property
    def buckets(self) -> int:
        """Entries of a first-token table but for its last."""
        return ((self.vocab_size - 1) >> self.shift) + 1

    def arrays(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the int32 arrays, in the order in which they lie in memory."""
        return {
            "text": (self.quota_tokens + self.depth + 1,),
            "main": (2, self.quota_tokens),
            "recent": (2, self.recent_tokens),
            "live": (2, self.live_tokens),
            "live_text": (2, self.live_tokens + self.depth + 1),
            "buckets": (dl.SEGMENTS, 2, self.buckets + 1),
            "calibration": (2, _aligned(CALIBRATION_WORDS)),
            "main_signs": _signs_shape(self.quota_tokens),
            "recent_signs": _signs_shape(self.recent_tokens),
            "live_signs": _signs_shape(self.live_tokens),
        }

    @property
    def elements(self) -> int:
        """int32 elements that an index takes of the arena."""
        return sum(_aligned(torch.Size(shape).numel()) for shape in self.arrays().values())


class DeviceIndex:
    """The arrays of one namespace, as views into the arena. See IndexArrays for what a refresh does to them.

    Args:
        shape: Sizes.
        device: Where to allocate an arena of its own, if `memory` is None.
        memory: Where to take memory from.

    Attributes:
        arena, headers: Those of the memory. slot: Its row of the headers.
        text: int32 [quota + depth + 1]; live_text: int32 [2, ...]; main, recent, live: int32 [2, ...]; buckets: int32 [3, 2, ...].
        host_text: int32 [quota + depth + 1]; the ring's text on the host.

    Raises:
        ResourceExhausted: The memory has not enough left.
    """

    def __init__(self, shape: DeviceShape, device: torch.device | str = "cuda", memory: DeviceMemory | None = None) -> None:
        self.shape = shape
        self.depth, self.ring = shape.depth, shape.quota_tokens
        self.recent_capacity, self.live_capacity = shape.recent_tokens, shape.live_tokens
        self.shift = shape.shift
        self.memory = memory or DeviceMemory(4 * shape.elements, 1, device)
        self.arena, self.headers = self.memory.words, self.memory.headers
        self._start, self.slot = self.memory.take(shape.elements)
        self._offsets: dict[str, int] = {}
        at = self._start
        views = {}
        for name, size in shape.arrays().items():
            self._offsets[name] = at
            views[name] = self.arena[at : at + torch.Size(size).numel()].view(size)
            at += _aligned(views[name].numel())
        self.text, self.main, self.recent = views["text"], views["main"], views["recent"]
        self.live, self.live_text, self.buckets = views["live"], views["live_text"], views["buckets"]
        self._signs = [views[f"{name}_signs"].view(torch.int64) for name in _NAMES]
        self._signed = [[False, False] for _ in _NAMES]
        self._calibration, self._calibrations = views["calibration"].view(torch.float32), 0
        self.host_text = np.full(self.ring + self.depth + 1, -1, np.int32)
        self._lock = RLock()
        self._last_eviction = 0
        # For each segment and copy, and for the text: the last version that it was part of, and the epoch that replaced it.
        self._retired: dict[tuple[int, int], tuple[int, int]] = {}
        self._reclaimed = 0
        self._reclaim_lock = Lock()
        # A header that another index had goes on counting, so that no reader takes a version of the one for one of the other.
        self.current = Version(number=self.memory.last_version(self.slot))
        self._first_number = self.current.number
        with self.memory.stream("refresh"):
            self.headers[self.slot, dl.DEVICE_CALIBRATION].zero_()
            self.text.fill_(-1)
            self.live_text.fill_(-1)
            self.buckets.zero_()
        self.publish(self.current)

    @property
    def byte_size(self) -> int:
        """Device memory that the index takes."""
        return 4 * self.shape.elements + self.headers.stride(0) * 8

    @property
    def stretch(self) -> tuple[int, int]:
        """Where the index starts in the arena, and how long it is; int32 elements."""
        return self._start, self.shape.elements

    @property
    def handle(self) -> str:
        """Differs from that of every other index of this memory, also of those before."""
        return f"{self.slot}-{self._first_number}"

    def resident_bytes(self) -> int:
        """Device memory that the index takes; see byte_size."""
        return self.byte_size

    def publish_calibration(self, calibration: NDArray[np.float32]) -> None:
        """See IndexArrays. Who reads the copy that is overwritten sees a part of the new one, which does no harm."""
        self._calibrations += 1
        copy = self._calibrations % 2
        with self._lock, self.memory.stream("refresh"):
            self._calibration[copy, : len(calibration)].copy_(torch.from_numpy(calibration))
            self.headers[self.slot, dl.DEVICE_CALIBRATION].fill_(self._offsets["calibration"] + copy * self._calibration.stride(0))

    def publish(self, version: Version) -> Version:
        """Puts `version` in force under the next number, and returns when it is."""
        number = self.current.number + 1
        version = replace(version, number=number)
        words = [0] * dl.DEVICE_DESCRIPTOR_WORDS
        words[dl.DD_VERSION] = number
        words[dl.DD_RING_START] = version.ring_start
        words[dl.DD_RING] = self.ring
        words[dl.DD_BUCKET_RULE] = self.shape.buckets << dl.BUCKET_SHIFT_BITS | self.shift
        for segment, name in enumerate(_NAMES):
            copy = version.copies[segment]
            if self._signed[segment][copy]:
                words[dl.DD_SIGNS + segment] = self._offsets[f"{name}_signs"] + copy * 2 * self._signs[segment].stride(0)
            array: torch.Tensor = getattr(self, name)
            record = dl.DD_SEGMENTS + segment * dl.DD_SEGMENT_WORDS
            words[record + dl.DS_SUFFIXES] = self._offsets[name] + copy * array.stride(0)
            words[record + dl.DS_LENGTH] = version.lengths[segment]
            words[record + dl.DS_BUCKETS] = self._offsets["buckets"] + segment * self.buckets.stride(0) + copy * self.buckets.stride(1)
            words[record + dl.DS_TEXT] = (
                self._offsets["live_text"] + copy * self.live_text.stride(0) if segment == LIVE else self._offsets["text"]
            )
        start = dl.DEVICE_DESCRIPTORS_START + (number % dl.DEVICE_DESCRIPTORS) * dl.DEVICE_DESCRIPTOR_WORDS
        with self._lock, self.memory.stream("refresh"):
            header = self.headers[self.slot]
            described = torch.tensor(words)
            header[start : start + dl.DEVICE_DESCRIPTOR_WORDS].copy_(
                described.pin_memory() if self.memory.on_gpu else described, non_blocking=True
            )
            header[dl.DEVICE_VERSION].fill_(number)
            epoch = self.memory.advance()
            self.memory.wait("refresh")
            old = self.current
            for segment in (MAIN, RECENT, LIVE):
                if old.copies[segment] != version.copies[segment]:
                    self._retired[segment, old.copies[segment]] = (old.number, epoch)
            if old.evicted != version.evicted:
                self._retired[_TEXT, 0] = (old.number, epoch)
            if version.evicted != self.current.evicted:
                self._last_eviction = number
            self.current = version
        return version

    def write_text(self, start: int, tokens: NDArray[np.int32]) -> None:
        """See IndexArrays."""
        with self._lock, self.memory.stream("refresh"):
            self._reclaim(_TEXT, 0)
            self.host_text[start : start + len(tokens)] = tokens
            self.text[start : start + len(tokens)].copy_(self._upload(tokens))

    def fill_live(self, version: Version, text: NDArray[np.int32], positions: NDArray[np.int32]) -> Version:
        """See IndexArrays."""
        copy = 1 - version.copies[LIVE]
        with self._lock, self.memory.stream("refresh"):
            self._reclaim(LIVE, copy)
            own = self.live_text[copy]
            own[: len(text)].copy_(self._upload(text))
            self._fill(LIVE, copy, own, sort_positions(own, self._upload(positions), self.depth, self.shape.vocab_size))
        return version.with_segment(LIVE, len(positions))

    def add_recent(self, version: Version, positions: NDArray[np.int32]) -> Version:
        """See IndexArrays."""
        copy, length = 1 - version.copies[RECENT], version.lengths[RECENT] + len(positions)
        with self._lock, self.memory.stream("refresh"):
            self._reclaim(RECENT, copy)
            new = sort_positions(self.text, self._upload(positions), self.depth, self.shape.vocab_size)
            self._merge(RECENT, version, new, self.recent[copy, :length])
        return version.with_segment(RECENT, length)

    def drop_recent(self, version: Version, start: int, size: int, dropped: int) -> Version:
        """See IndexArrays."""
        copy, length = 1 - version.copies[RECENT], version.lengths[RECENT] - dropped
        with self._lock, self.memory.stream("refresh"):
            self._reclaim(RECENT, copy)
            none = torch.empty(0, dtype=torch.int32, device=self.text.device)
            self._merge(RECENT, version, none, self.recent[copy, :length], start, size)
        return version.with_segment(RECENT, length)

    def recent_copy(self) -> torch.Tensor:
        """See IndexArrays."""
        with self.memory.stream("refresh"):
            return self.suffixes(RECENT).clone()

    def merge_main(self, merge_in: MainMerge) -> int:
        """See IndexArrays."""
        version = self.current
        recent: torch.Tensor = merge_in.recent
        length = version.lengths[MAIN] + recent.shape[0] + len(merge_in.placed) - merge_in.evicted
        # What is in `main` is older than what is in `recent`, and the oldest goes first.
        kept = recent.shape[0] - max(0, merge_in.evicted - version.lengths[MAIN])
        start, size = merge_in.evict_start, merge_in.evict_size
        with self.memory.stream("merge"):
            self._reclaim(MAIN, 1 - version.copies[MAIN])
            placed = merge_in.placed
            span = (int(placed.min()), int(placed.max()) + 1) if len(placed) else None
            new = sort_positions(self.text, self._upload(placed), self.depth, self.shape.vocab_size, span)
            if recent.shape[0]:
                added = torch.empty(kept + new.shape[0], dtype=torch.int32, device=self.text.device)
                merge(self.text, recent, new, added, depth=self.depth, evict_start=start, evict_length=size, ring=self.ring)
                new = added
            self._merge(MAIN, version, new, self.main[1 - version.copies[MAIN], :length], start, size)
        self.memory.wait("merge")
        return length

    def suffixes(self, segment: int) -> torch.Tensor:
        """int32 [n]; the current copy of a segment; positions of `live` are in `live_text`'s current copy."""
        array = (self.main, self.recent, self.live)[segment]
        return array[self.current.copies[segment], : self.current.lengths[segment]]

    def host_copy(self) -> IndexImage:
        """The version in force, copied to the host."""
        with self._lock, self.memory.stream("refresh"):
            version = self.current
            arrays = [self.suffixes(segment).cpu().numpy() for segment in (MAIN, RECENT, LIVE)]
            live_text = self.live_text[version.copies[LIVE]].cpu().numpy()
        return IndexImage(version, self.ring, self.host_text, live_text, (arrays[0], arrays[1], arrays[2]))

    def is_whole(self, number: int) -> bool:
        """No text of that version has been overwritten, and it is not long ago."""
        return number >= self._last_eviction and self.current.number - number < dl.DEVICE_DESCRIPTORS

    def close(self) -> None:
        """Takes the index out of force and gives its memory back, once no launch reads it any more."""
        with self._lock, self.memory.stream("refresh"):
            # Its descriptors stay: who has begun finds them as they were.
            self.headers[self.slot, dl.DEVICE_VERSION].zero_()
            epoch = self.memory.advance()
            self.memory.wait("refresh")
        self.memory.wait_for_launches()
        self.memory.readers.wait(epoch)
        self.memory.give(self._start, self.shape.elements, self.slot)

    def _reclaim(self, segment: int, copy: int) -> None:
        """Returns when the copy that is not in force may be overwritten by what is launched next on the current stream."""
        number, epoch = self._retired.get((segment, copy), (0, 0))
        if number == 0:
            return
        if len(self.memory.readers):
            self.memory.readers.wait(epoch)
        with self._reclaim_lock:
            if number > self._reclaimed:
                self._reclaimed = number
                self.headers[self.slot, dl.DEVICE_RECLAIMED].fill_(number)

    def _merge(
        self, segment: int, version: Version, new: torch.Tensor, out: torch.Tensor, evict_start: int = 0, evict_length: int = 0
    ) -> None:
        """Merges into the copy of a segment that is not in force, which `out` is the beginning of."""
        copy = version.copies[segment]
        array = (self.main, self.recent, self.live)[segment]
        old = array[copy, : version.lengths[segment]]
        buckets = self.buckets[segment]
        merge(
            self.text, old, new, out, depth=self.depth, buckets=buckets[copy], shift=self.shift,
            evict_start=evict_start, evict_length=evict_length, ring=self.ring,
        )  # fmt: skip
        fill_buckets(self.text, out, self.shift, buckets[1 - copy])
        self.sign(segment, 1 - copy, out)

    def sign(self, segment: int, copy: int, suffixes: torch.Tensor) -> None:
        """Fills the signs of a segment's copy, int32 [n]; the next version that has it is searched with them."""
        fill_signs(self.live_text[copy] if segment == LIVE else self.text, suffixes, self._signs[segment][copy])
        self._signed[segment][copy] = True

    def _fill(self, segment: int, copy: int, text: torch.Tensor, suffixes: torch.Tensor) -> None:
        array = (self.main, self.recent, self.live)[segment]
        array[copy, : suffixes.shape[0]].copy_(suffixes)
        fill_buckets(text, suffixes, self.shift, self.buckets[segment, copy])
        self.sign(segment, copy, suffixes)

    def _upload(self, array: NDArray[np.int32]) -> torch.Tensor:
        """A copy on the device; the host does not wait for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.text.device, non_blocking=True) if self.memory.on_gpu else tensor


def _signs_shape(suffixes: int) -> tuple[int, int]:
    return 2, 2 * (suffixes // dl.SIGN_STRIDE + 1)


def _aligned(elements: int) -> int:
    return -(-elements // dl.ALIGNMENT) * dl.ALIGNMENT
