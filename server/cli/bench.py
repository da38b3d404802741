"""`draftd bench`: runs the benchmarks of a source checkout."""

import subprocess
import sys
from pathlib import Path

import typer

from draftd.server.cli.failure import Failure


def bench(context: typer.Context) -> None:
    """Run the benchmarks of a source checkout; arguments go to `python -m bench`."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "__main__.py").exists():
        raise Failure("bench: the benchmarks are in the source repository, not in the installed package; run this in a checkout")
    raise typer.Exit(subprocess.run([sys.executable, "-m", "bench", *context.args], cwd=root, check=False).returncode)
