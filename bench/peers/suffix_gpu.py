"""SuffixGPU on the same corpus and contexts, in this process: it is a library of PyTorch tensors as draftd's kernels are."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch


def is_there() -> bool:
    """suffix-gpu is installed."""
    return importlib.util.find_spec("suffix_gpu") is not None


class Peer:
    """A drafter with a corpus.

    Args:
        documents: int32 tensors on the device.
        k, depth, factor, probability: As draftd's parameters; depth bounds its longest match.
    """

    def __init__(self, documents: Sequence[torch.Tensor], k: int, depth: int, factor: float, probability: float) -> None:
        tokens = sum(int(d.shape[0]) + 1 for d in documents)
        drafter = importlib.import_module("suffix_gpu.proposer").SuffixGPUDrafter
        self._drafter: Any = drafter(
            k=k, device="cuda", max_pattern_len=depth, enable_global=True, global_capacity=1 << (tokens + (1 << 17)).bit_length(),
            max_spec_factor=factor, min_token_prob=probability,
        )  # fmt: skip
        for start in range(0, len(documents), 4096):
            self._drafter.global_index.append_documents(list(documents[start : start + 4096]))
            torch.cuda.synchronize()
            self._drafter.poll()

    def call(self, tokens: torch.Tensor, lengths: torch.Tensor, rows: Sequence[torch.Tensor]) -> Callable[[int], None]:
        """Drafts for the i-th choice of rows; they are gathered beforehand, since it takes no row indices."""
        batches = [(lengths[r.long()].to(torch.int32), tokens[r.long()].contiguous()) for r in rows]

        def draft(i: int) -> None:
            self._drafter.propose(*batches[i])

        return draft
