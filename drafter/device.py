"""Drafting on a GPU: an index in device memory, and `propose` over an engine's own token buffer in two launches.

Everything is allocated once and nothing waits for the host, so that `propose` can be captured in a CUDA graph, also an engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import triton

from draftd.drafter import compiling
from draftd.drafter.device_matching import EARLY, PROGRAMS_MAX, Launch, RowMatching
from draftd.drafter.drafts import Drafts
from draftd.drafter.ops.draft.gpu import draft_chains
from draftd.drafter.params import DraftParams

_HITS_KEPT = 1024
"""A row's hits that a program may copy to read them again and again."""


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

    def first(self, n: int) -> DeviceDrafts:
        """The drafts of the first n rows, as views."""
        return DeviceDrafts(*(getattr(self, column.name)[:n] for column in fields(self)))

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
        self.params = params
        device = arena.device
        self._lengths = triton.next_power_of_2(max(compiled_depth, params.max_depth))
        self.matching = RowMatching(
            arena, headers, control, pins, max_batch=max_batch, max_row_tokens=max_row_tokens, params=params, launch=launch,
            max_depth=params.max_depth, searched=params.max_depth - 1, back=self._lengths,
        )  # fmt: skip
        self._k = triton.next_power_of_2(max(compiled_k, params.k))
        self._caps = draft_caps(params).to(device)
        self._min_prob = float(np.float32(params.min_token_prob))

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._finished = ints(max_batch)
        self._best_keys = torch.zeros(max_batch, dtype=torch.int64, device=device)
        chains = max_batch * 2 * self._lengths
        self._chain_tokens = ints(chains * self._k)
        self._chain_probs = torch.zeros(chains * self._k, dtype=torch.float32, device=device)
        self._chain_words = ints(chains * 2)
        self._scratch = ints(max_batch * PROGRAMS_MAX * (_HITS_KEPT + 2 * self._k))
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
        matching, params = self.matching, self.params
        matching.check(tokens, lengths, rows, namespaces, out)
        batch, k = out.tokens.shape
        if batch == 0:
            return
        spread = matching.run(tokens, lengths, rows, namespaces)
        compiling.launch(
            draft_chains, (batch, spread.programs),
            matching.arena, matching.headers, matching.pins, tokens, *matching.found, self._best_keys, self._finished,
            self._chain_tokens, self._chain_probs, self._chain_words, self._scratch, self._caps, params.max_depth, k, self._min_prob,
            out.tokens, out.probabilities, out.counts, out.source, out.match_length, out.occurrences, out.version,
            USE_LOCAL=params.use_local, USE_CORPUS=matching.use_corpus, PINNED=matching.pinned, LENGTHS=self._lengths, K=self._k,
            PROGRAMS=spread.programs, SLOTS=spread.slots, BLOCK=spread.hits, ROOM=_HITS_KEPT, num_warps=1, enable_fp_fusion=False,
            maxnreg=spread.chain_registers, **EARLY,
        )  # fmt: skip
