"""Pins of a reader whose writer is another process: set by a draft's first launch, checked and cleared by its last."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import (
    DEVICE_DESCRIPTORS,
    DEVICE_EPOCH,
    DEVICE_RECLAIMED,
    DEVICE_VERSION,
    PIN_EPOCH,
    PIN_MAPPED,
    PIN_ROWS,
    RECORD_HEADER,
)

_EPOCH = tl.constexpr(DEVICE_EPOCH)
_RECLAIMED = tl.constexpr(DEVICE_RECLAIMED)
_VERSION = tl.constexpr(DEVICE_VERSION)
_DESCRIPTORS = tl.constexpr(DEVICE_DESCRIPTORS)
_RECORD_HEADER = tl.constexpr(RECORD_HEADER)
_PIN_EPOCH = tl.constexpr(PIN_EPOCH)
_PIN_MAPPED = tl.constexpr(PIN_MAPPED)
_PIN_ROWS = tl.constexpr(PIN_ROWS)


@triton.jit
def pin(control: tensor, pins: tensor) -> None:
    """Pins the epoch, unless nothing is mapped; one program of the first launch does it.

    What another program reads before this is seen to be torn, if it is, when the row is done.
    """
    mapped = tl.load(pins + _PIN_MAPPED, volatile=True) != 0
    tl.store(pins + _PIN_EPOCH, tl.load(control + _EPOCH, mask=mapped, other=0, volatile=True))


@triton.jit
def is_torn(headers: tensor, words: tensor, version: tensor) -> tensor:
    """Whether something of the version may have been overwritten since it was read.

    Args:
        words: int64 pointer to the row's record.
    """
    some = version > 0
    header = headers + tl.load(words + _RECORD_HEADER, mask=some, other=0)
    reclaimed = tl.load(header + _RECLAIMED, mask=some, other=0, volatile=True)
    current = tl.load(header + _VERSION, mask=some, other=0, volatile=True)
    return some & ((reclaimed >= version) | (current < version) | (current - version >= _DESCRIPTORS - 1))


@triton.jit
def unpin(pins: tensor) -> None:
    """A row is done; the last one of the batch clears the pin. The grid's first dimension is the batch."""
    if tl.atomic_add(pins + _PIN_ROWS, tl.full([], 1, tl.int64)) == tl.num_programs(0) - 1:
        tl.store(pins + _PIN_ROWS, tl.full([], 0, tl.int64))
        tl.store(pins + _PIN_EPOCH, tl.full([], 0, tl.int64))
