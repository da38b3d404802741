"""How large a corpus may get and how fresh it is kept, validated where it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import MAX_DEPTH

DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?|(?!.*(cuda:[0-9]+),.*\2(?![0-9]))cuda:[0-9]{1,3}(,cuda:[0-9]{1,3})+")
"""Where the indexes may be."""


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """How large a corpus may get and how fresh it is kept.

    Attributes:
        shm_root: Directory below which the blocks lie; None: /dev/shm/draftd-<uid>.
        quota_tokens: Committed text of a namespace, in tokens (separators and overlaps counted), in [least_quota(depth), 2^31 - 1 - depth].
        depth: Depth to which suffixes are sorted: longest match plus draft, in tokens, in [2, 64].
        max_namespaces: Most namespaces.
        refresh_interval_ms: Pause between refreshes, in milliseconds.
        recent_tokens: Most suffixes of the segment `recent`; half of it triggers a merge into `main`.
        live_tokens: Most tokens of the segment `live`, separators included.
        keep_generations: Generations that a namespace keeps when a new one starts and the caller does not say.
        device: Where the indexes are and drafting happens: "cpu", "cuda", "cuda:N" for one of several GPUs, or several of those, separated
            by commas, which all get a copy.
        device_memory_bytes: Memory that is allocated on the GPU for all indexes.
        quotas: Quotas of namespaces whose name fits a pattern (fnmatch), in tokens; the first that fits counts, before quota_tokens.
    """

    shm_root: Path | None = None
    quota_tokens: int = 4_194_304
    depth: int = MAX_DEPTH
    max_namespaces: int = 256
    refresh_interval_ms: float = 10.0
    recent_tokens: int = 262_144
    live_tokens: int = 131_072
    keep_generations: int = 2**31 - 1
    device: str = "cpu"
    device_memory_bytes: int = 2**30
    quotas: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("depth", 2, MAX_DEPTH),
            ("quota_tokens", least_quota(self.depth), 2**31 - 2 - self.depth),
            ("max_namespaces", 1, 65_536),
            ("refresh_interval_ms", 0.1, 60_000),
            ("recent_tokens", 2 * self.depth, 2**30),
            ("live_tokens", 2 * self.depth, 2**30),
            ("keep_generations", 1, 2**31 - 1),
            ("device_memory_bytes", 2**20, 2**40),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}; it must be in [{low}, {high}]", name)
        if not DEVICE.fullmatch(self.device):
            raise InvalidArgument(f"device is {self.device!r}; it must be cpu, cuda, cuda:N, or several cuda:N with commas", "device")
        low, high = least_quota(self.depth), 2**31 - 2 - self.depth
        for pattern, quota in self.quotas:
            if not low <= quota <= high:
                raise InvalidArgument(f"the quota of {pattern} is {quota}; it must be in [{low}, {high}]", "quotas")

    def quota_of(self, namespace: str) -> int:
        """The quota of a namespace, in tokens."""
        return next((quota for pattern, quota in self.quotas if fnmatchcase(namespace, pattern)), self.quota_tokens)


def least_quota(depth: int) -> int:
    """The smallest quota of a namespace, in tokens: two pieces with what stands before them fit."""
    return max(32, 8 * depth)
