"""The decorator of every numba kernel: compiled once a machine, not holding the GIL.

numba's cache looks at a kernel's own file only, though kernels are inlined into one another: so the cache lies in a folder named after
the sources of all of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba import njit

_PACKAGE = Path(__file__).resolve().parent.parent


def _sources() -> list[Path]:
    """The files that kernels are compiled from, constants included."""
    ops = _PACKAGE / "ops"
    shared = [_PACKAGE / "layout.py", _PACKAGE / "policy.py", _PACKAGE / "stream_words.py", ops / "intrinsics.py"]
    shared.append(ops / "draft" / "versioned.py")
    return [*shared, *sorted(ops.glob("*/cpu*.py"))]


@lru_cache(maxsize=1)
def cache_directory() -> Path | None:
    """Where compiled kernels are kept; None where nothing can be written.

    Below NUMBA_CACHE_DIR if that is set, else below the user's cache directory.
    """
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftd"
    path = root / f"kernels-{digest.hexdigest()[:16]}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Like numba.njit, with nogil and a cache that knows all kernels' sources."""

    def decorate(f: Callable[..., Any]) -> Any:
        path = cache_directory()
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(path or "")
        try:
            return njit(nogil=True, cache=path is not None, **options)(f)
        finally:
            numba.config.CACHE_DIR = before

    return decorate if function is None else decorate(function)
