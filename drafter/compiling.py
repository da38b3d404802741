"""Compiling kernels several at a time, which is most of what a first start on a machine takes.

A launch within `together` is not made: what it would run is compiled by threads, and found compiled by the launch that follows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import triton

from draftd.drafter.ops.warp import INTERPRETED

T = TypeVar("T")

_MOST_THREADS = 16
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches a kernel on the current stream; within `together` it is compiled for these arguments instead."""
    if not _compiling.get():
        kernel[grid](*arguments, **options)
    elif not INTERPRETED:
        kernel.warmup(*arguments, grid=grid, **options)


@contextmanager
def together() -> Iterator[None]:
    """Kernels that this thread launches within are compiled, at the end all of them are; nothing runs.

    Raises:
        triton.CompilationError: One cannot be compiled.
    """
    token = _compiling.set(True)
    try:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "draftd-compile") as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _compiling.reset(token)


def warm_up(launch_one: Callable[[T], object], cases: Sequence[T]) -> None:
    """Calls `launch_one` for each case, once all kernels that it launches have been compiled, together; see `together` for errors."""
    with together():
        for case in cases:
            launch_one(case)
    for case in cases:
        launch_one(case)
