"""Other drafters, each run as a program of its own, so that a benchmark works without them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

MISSING = "arctic-inference is not installed (make bench-peers, or set ARCTIC_PYTHON): its columns are empty"


def arctic_python() -> str | None:
    """The interpreter that has arctic-inference: $ARCTIC_PYTHON, or this one; None if neither has it."""
    if os.environ.get("ARCTIC_PYTHON"):
        return os.environ["ARCTIC_PYTHON"]
    return sys.executable if importlib.util.find_spec("arctic_inference") else None


def arctic(*arguments: object) -> dict[str, float] | None:
    """What arctic.py printed for these arguments; None without arctic-inference.

    Raises:
        CalledProcessError: It failed.
    """
    python = arctic_python()
    if python is None:
        return None
    command = [python, str(Path(__file__).with_name("arctic.py")), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
