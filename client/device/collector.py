"""Launches that carry rows to the host: the engine's end of the ring that its helper process reads (draftd.client.carrier)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.client.helper_block import HelperBlock
from draftd.drafter import cuda_memory
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_calibrated import DeviceLessons
from draftd.drafter.ops.collect.gpu import collect_rows
from draftd.drafter.ops.collect.ring import GENERATIONS, RingShape

_PORTABLE = 1
"""Every context of the process may use what is registered."""
_FOR_GOOD: list[HelperBlock] = []


class Collector:
    """The ring's memory and its kernel.

    Args:
        tokens, lengths: The engine's; see DeviceSession.
        shape: Of the ring.

    Attributes:
        block: What the helper process maps too.
        newest: int64 [rows]; the generation of each row's request.
        launched: There was a launch.

    Raises:
        OSError: There is no memory for the ring, or the GPU cannot write to it.
    """

    def __init__(self, tokens: torch.Tensor, lengths: torch.Tensor, shape: RingShape) -> None:
        self._tokens, self._lengths = tokens, lengths
        rows, device = tokens.shape[0], tokens.device
        self.block = HelperBlock.create(shape)
        self.newest: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.launched = False
        if tokens.is_cuda:
            address = self.block.address
            cuda_memory.call("cuMemHostRegister", address, self.block.byte_size, _PORTABLE)
            # A captured graph may write there as long as the process lives.
            _FOR_GOOD.append(self.block)
        self._carried = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        self._counters = torch.zeros(2, dtype=torch.int64, device=device)
        ring = self.block.ring
        self._records, self._done, self._samples = map(torch.from_numpy, (ring.records, ring.done, ring.samples))

    def begin(self, row: int, length: int) -> int:
        """A request of `length` tokens comes into a row, in the order of the current stream; its generation."""
        generation = self.newest[row] = (int(self.newest[row]) + 1) & GENERATIONS
        words = torch.tensor([length, generation], dtype=torch.int32)
        self._carried[row].copy_(words.pin_memory() if self._tokens.is_cuda else words, non_blocking=True)
        return int(generation)

    def launch(self, rows: torch.Tensor, drafts: DeviceDrafts, lessons: DeviceLessons | None = None) -> None:
        """Enqueues the kernel on the current stream; may be captured. Lessons are given if the ring carries samples.

        Raises:
            ValueError: There are more rows than the ring has room for.
        """
        tokens, shape = self._tokens, self.block.ring.shape
        if rows.shape[0] > shape.max_batch:
            raise ValueError(f"rows has {rows.shape[0]} rows; at most {shape.max_batch}")
        ints, floats = shape.lesson_words
        collect_rows[(rows.shape[0],)](
            tokens, tokens.stride(0), tokens.shape[0], tokens.shape[1], self._lengths, rows, self._carried,
            drafts.tokens, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences, shape.k,
            self._counters, self._records, self._done, shape.max_batch,
            *((drafts.probabilities.view(torch.int32), lessons.ints, ints, lessons.floats.view(torch.int32))
              if lessons else (self._carried, self._carried, 0, self._carried)), floats, self._samples,
            K=shape.width, TEACHING=lessons is not None, num_warps=1,
        )  # fmt: skip
