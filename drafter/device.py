"""Drafting on a GPU: an index in device memory, and `propose` over an engine's own token buffer in two launches.

Everything is allocated once and nothing waits for the host, so that `propose` can be captured in a CUDA graph, also an engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from draftd.drafter.device_layout import LOCUS_LENGTHS, MAX_ROW_TOKENS, ROW_RECORD_WORDS, SEGMENTS
from draftd.drafter.drafts import Drafts
from draftd.drafter.ops.draft.gpu import draft_chains
from draftd.drafter.ops.search.gpu import match_rows
from draftd.drafter.ops.warp import INTERPRETED
from draftd.drafter.params import DraftParams

_PROGRAMS_MAX = 16
LONG_ROW_TOKENS = 32_768
"""Rows that may be longer are drafted for in another way."""
_HITS_KEPT = 1024
"""A row's hits that a program may copy to read them again and again."""
# A kernel's launch overlaps with the kernel before it; the interpreter does not know the word.
_EARLY = {} if INTERPRETED else {"launch_pdl": True}


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
        if not 3 <= self.programs <= _PROGRAMS_MAX:
            raise ValueError(f"programs is {self.programs}; it must be in [3, {_PROGRAMS_MAX}]")
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


@dataclass(slots=True)
class DeviceDrafts:
    """What `propose` fills, on the device: see draftd.drafter.drafts.Drafts. tokens int32 [n, k]; probabilities float32 [n, k];
    version int64 [n]; the others int32 [n]."""

    tokens: torch.Tensor
    probabilities: torch.Tensor
    counts: torch.Tensor
    source: torch.Tensor
    match_length: torch.Tensor
    occurrences: torch.Tensor
    version: torch.Tensor

    @staticmethod
    def empty(n: int, k: int, device: torch.device | str) -> DeviceDrafts:
        """Drafts for n rows of at most k tokens, none drafted."""
        counts, source, match_length, occurrences = (torch.zeros(n, dtype=torch.int32, device=device) for _ in range(4))
        return DeviceDrafts(
            torch.full((n, k), -1, dtype=torch.int32, device=device),
            torch.zeros((n, k), dtype=torch.float32, device=device),
            counts,
            source,
            match_length,
            occurrences,
            torch.zeros(n, dtype=torch.int64, device=device),
        )

    def numpy(self) -> Drafts:
        """A copy on the host. Waits for the device."""
        columns = (self.tokens, self.probabilities, self.counts, self.source, self.match_length, self.occurrences, self.version)
        return Drafts(*(c.cpu().numpy() for c in columns))


def draft_caps(params: DraftParams) -> torch.Tensor:
    """int32 [64]; the most tokens that a match of each length may give, on the host."""
    lengths = np.arange(64)
    allowed = lengths.astype(np.float32) * np.float32(params.spec_factor) + np.float32(params.spec_offset)
    caps = np.minimum((allowed.astype(np.float64) + 1e-6).astype(np.int64), np.minimum(params.k, params.max_depth - lengths))
    caps[0] = 0
    return torch.from_numpy(np.maximum(caps, 0).astype(np.int32))


