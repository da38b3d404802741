"""What a service takes of its machine, to see whether it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    """Private memory and shared memory in MiB, files in shared memory, open files, threads and child processes."""

    private_mib: float
    shm_mib: float
    shm_files: int
    files: int
    threads: int
    children: int

    @staticmethod
    def of(pid: int, shm: Path) -> Footprint:
        """That of a process, whose blocks lie below `shm`."""
        process = psutil.Process(pid)
        memory = process.memory_info()
        # A block may go while it is looked at.
        blocks = [p.stat().st_blocks for p in shm.rglob("*") if p.is_file() and p.exists()]
        return Footprint(
            private_mib=(memory.rss - memory.shared) / 2**20,
            shm_mib=sum(blocks) * 512 / 2**20,
            shm_files=len(blocks),
            files=process.num_fds(),
            threads=process.num_threads(),
            children=len(process.children(recursive=True)),
        )

    def growth(self, before: Footprint, most: Footprint) -> list[str]:
        """What has grown since `before` by more than `most`; empty if nothing has."""
        found = []
        for name in self.__slots__:
            grown = getattr(self, name) - getattr(before, name)
            if grown > getattr(most, name):
                found.append(f"{name} grew by {grown:.0f}, from {getattr(before, name):.0f}")
        return found
