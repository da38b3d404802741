"""The bench of the index tests over an index in device memory: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from draftd.drafter.device import DeviceDrafter, DeviceDrafts
from draftd.drafter.device_index import DeviceIndex, DeviceShape
from draftd.drafter.drafts import Drafts
from draftd.drafter.index import Index, Version
from draftd.drafter.params import DraftParams
from tests.drafter.bench import Bench


class DeviceBench(Bench):
    """See Bench. Readers are launches on the device, which end before a copy is overwritten: there are no older versions to check."""

    def _make_index(self, vocab: int, depth: int, quota: int, recent: int, live: int) -> Index:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_index = DeviceIndex(DeviceShape(quota, recent, live, vocab, depth), device)
        return cast(Index, self.device_index)

    def close(self) -> None:
        """Gives the memory back."""
        self.device_index.close()

    def check_older_versions(self) -> None:
        """Nothing to check."""

    def _buckets(self, version: Version) -> list[int]:
        return cast(list[int], self.device_index.buckets[0, version.copies[0]].tolist())

    def draft(self, rows: Sequence[Sequence[int]], params: DraftParams) -> Drafts:
        """Drafts from the version in force, by the device kernels."""
        index = self.device_index
        n, width = len(rows), max([len(r) for r in rows], default=0) + 1
        device = index.text.device
        tokens = torch.zeros((n, width), dtype=torch.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32).to(device)
        order = torch.arange(n, dtype=torch.int32).to(device)
        spaces = torch.full((n,), index.slot, dtype=torch.int32).to(device)
        out = DeviceDrafts.empty(n, params.k, device)
        if n:
            drafter = DeviceDrafter(index.arena, index.headers, max_batch=n, max_row_tokens=width, params=params)
            drafter.propose(tokens.to(device), lengths, order, spaces, out)
        return out.numpy()
