"""The ring that launches of collect_rows fill and a process of the host empties: what a launch writes, and how it lies in memory.

Nothing here needs a GPU, or torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.ops.calibrated.cpu_mixer import EVIDENCE_FLOATS, EVIDENCE_INTS

NEW_TOKENS = 64
"""Most new tokens of a row that one launch carries; the rest goes with the next."""
RECORD_HEAD = 8
"""int32 words in front of a record's tokens: row, generation, tokens before, new tokens; a draft's count, source, match, occurrences."""
RING = 256
"""Launches that the host may be behind."""
SAMPLES = 8
"""Most rows of a launch with what their drafts were decided from: those from SAMPLES x launch on, modulo the batch."""
GENERATIONS = 0x7FFFFFFF
"""Generations of a row's requests count up to here, then from 0 again."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class RingShape:
    """How large a ring is.

    Attributes:
        max_batch: Most rows of a launch. k: Most tokens of a draft.
        teaching: Launches carry samples of what drafts were decided from.
    """

    max_batch: int
    k: int
    teaching: bool

    @property
    def width(self) -> int:
        """Tokens of a draft in a record: k, made a power of two."""
        return 1 << (self.k - 1).bit_length()

    @property
    def lesson_words(self) -> tuple[int, int]:
        """Integers and floats that a draft was decided from."""
        return (self.k + 1) * EVIDENCE_INTS, (self.k + 1) * EVIDENCE_FLOATS

    @property
    def byte_size(self) -> int:
        """Bytes of the whole ring."""
        return sum(_aligned(np.dtype(dtype).itemsize * int(np.prod(shape))) for _, dtype, shape in self._parts())

    def _parts(self) -> list[tuple[str, type[np.generic], tuple[int, ...]]]:
        samples = (RING, SAMPLES, self.k + sum(self.lesson_words)) if self.teaching else (1, 1, 1)
        records = (RING, self.max_batch, RECORD_HEAD + NEW_TOKENS + self.width)
        return [("done", np.int64, (RING, 2)), ("records", np.int32, records), ("samples", np.int32, samples)]


class Ring:
    """A ring in memory.

    Args:
        memory: uint8 [shape.byte_size], at a multiple of 8 bytes.

    Attributes:
        done: int64 [RING, 2]; number of the launch that wrote each place last, from 1, and its batch size.
        records: int32 [RING, max_batch, RECORD_HEAD + NEW_TOKENS + width]; see RECORD_HEAD: then new tokens, then the draft.
        samples: int32 [RING, SAMPLES, k + words of a lesson]; probabilities and floats are seen as int32.
    """

    done: NDArray[np.int64]
    records: NDArray[np.int32]
    samples: NDArray[np.int32]

    def __init__(self, memory: NDArray[np.uint8], shape: RingShape) -> None:
        self.shape = shape
        at = 0
        for name, dtype, of in shape._parts():
            size = np.dtype(dtype).itemsize * int(np.prod(of))
            setattr(self, name, memory[at : at + size].view(dtype).reshape(of))
            at += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