class DeviceDrafter:
    """Drafts for batches of at most `max_batch` rows of one token buffer. One stream at a time may use it.

    Args:
        arena: int32 [a]; headers: int64 [namespaces, DEVICE_HEADER_WORDS]; see draftd.drafter.device_layout.
        control, pins: int64 [DEVICE_CONTROL_WORDS] and [PIN_WORDS]: for a reader whose writer is another process. A draft whose index was
            overwritten meanwhile is empty then, and its version is TORN. None: the writer orders its work behind this by itself.
        max_batch: Most rows of a batch.
        max_row_tokens: Most tokens of a row: the buffer's second dimension.
        params: How to draft.
        launch: How to spread the work; chosen by batch size if None.
        compiled_k, compiled_depth: The kernels are compiled for at least so many draft tokens and so long matches: drafters of smaller
            parameters that name the same share them.
    """

    def __init__(
        self, arena: torch.Tensor, headers: torch.Tensor, *, max_batch: int, max_row_tokens: int, params: DraftParams,
        launch: Launch | None = None, compiled_k: int = 2, compiled_depth: int = 16,
        control: torch.Tensor | None = None, pins: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= max_row_tokens < MAX_ROW_TOKENS:
            raise ValueError(f"max_row_tokens is {max_row_tokens}; it must be in [1, {MAX_ROW_TOKENS})")
        self.arena, self.headers, self.params = arena, headers, params
        self._control, self._pins = (headers, headers) if control is None or pins is None else (control, pins)
        self._pinned = pins is not None
        self.max_batch, self.max_row_tokens, self._launch = max_batch, max_row_tokens, launch
        device = arena.device
        self._k = triton.next_power_of_2(max(compiled_k, params.k))
        self._caps = draft_caps(params).to(device)
        self._min_prob = float(np.float32(params.min_token_prob))

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._loci = ints(max_batch, SEGMENTS, LOCUS_LENGTHS, 2)
        self._hits = ints(max_batch, 2, max_row_tokens)
        self._hit_counts = ints(max_batch, 2)
        self._histograms = ints(max_batch, 64)
        self._finished = ints(max_batch)
        self._records = torch.zeros((max_batch, ROW_RECORD_WORDS), dtype=torch.int64, device=device)
        self._best_keys = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._lengths = triton.next_power_of_2(max(compiled_depth, params.max_depth))
        chains = max_batch * 2 * self._lengths
        self._chain_tokens = ints(chains * self._k)
        self._chain_probs = torch.zeros(chains * self._k, dtype=torch.float32, device=device)
        self._chain_words = ints(chains * 2)
        self._scratch = ints(max_batch * _PROGRAMS_MAX * (_HITS_KEPT + 2 * self._k))
        if device.type == "cuda":
            # Whichever stream drafts first finds the zeros.
            torch.cuda.current_stream(device).synchronize()

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, namespaces: torch.Tensor, out: DeviceDrafts) -> None:
        """Drafts for rows of the engine's buffer, on the current stream.

        Args:
            tokens: int32 [rows, max_row_tokens], second dimension contiguous; lengths: int32 or int64 [rows].
            rows: int32 or int64 [batch]; row of the buffer of each row of the batch.
            namespaces: int32 [rows]; index of the header, -1 to draft from the row's own tokens only.
            out: Drafts for the batch; overwritten.

        What the tensors hold is not trusted: rows outside the buffer are empty, lengths are cut to it, and a namespace that there is
        not, or a token that no index holds, matches nothing.

        Raises:
            ValueError: A shape or dtype does not fit.
        """
        batch, k = out.tokens.shape
        if batch > self.max_batch or rows.shape[0] != batch or k != self.params.k:
            raise ValueError(f"out is for {batch} rows and k={k}; rows has {rows.shape[0]}, at most {self.max_batch}, k={self.params.k}")
        if tokens.dtype != torch.int32 or tokens.stride(1) != 1 or tokens.shape[1] > self.max_row_tokens:
            raise ValueError(f"tokens must be int32 [rows, <= {self.max_row_tokens}] with contiguous rows")
        if lengths.shape[0] != tokens.shape[0] or namespaces.shape[0] != tokens.shape[0]:
            raise ValueError(f"lengths has {lengths.shape[0]} rows and namespaces {namespaces.shape[0]}; tokens has {tokens.shape[0]}")
        if batch == 0:
            return
        launch = self._launch or Launch.of(batch, self.max_row_tokens)
        params = self.params
        groups = -(-(params.max_depth - 1) // launch.lengths)
        use_corpus = params.use_corpus and self.headers.shape[0] > 0
        shared = (self._records, self._loci, self._hits, self._hits.stride(1), self._hit_counts, self._histograms)
        parts = launch.parts if params.use_local else 0
        tasks = (SEGMENTS * groups if use_corpus else 0) + parts
        if tasks:
            match_rows[(batch, tasks)](
                self.arena, self.headers, self.headers.shape[0], self._control, self._pins,
                tokens, tokens.stride(0), tokens.shape[0], tokens.shape[1], lengths, rows, namespaces, *shared, params.max_depth, parts,
                groups,
                USE_LOCAL=params.use_local, USE_CORPUS=use_corpus, PINNED=self._pinned and use_corpus,
                LENGTHS=launch.lengths, PROBES=launch.probes, BLOCK=launch.block,
                BACK=self._lengths, num_warps=1, maxnreg=launch.search_registers, **_EARLY,
            )  # fmt: skip
        draft_chains[(batch, launch.programs)](
            self.arena, self.headers, self._pins, tokens, *shared, self._best_keys, self._finished,
            self._chain_tokens, self._chain_probs, self._chain_words, self._scratch, self._caps, params.max_depth, k, self._min_prob,
            out.tokens, out.probabilities, out.counts, out.source, out.match_length, out.occurrences, out.version,
            USE_LOCAL=params.use_local, USE_CORPUS=use_corpus, PINNED=self._pinned and use_corpus, LENGTHS=self._lengths, K=self._k,
            PROGRAMS=launch.programs, SLOTS=launch.slots, BLOCK=launch.hits, ROOM=_HITS_KEPT, num_warps=1, enable_fp_fusion=False,
            maxnreg=launch.chain_registers, **_EARLY,
        )  # fmt: skip
