"""CUDA graphs of a batch's draft, one for each of some batch sizes: one launch for the host instead of several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture: few, and none much larger than what it stands in for."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch, 64)]
    return [size for size in sizes if size < max_batch] + [max_batch]


class DraftGraphs:
    """Graphs by batch size.

    Args:
        device: Where to draft.
        max_batch: Most requests of a batch.
        draft: Drafts for the first n places of fixed tensors, on the current stream, waiting for nothing.
    """

    def __init__(self, device: torch.device, max_batch: int, draft: Callable[[int], None]) -> None:
        self._device = device
        self._draft = draft
        self._all_sizes = graph_sizes(max_batch)
        self._sizes: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Captures all sizes anew; vLLM asks twice, the first time to measure what it costs."""
        self._graphs.clear()
        pool = torch.cuda.graph_pool_handle()
        for size in self._all_sizes:
            # Whatever is compiled or allocated on first use must not be so during the capture.
            self._draft(size)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._draft(size)
            self._graphs[size] = graph
        self._sizes = self._all_sizes

    def padded(self, batch: int) -> int:
        """Places that a draft for a batch runs over: those of its graph, or the batch's own without one."""
        at = bisect_left(self._sizes, batch)
        return self._sizes[at] if at < len(self._sizes) else batch

    def run(self, places: int) -> None:
        """Drafts for `places` places, from `padded`."""
        graph = self._graphs.get(places)
        if graph is None:
            self._draft(places)
        else:
            graph.replay()
