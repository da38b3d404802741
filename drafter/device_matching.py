"""The first launch of a draft on a GPU, which both rules begin with: what a batch asks, checked, and where it occurs.

It leaves what it finds in a workspace that is allocated once; nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftd.drafter import compiling
from draftd.drafter.device_layout import LOCUS_LENGTHS, MAX_ROW_TOKENS, ROW_RECORD_WORDS, SEGMENTS
from draftd.drafter.ops.search.gpu import match_rows
from draftd.drafter.ops.warp import INTERPRETED
from draftd.drafter.params import DraftParams

if TYPE_CHECKING:
    from draftd.drafter.device import DeviceDrafts

PROGRAMS_MAX = 16
LONG_ROW_TOKENS = 32_768
"""Rows that may be longer are drafted for in another way."""
# A kernel's launch overlaps with the kernel before it; the interpreter does not know the word.
EARLY = {} if INTERPRETED else {"launch_pdl": True}


@dataclass(frozen=True, slots=True)
class Launch:
    """How a batch is spread over programs; every choice gives the same drafts.

    Attributes:
        lengths: Suffix lengths that one program searches; probes: places that each search probes at once, an even number.
        parts: Programs that match one row locally, each in blocks of `block` tokens.
        programs: Programs that share a row's chains, from 3 to 16. slots: occurrences that each holds: 32, 64, 128 or 256.
        hits: Hits that each reads at once. search_registers, chain_registers: most registers that each launch takes a thread.
    """

    lengths: int = 8
    probes: int = 16
    parts: int = 4
    block: int = 1024
    programs: int = 16
    slots: int = 64
    hits: int = 256
    search_registers: int = 96
    chain_registers: int = 168

    def __post_init__(self) -> None:
        if not 3 <= self.programs <= PROGRAMS_MAX:
            raise ValueError(f"programs is {self.programs}; it must be in [3, {PROGRAMS_MAX}]")
        if self.slots not in (32, 64, 128, 256):
            raise ValueError(f"slots is {self.slots}; it must be 32, 64, 128 or 256")

    @staticmethod
    def of(batch: int, max_row_tokens: int) -> Launch:
        """The choice for a batch size and the longest row that the buffer can hold, from measurements on an H200."""
        parts = max(1, min(128, max_row_tokens // 1024, 8192 // batch))
        if max_row_tokens > LONG_ROW_TOKENS and batch <= 64:
            # Their hits are read again and again: more at once, and more registers, which are not short then.
            return Launch(lengths=1, probes=32, parts=parts, slots=128, hits=512, chain_registers=255)
        if batch <= 64:
            return Launch(lengths=1, probes=32, parts=parts)
        if batch <= 192:
            return Launch(lengths=2, probes=16, parts=parts, search_registers=64)
        if batch <= 384:
            return Launch(lengths=4, probes=8, parts=parts, search_registers=64)
        return Launch(lengths=8, probes=4, parts=parts, search_registers=72)


class RowMatching:
    """The launch that finds the loci of suffix lengths in every segment, and the matches in the rows themselves.

    Args:
        arena: int32 [a]; headers: int64 [namespaces, DEVICE_HEADER_WORDS]; see draftd.drafter.device_layout.
        control, pins: See DeviceDrafter.
        max_batch: Most rows of a batch.
        max_row_tokens: Most tokens of a row: the buffer's second dimension.
        params: Its k, use_local and use_corpus count.
        launch: How to spread the work; chosen by batch size if None.
        max_depth: A match has fewer tokens. searched: Suffix lengths whose loci are found. back: See local_matches.

    Attributes:
        arena, headers: What is read.
        pins: int64; those given, or anything.
        use_corpus: Rows are searched for in the index. pinned: They are, and the index is pinned meanwhile.
        found: What the next launch takes: records, loci, hits, room of hits, hit counts, histograms; see match_rows.

    Raises:
        ValueError: max_row_tokens is out of range.
    """

    def __init__(
        self, arena: torch.Tensor, headers: torch.Tensor, control: torch.Tensor | None, pins: torch.Tensor | None, *,
        max_batch: int, max_row_tokens: int, params: DraftParams, launch: Launch | None, max_depth: int, searched: int, back: int,
    ) -> None:  # fmt: skip
        if not 1 <= max_row_tokens < MAX_ROW_TOKENS:
            raise ValueError(f"max_row_tokens is {max_row_tokens}; it must be in [1, {MAX_ROW_TOKENS})")
        self.arena, self.headers = arena, headers
        self._control, self.pins = (headers, headers) if control is None or pins is None else (control, pins)
        self.use_corpus = params.use_corpus and headers.shape[0] > 0
        self.pinned = control is not None and pins is not None and self.use_corpus
        self._max_batch, self._max_row_tokens, self._params, self._launch = max_batch, max_row_tokens, params, launch
        self._max_depth, self._searched, self._back = max_depth, searched, back

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros((max_batch, *shape), dtype=torch.int32, device=arena.device)

        hits = ints(2, max_row_tokens)
        records = torch.zeros((max_batch, ROW_RECORD_WORDS), dtype=torch.int64, device=arena.device)
        self.found = (records, ints(SEGMENTS, LOCUS_LENGTHS, 2), hits, hits.stride(1), ints(2), ints(64))

    def read_from(self, arena: torch.Tensor, headers: torch.Tensor, control: torch.Tensor) -> None:
        """Reads another index from the next launch on; `headers` has the shape of those before."""
        self.arena, self.headers, self._control = arena, headers, control

    def check(self, tokens: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, namespaces: torch.Tensor, out: DeviceDrafts) -> None:
        """ValueError if the tensors do not fit; see DeviceDrafter.propose."""
        batch, k = out.tokens.shape
        if batch > self._max_batch or rows.shape[0] != batch or k != self._params.k:
            raise ValueError(f"out is for {batch} rows and k={k}; rows has {rows.shape[0]}, at most {self._max_batch}, k={self._params.k}")
        if tokens.dtype != torch.int32 or tokens.stride(1) != 1 or tokens.shape[1] > self._max_row_tokens:
            raise ValueError(f"tokens must be int32 [rows, <= {self._max_row_tokens}] with contiguous rows")
        if lengths.shape[0] != tokens.shape[0] or namespaces.shape[0] != tokens.shape[0]:
            raise ValueError(f"lengths has {lengths.shape[0]} rows and namespaces {namespaces.shape[0]}; tokens has {tokens.shape[0]}")

    def run(self, tokens: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, namespaces: torch.Tensor) -> Launch:
        """Launches it on the current stream, and answers how the batch is spread."""
        batch = rows.shape[0]
        launch = self._launch or Launch.of(batch, self._max_row_tokens)
        params = self._params
        groups = -(-self._searched // launch.lengths)
        parts = launch.parts if params.use_local else 0
        tasks = (SEGMENTS * groups if self.use_corpus else 0) + parts
        if tasks:
            compiling.launch(
                match_rows, (batch, tasks),
                self.arena, self.headers, self.headers.shape[0], self._control, self.pins,
                tokens, tokens.stride(0), tokens.shape[0], tokens.shape[1], lengths, rows, namespaces, *self.found, self._max_depth, parts,
                groups,
                USE_LOCAL=params.use_local, USE_CORPUS=self.use_corpus, PINNED=self.pinned,
                LENGTHS=launch.lengths, PROBES=launch.probes, BLOCK=launch.block,
                BACK=self._back, num_warps=1, maxnreg=launch.search_registers, **EARLY,
            )  # fmt: skip
        return launch
