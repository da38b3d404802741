"""What a figure was measured on, and how every benchmark reports: one line for the machine, one table, JSON on request."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """The machine: CPU model, cores this process may use, memory in GiB, kernel, and versions of what runs the kernels."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    numba: str
    numpy: str
    draftd: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, {self.system}, "
            f"Python {self.python}, numba {self.numba}, numpy {self.numpy}, draftd {self.draftd}"
        )


def machine() -> Machine:
    """This machine."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        numba=version("numba"),
        numpy=version("numpy"),
        draftd=version("draftd"),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    return made


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], path: Path | None, notes: Sequence[str] = ()) -> None:
    """Prints the table under its title and the machine; writes the same as JSON to `path` if given."""
    here = machine()
    cells = [[str(c) for c in columns], *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(f"{title}\n{here}\n")
    for number, row in enumerate(cells):
        aligned = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(aligned).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    for note in notes:
        print(f"\n{note}")
    if path:
        records: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in rows]
        path.write_text(json.dumps({"title": title, "machine": asdict(here), "rows": records, "notes": list(notes)}, indent=1) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
