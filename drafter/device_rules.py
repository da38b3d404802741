"""A drafter by either rule, and what its drafts can be learned from."""

from __future__ import annotations

import torch

from draftd.drafter.device import DeviceDrafter, DeviceDrafts
from draftd.drafter.device_calibrated import DeviceCalibrated, DeviceLessons
from draftd.drafter.params import DraftParams


class DeviceRule:
    """Drafts chains by the rule that the parameters name. One stream at a time may use it.

    Args:
        arena, headers, max_batch, max_row_tokens, params, compiled_k, compiled_depth, control, pins: See DeviceDrafter.
        teaching: Keep what drafts are decided from, where the rule learns.

    Attributes:
        lessons: What the last batch can be learned from, for max_batch rows; None if nothing.
    """

    def __init__(
        self, arena: torch.Tensor, headers: torch.Tensor, *, max_batch: int, max_row_tokens: int, params: DraftParams, teaching: bool,
        compiled_k: int = 2, compiled_depth: int = 16, control: torch.Tensor | None = None, pins: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.lessons: DeviceLessons | None = None
        self._drafter: DeviceDrafter | DeviceCalibrated
        if params.policy == "calibrated" and (params.use_local or params.use_corpus):
            self._drafter = DeviceCalibrated(
                arena, headers, max_batch=max_batch, max_row_tokens=max_row_tokens, params=params, compiled_k=compiled_k, control=control,
                pins=pins,
            )  # fmt: skip
            if teaching:
                self.lessons = DeviceLessons.empty(max_batch, params.k, arena.device)
        else:
            self._drafter = DeviceDrafter(
                arena, headers, max_batch=max_batch, max_row_tokens=max_row_tokens, params=params, compiled_k=compiled_k,
                compiled_depth=compiled_depth, control=control, pins=pins,
            )  # fmt: skip

    def read_from(self, arena: torch.Tensor, headers: torch.Tensor, control: torch.Tensor) -> None:
        """See RowMatching.read_from."""
        self._drafter.matching.read_from(arena, headers, control)

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, namespaces: torch.Tensor, out: DeviceDrafts) -> None:
        """See DeviceDrafter.propose."""
        if isinstance(self._drafter, DeviceCalibrated):
            lessons = None if self.lessons is None else self.lessons.first(rows.shape[0])
            self._drafter.propose(tokens, lengths, rows, namespaces, out, lessons)
        else:
            self._drafter.propose(tokens, lengths, rows, namespaces, out)
