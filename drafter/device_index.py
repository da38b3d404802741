"""One namespace's index in device memory, as its only writer sees it: two copies of what a refresh replaces, and publication.

The layout is in draftd.drafter.device_layout. A new version is in force from one 8-byte store on; kernels that have begun keep the
descriptor that they read, so a copy may be overwritten once the launches before its replacement have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from draftd.drafter import device_layout as dl


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """Sizes of an index, in tokens; depth: to which suffixes are sorted; buckets: entries of a first-token table."""

    quota_tokens: int
    recent_tokens: int
    live_tokens: int
    vocab_size: int
    depth: int = 64

    @property
    def shift(self) -> int:
        """Bits by which a token is shifted to its bucket: a table no larger than an eighth of the quota."""
        shift = 0
        while (self.vocab_size >> shift) + 1 > max(64, self.quota_tokens // 8):
            shift += 1
        return shift

    @property
    def buckets(self) -> int:
        return ((self.vocab_size - 1) >> self.shift) + 1


class DeviceIndex:
    """The arrays of one namespace, as views into one arena.

    Args:
        shape: Sizes.
        device: Where to allocate.

    Raises:
        ValueError: The quota is too large.
    """

    def __init__(self, shape: DeviceShape, device: torch.device | str) -> None:
        if shape.quota_tokens > dl.MAX_RING:
            raise ValueError(f"quota_tokens is {shape.quota_tokens}; at most {dl.MAX_RING}")
        self.shape = shape
        sizes = {
            "text": (shape.quota_tokens + shape.depth + 1,),
            "main": (2, shape.quota_tokens),
            "recent": (2, shape.recent_tokens),
            "live": (2, shape.live_tokens),
            "live_text": (2, shape.live_tokens + shape.depth + 1),
            "buckets": (dl.SEGMENTS, 2, shape.buckets + 1),
        }
        self._offsets: dict[str, int] = {}
        at = 0
        for name, size in sizes.items():
            self._offsets[name] = at
            at += -(-torch.Size(size).numel() // 32) * 32
        self.arena = torch.zeros(at, dtype=torch.int32, device=device)
        self.headers = torch.zeros((1, dl.DEVICE_HEADER_WORDS), dtype=torch.int64, device=device)
        views = {n: self.arena[self._offsets[n] : self._offsets[n] + torch.Size(s).numel()].view(s) for n, s in sizes.items()}
        self.text, self.main, self.recent = views["text"], views["main"], views["recent"]
        self.live, self.live_text, self.buckets = views["live"], views["live_text"], views["buckets"]
        self.text.fill_(-1)
        self.live_text.fill_(-1)
        self.current = DeviceVersion()

    @property
    def byte_size(self) -> int:
        """Device memory that the index takes."""
        return self.arena.numel() * 4 + self.headers.numel() * 8

    def publish(self, version: DeviceVersion) -> DeviceVersion:
        """Puts `version` in force under the next number, in the order of the current stream, and answers it."""
        number = self.current.number + 1
        version = DeviceVersion(number, version.copies, version.lengths, version.ring_start)
        words = [0] * dl.DEVICE_DESCRIPTOR_WORDS
        words[dl.DD_VERSION] = number
        words[dl.DD_RING_START] = version.ring_start
        words[dl.DD_RING] = self.shape.quota_tokens
        words[dl.DD_SHIFT] = self.shape.shift
        for segment, name in enumerate(("main", "recent", "live")):
            copy = version.copies[segment]
            array: torch.Tensor = getattr(self, name)
            record = dl.DD_SEGMENTS + segment * dl.DD_SEGMENT_WORDS
            words[record + dl.DS_SUFFIXES] = self._offsets[name] + copy * array.stride(0)
            words[record + dl.DS_LENGTH] = version.lengths[segment]
            words[record + dl.DS_BUCKETS] = self._offsets["buckets"] + segment * self.buckets.stride(0) + copy * self.buckets.stride(1)
            live = segment == dl.SEGMENTS - 1
            words[record + dl.DS_TEXT] = self._offsets["live_text"] + copy * self.live_text.stride(0) if live else self._offsets["text"]
        start = dl.DEVICE_DESCRIPTORS_START + (number % dl.DEVICE_DESCRIPTORS) * dl.DEVICE_DESCRIPTOR_WORDS
        self.headers[0, start : start + dl.DEVICE_DESCRIPTOR_WORDS].copy_(torch.tensor(words))
        self.headers[0, dl.DEVICE_VERSION].fill_(number)
        self.current = version
        return version


@dataclass(frozen=True, slots=True)
class DeviceVersion:
    """What is in force: for main, recent and live which copy and how many suffixes; where the oldest text starts."""

    number: int = 0
    copies: tuple[int, int, int] = (0, 0, 0)
    lengths: tuple[int, int, int] = (0, 0, 0)
    ring_start: int = field(default=0)
