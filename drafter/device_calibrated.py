"""Drafting by the rule `calibrated` on a GPU: chains over an engine's own token buffer, in two launches.

Beside draftd.drafter.device, which drafts by the rule `tree`. What it learns from is on the device too; learning itself is the host's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from draftd.drafter import compiling
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_matching import EARLY, Launch, RowMatching
from draftd.drafter.drafts import Drafts
from draftd.drafter.lessons import Lesson
from draftd.drafter.ops.calibrated.cpu_mixer import EVIDENCE_FLOATS, EVIDENCE_INTS, VOTE_COUNT
from draftd.drafter.ops.calibrated.gpu import draft_calibrated
from draftd.drafter.ops.calibrated.gpu_levels import HELD, SHORT_LENGTHS, WORK_WORDS
from draftd.drafter.params import DraftParams
from draftd.drafter.policy import REACH, shipped_prior

_BACK = 32
MOST_SEARCHES = 4
COMPLETE_LEVELS = 2
DOUBT = 0.6
SEARCH_TOKENS = 3
_USUAL_K = 16
_REGISTERS = 255


@dataclass(slots=True)
class DeviceLessons:
    """What drafts were decided from, on the device: ints int32 [n, k + 1, EVIDENCE_INTS]; floats float32 [n, k + 1, EVIDENCE_FLOATS]; see
    draftd.drafter.ops.calibrated.cpu_mixer."""

    ints: torch.Tensor
    floats: torch.Tensor

    @staticmethod
    def empty(n: int, k: int, device: torch.device | str) -> DeviceLessons:
        """Lessons of n drafts of at most k tokens, none looked at."""
        ints = torch.zeros((n, k + 1, EVIDENCE_INTS), dtype=torch.int32, device=device)
        ints[:, :, VOTE_COUNT] = -1
        return DeviceLessons(ints, torch.zeros((n, k + 1, EVIDENCE_FLOATS), dtype=torch.float32, device=device))

    def first(self, n: int) -> DeviceLessons:
        """The lessons of the first n drafts, as views."""
        return DeviceLessons(self.ints[:n], self.floats[:n])

    def numpy(self, drafts: Drafts) -> Lesson:
        """A copy on the host, to learn from; what it teaches goes nowhere yet. Waits for the device.

        Args:
            drafts: What was drafted with them.
        """
        return Lesson.of_chains(drafts, self.ints.cpu().numpy(), self.floats.cpu().numpy(), None)


class DeviceCalibrated:
    """Drafts chains for batches of at most `max_batch` rows of one token buffer. One stream at a time may use it.

    Args:
        arena: int32 [a]; headers: int64 [namespaces, DEVICE_HEADER_WORDS]; see draftd.drafter.device_layout.
        control, pins: As DeviceDrafter takes them.
        prior: float32 [CALIBRATION_WORDS]; what rows are drafted by whose namespace has learned nothing; None: what the package ships.
        max_batch: Most rows of a batch.
        max_row_tokens: Most tokens of a row: the buffer's second dimension.
        params: How to draft; `branches` is taken as 1.
        launch: How to spread the first launch; chosen by batch size if None.
        compiled_k: The kernels are compiled for at least so many draft tokens.
        searches: How often a draft may look for what it follows, the first time included; complete_levels: it does so where the source
            that matches longest has not all occurrences of its longest level and so many below, 0 to 3, and the next token would be right
            with a probability below `doubt`. Less takes less time, and drafts a little worse.
        search_tokens: As so many tokens each search after the first counts, where a draft may have at most 16, or k if that is more: the
            slowest row of a batch decides.
    """

    def __init__(
        self, arena: torch.Tensor, headers: torch.Tensor, *, max_batch: int, max_row_tokens: int, params: DraftParams,
        launch: Launch | None = None, compiled_k: int = 2, searches: int = MOST_SEARCHES, complete_levels: int = COMPLETE_LEVELS,
        doubt: float = DOUBT, search_tokens: int = SEARCH_TOKENS,
        control: torch.Tensor | None = None, pins: torch.Tensor | None = None, prior: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if not params.use_local and not params.use_corpus:
            raise ValueError("use_local and use_corpus are both false: there is nothing to draft from")
        self.params = params
        device = arena.device
        self.matching = RowMatching(
            arena, headers, control, pins, max_batch=max_batch, max_row_tokens=max_row_tokens, params=params, launch=launch,
            max_depth=REACH + 1, searched=SHORT_LENGTHS, back=_BACK,
        )  # fmt: skip
        self._searches = (searches, complete_levels, doubt, search_tokens, max(params.k, _USUAL_K))
        self._k = triton.next_power_of_2(max(compiled_k, params.k))

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._work = ints(max_batch, WORK_WORDS)
        self._places = torch.zeros((max_batch, HELD), dtype=torch.int64, device=device)
        self._prior = torch.from_numpy(shipped_prior().copy()).to(device) if prior is None else prior
        self._no_lessons = DeviceLessons(ints(1), torch.zeros(1, dtype=torch.float32, device=device))
        if device.type == "cuda":
            # Whichever stream drafts first finds the zeros.
            torch.cuda.current_stream(device).synchronize()

    def propose(
        self, tokens: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, namespaces: torch.Tensor, out: DeviceDrafts,
        lessons: DeviceLessons | None = None,
    ) -> None:  # fmt: skip
        """Drafts for rows of the engine's buffer, on the current stream.

        Args:
            tokens: int32 [rows, max_row_tokens], second dimension contiguous; lengths: int32 or int64 [rows].
            rows: int32 or int64 [batch]; row of the buffer of each row of the batch.
            namespaces: int32 [rows]; index of the header, -1 to draft from the row's own tokens only.
            out: Drafts for the batch; overwritten.
            lessons: Of the batch; out: what was looked at, so that it can be learned from.

        What the tensors hold is not trusted: rows outside the buffer are empty, lengths are cut to it, and a namespace that there is
        not, or a token that no index holds, matches nothing.

        Raises:
            ValueError: A shape or dtype does not fit.
        """
        matching = self.matching
        matching.check(tokens, lengths, rows, namespaces, out)
        batch, k = out.tokens.shape
        if lessons is not None and lessons.ints.shape[:2] != (batch, k + 1):
            raise ValueError(f"lessons are for {tuple(lessons.ints.shape[:2])} rows and states; the batch has {(batch, k + 1)}")
        if batch == 0:
            return
        matching.run(tokens, lengths, rows, namespaces)
        taught = lessons or self._no_lessons
        compiling.launch(
            draft_calibrated, (batch,),
            matching.arena, matching.headers, matching.pins, tokens, *matching.found, self._prior, self._work, self._places,
            k, self.params.tau, *self._searches,
            out.tokens, out.probabilities, out.counts, out.source, out.match_length, out.occurrences, out.version,
            taught.ints, taught.floats,
            USE_LOCAL=self.params.use_local, USE_CORPUS=matching.use_corpus, PINNED=matching.pinned, EVIDENCE=lessons is not None,
            K=self._k, num_warps=1, enable_fp_fusion=False, maxnreg=_REGISTERS, **EARLY,
        )  # fmt: skip
