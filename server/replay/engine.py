"""One replaying engine: it drafts for every active request, verifies greedily against the recorded output, and commits.

The protocol is that of `arctic_points.py`: sessions start in order, so many at a time; all drafts of a step come before any commit of
it; a request commits the accepted tokens plus one, and never past the recorded end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftd.client import Drafter
from draftd.client.config import TransportName
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import FAIL_OPEN_REASONS, SOURCES
from draftd.server.replay.trace import Session

ATTACH_TIMEOUT_S = 180.0
VISIBLE_TIMEOUT_S = 60.0


class VisibilityTimeout(Exception):
    """In step mode, what was committed did not become visible in time."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one engine replays.

    Attributes:
        name: Engine name, unique on the service.
        namespace: Namespace of its rows.
        private: Draft from each request's own tokens only, and share nothing.
        groups: Requests carry their session's group.
        concurrency: Sessions at a time.
        step: Wait after each step until what was committed can be drafted from.
        step_ms: Least time of a step, in milliseconds: what a model would take to decode.
        timeout_ms: Longest wait of a call for the service.
        max_length: Longest row, in tokens.
    """

    endpoint: str
    name: str
    namespace: str
    private: bool
    transport: TransportName
    params: DraftParams
    concurrency: int
    step: bool
    step_ms: float
    timeout_ms: float
    vocab_size: int
    max_length: int
    groups: bool = False


@dataclass(slots=True)
class EngineResult:
    """What one engine did.

    Attributes:
        steps: Request-steps: drafts asked for.
        tokens: Tokens committed.
        drafted: Drafted tokens by source, int64 [SOURCES].
        accepted: Of those, the ones accepted, int64 [SOURCES].
        propose_us: Time of each propose call, microseconds.
        fail_opens: Calls without drafts by reason.
        wrong_outputs: Turns whose committed tokens are not the recorded output.
        seconds: Time from the first step to the last.
    """

    transport: str = ""
    steps: int = 0
    tokens: int = 0
    turns: int = 0
    wrong_outputs: int = 0
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SOURCES), np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SOURCES), np.int64))
    propose_us: list[float] = field(default_factory=list)
    fail_opens: dict[str, int] = field(default_factory=dict)
    lost_tokens: int = 0
    seconds: float = 0.0


class Pace(Protocol):
    """Keeps engines together, or not; and hears how far one is."""

    def drafted(self) -> None:
        """The engine has all drafts of this step; returns when it may commit."""

    def committed(self, active: bool, tokens: int) -> bool:
        """The engine has committed a step, `tokens` so far; False once every engine is through."""


@dataclass(slots=True, eq=False)
class _Active:
    """A request in flight: its row, and what the engine has committed of its turn."""

    row: int
    session: Session
    turn: int
    context: NDArray[np.int32]
    committed: list[int] = field(default_factory=list)

    @property
    def output(self) -> NDArray[np.int32]:
        return self.session.turns[self.turn].output


def replay_sessions(settings: EngineSettings, sessions: Sequence[Session], pace: Pace) -> EngineResult:
    """Replays sessions with a drafter of its own.

    Raises:
        VisibilityTimeout: In step mode, the service stopped making tokens visible.
    """
    with Drafter(
        settings.endpoint,
        engine=settings.name,
        vocab_size=settings.vocab_size,
        k=settings.params.k,
        max_rows=settings.concurrency,
        max_length=settings.max_length,
        namespace=settings.namespace,
        transport=settings.transport,
        timeout_ms=settings.timeout_ms,
        params=settings.params,
    ) as drafter:
        drafter.wait_attached(ATTACH_TIMEOUT_S)
        result = _Engine(settings, drafter, sessions).run(pace)
    result.transport = drafter.transport
    stats = drafter.stats
    result.fail_opens = dict(zip(FAIL_OPEN_REASONS, stats.fail_opens.tolist(), strict=True))
    result.lost_tokens = int(stats.lost_tokens[0])
    return result


class _Engine:
    def __init__(self, settings: EngineSettings, drafter: Drafter, sessions: Sequence[Session]) -> None:
        self._settings = settings
        self._drafter = drafter
        self._waiting: Iterator[Session] = iter(sessions)
        self._free_rows = list(reversed(range(settings.concurrency)))
        self._active: list[_Active] = []
        self._result = EngineResult()

    def run(self, pace: Pace) -> EngineResult:
        started = time.perf_counter()
        self._fill()
        going = True
        while going:
            decoded_at = time.perf_counter() + self._settings.step_ms / 1000
            drafts = self._propose() if self._active else None
            pace.drafted()
            if drafts is not None:
                time.sleep(max(0.0, decoded_at - time.perf_counter()))
                self._commit(drafts)
                self._fill()
                if self._settings.step and not self._settings.private:
                    self._wait_visible()
            going = pace.committed(bool(self._active), self._result.tokens)
        self._result.seconds = time.perf_counter() - started
        return self._result

    def _propose(self) -> Drafts:
        rows = [active.row for active in self._active]
        started = time.perf_counter()
        drafts = self._drafter.propose(rows)
        self._result.propose_us.append((time.perf_counter() - started) * 1e6)
        return drafts

    def _commit(self, drafts: Drafts) -> None:
        """Verifies every draft as a greedy model would, and commits."""
        result = self._result
        going = []
        for i, active in enumerate(self._active):
            draft = drafts.tokens[i, : drafts.counts[i]]
            output, at = active.output, len(active.committed)
            ahead = output[at : at + len(draft)]
            wrong = np.flatnonzero(ahead != draft[: len(ahead)])
            matched = int(wrong[0]) if len(wrong) else len(ahead)
            accepted = min(matched, len(output) - at - 1)
            step = [*draft[:accepted].tolist(), int(output[at + accepted])]
            self._drafter.append(active.row, step)
            active.committed += step
            result.steps += 1
            result.tokens += len(step)
            result.drafted[drafts.source[i]] += len(draft)
            result.accepted[drafts.source[i]] += accepted
            if len(active.committed) < len(output):
                going.append(active)
            elif (following := self._end(active)) is not None:
                going.append(following)
        self._active = going

    def _end(self, active: _Active) -> _Active | None:
        """Ends a turn, checks what was committed, and starts the session's next turn if there is one."""
        self._drafter.finish(active.row)
        self._result.turns += 1
        self._result.wrong_outputs += active.committed != active.output.tolist()
        context = np.concatenate([active.context, np.array(active.committed, np.int32)])
        return self._start(active.row, active.session, active.turn + 1, context)

    def _fill(self) -> None:
        """Starts further sessions while there are rows."""
        while self._free_rows:
            session = next(self._waiting, None)
            if session is None:
                return
            active = self._start(self._free_rows.pop(), session, 0, np.empty(0, np.int32))
            if active is not None:
                self._active.append(active)

    def _start(self, row: int, session: Session, turn: int, context: NDArray[np.int32]) -> _Active | None:
        """Starts a turn; turns without output only add to the context. At the end of the session its row becomes free."""
        while turn < len(session.turns):
            context = np.concatenate([context, session.turns[turn].input])
            if len(session.turns[turn].output):
                # The id may not repeat: a replay may run twice on one service.
                group = session.group if self._settings.groups else ""
                self._drafter.start(row, context, private=self._settings.private, group=group)
                return _Active(row, session, turn, context)
            turn += 1
        self._free_rows.append(row)
        return None

    def _wait_visible(self) -> None:
        if not self._drafter.wait_visible(VISIBLE_TIMEOUT_S):
            raise VisibilityTimeout(f"what was committed was not visible after {VISIBLE_TIMEOUT_S:.0f} s")
