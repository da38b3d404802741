"""Learning from drafts once it is known what the engine committed: what was drafted and why, and where what it teaches is collected.

Readers collect, in memory that the service reads too; the service takes it at each refresh (draftd.drafter.calibration).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.drafts import Drafts, chains
from draftd.drafter.layout import LEARNING_BUSY, LEARNING_HALF, LEARNING_STATES, LEARNING_WORDS
from draftd.drafter.ops.calibrated.cpu_learn import learn
from draftd.drafter.ops.calibrated.cpu_mixer import (
    CANDIDATE_COUNT,
    CANDIDATE_TOKENS,
    EVIDENCE_FLOATS,
    EVIDENCE_INTS,
    PROBABILITIES,
    VOTE_COUNT,
)
from draftd.drafter.ops.intrinsics import observe, publish
from draftd.drafter.policy import CALIBRATION_WORDS


class Learned:
    """What one reader has learned in one namespace and the service has not taken yet.

    One thread learns and one takes, in different processes or not. The service turns over which half is added to, then takes the other one
    unless the reader has not left it yet: nothing waits, and what is not taken now is taken later.

    Args:
        words: int64 [LEARNING_WORDS].
        halves: float32 [2, CALIBRATION_WORDS].
    """

    def __init__(self, words: NDArray[np.int64], halves: NDArray[np.float32]) -> None:
        self._words, self._halves = words, halves

    @staticmethod
    def in_process() -> Learned:
        """One whose reader is this process."""
        return Learned(np.zeros(LEARNING_WORDS, np.int64), np.zeros((2, CALIBRATION_WORDS), np.float32))

    def learn(self, lesson: Lesson, places: NDArray[np.int64], truth: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Adds what the drafts at `places` teach; see Lesson.learn."""
        half = -1
        while int(observe(self._words, LEARNING_HALF)) & 1 != half:
            half = int(observe(self._words, LEARNING_HALF)) & 1
            publish(self._words, LEARNING_BUSY, half + 1)
        lesson.teach(places, truth, lengths, self._halves[half])
        self._words[LEARNING_STATES + half] += len(places)
        publish(self._words, LEARNING_BUSY, 0)

    def take(self) -> NDArray[np.float32] | None:
        """What was learned since the last call, float32 [CALIBRATION_WORDS]; None if there is nothing, or not yet."""
        if not self._words[LEARNING_STATES] and not self._words[LEARNING_STATES + 1]:
            return None
        half = int(self._words[LEARNING_HALF]) & 1
        publish(self._words, LEARNING_HALF, 1 - half)
        if int(observe(self._words, LEARNING_BUSY)) == half + 1 or not self._words[LEARNING_STATES + half]:
            return None
        taken = self._halves[half].copy()
        self._halves[half] = 0
        self._words[LEARNING_STATES + half] = 0
        return taken


@dataclass(slots=True, eq=False)
class Lesson:
    """Drafts of n rows with what they were decided from.

    Attributes:
        drafts: The drafts.
        parents: int32 [n, k]; the place of the token before each one, -1 for first tokens.
        ints: int32 [n, k + 1, EVIDENCE_INTS]; floats: float32 [n, k + 1, EVIDENCE_FLOATS]; see draftd.drafter.ops.calibrated.cpu_mixer.
        learned: Where what they teach goes; None: nowhere.
    """

    drafts: Drafts
    parents: NDArray[np.int32]
    ints: NDArray[np.int32]
    floats: NDArray[np.float32]
    learned: Learned | None

    @staticmethod
    def unset(drafts: Drafts, learned: Learned | None) -> Lesson:
        """A lesson for a kernel to fill."""
        n, k = drafts.tokens.shape
        return Lesson(
            drafts,
            np.empty((n, k), np.int32),
            np.empty((n, k + 1, EVIDENCE_INTS), np.int32),
            np.empty((n, k + 1, EVIDENCE_FLOATS), np.float32),
            learned,
        )

    @staticmethod
    def of_chains(drafts: Drafts, ints: NDArray[np.int32], floats: NDArray[np.float32], learned: Learned | None) -> Lesson:
        """A lesson of drafts that are chains; see the attributes."""
        parents = chains(*drafts.tokens.shape)
        parents[drafts.tokens < 0] = -1
        return Lesson(drafts, parents, ints, floats, learned)

    def candidates(self, row: int, state: int) -> list[tuple[int, float]]:
        """What might have come after a drafted token (state 0: first), each with its mixed probability, the likeliest first."""
        ints, floats = self.ints[row, state], self.floats[row, state]
        count = int(ints[CANDIDATE_COUNT]) if ints[VOTE_COUNT] >= 0 else 0
        pairs = zip(ints[CANDIDATE_TOKENS:][:count].tolist(), floats[PROBABILITIES:][:count].tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])

    def learn(self, places: NDArray[np.int64], truth: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Learns from what came after some of the drafts. Each may be learned from once.

        Args:
            places: int64 [m]; which drafts.
            truth: int32 [m, any]; what the engine committed after each; lengths: int64 [m]; how many tokens.
        """
        if self.learned is not None and len(places):
            self.learned.learn(self, places, truth, lengths)

    def teach(self, places: NDArray[np.int64], truth: NDArray[np.int32], lengths: NDArray[np.int64], delta: NDArray[np.float32]) -> None:
        """Adds what drafts teach to `delta`, float32 [CALIBRATION_WORDS]; see learn."""
        drafts = self.drafts
        learn(
            places, drafts.tokens, drafts.probabilities, self.parents, drafts.counts, self.ints, self.floats, truth, lengths, delta
        )  # fmt: skip


def warm_up(k: int) -> None:
    """Compiles what learning from drafts of at most k tokens runs, so that nobody waits for that in between."""
    lesson = Lesson.unset(Drafts.empty(1, k), Learned.in_process())
    lesson.parents[:] = -1
    lesson.ints[:] = 0
    lesson.ints[:, :, VOTE_COUNT] = -1
    lesson.floats[:] = 0
    lesson.learn(np.zeros(1, np.int64), np.zeros((1, k + 1), np.int32), np.zeros(1, np.int64))
