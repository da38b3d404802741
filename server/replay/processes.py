"""Engines as processes of their own, free or in lockstep, and one answer from all of them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Barrier, Condition
from types import TracebackType
from typing import Self

from draftd.server.replay.engine import EngineResult, EngineSettings, replay_sessions
from draftd.server.replay.trace import Session

_LOCKSTEP_TIMEOUT_S = 300.0
_POLL_S = 0.2
_ANOTHER_FAILED = "another engine failed"
_context = multiprocessing.get_context("spawn")


class EngineFailed(Exception):
    """An engine process ended without an answer; the message says which and why."""


class _Shared:
    """What engines in lockstep share: where they meet, whose turn it is to commit, and how many still replay."""

    def __init__(self, engines: int) -> None:
        self.barrier: Barrier = _context.Barrier(engines)
        self.turn_changed: Condition = _context.Condition()
        self.turn: Synchronized[int] = _context.Value("q", 0)
        self.busy: Synchronized[int] = _context.Value("q", engines)


class _Free:
    """Every engine at its own pace."""

    def __init__(self, tokens: SynchronizedArray[int], index: int) -> None:
        self._tokens = tokens
        self._index = index

    def drafted(self) -> None:
        pass

    def committed(self, active: bool, tokens: int) -> bool:
        self._tokens[self._index] = tokens
        return active


class _Lockstep(_Free):
    """All engines draft, then they commit one after the other, then all draft again: the corpus gets everything in the same order
    each time. An engine that is through waits for the others.
    """

    def __init__(self, tokens: SynchronizedArray[int], index: int, shared: _Shared) -> None:
        super().__init__(tokens, index)
        self._shared = shared
        self._active = True

    def drafted(self) -> None:
        shared = self._shared
        shared.barrier.wait(_LOCKSTEP_TIMEOUT_S)
        with shared.turn_changed:
            while shared.turn.value != self._index:
                if shared.barrier.broken:
                    raise threading.BrokenBarrierError
                shared.turn_changed.wait(_POLL_S)

    def committed(self, active: bool, tokens: int) -> bool:
        shared = self._shared
        self._tokens[self._index] = tokens
        with shared.turn_changed:
            if self._active and not active:
                self._active = False
                shared.busy.value -= 1
            shared.turn.value = (shared.turn.value + 1) % shared.barrier.parties
            shared.turn_changed.notify_all()
        shared.barrier.wait(_LOCKSTEP_TIMEOUT_S)
        return shared.busy.value > 0


def _run(answer: Connection, settings: EngineSettings, sessions: Sequence[Session], pace: _Free, barrier: Barrier | None) -> None:
    """What an engine process does."""
    try:
        answer.send(replay_sessions(settings, sessions, pace))
    except threading.BrokenBarrierError:
        answer.send(_ANOTHER_FAILED)
    except Exception as error:  # noqa: BLE001 -- reported by the parent process, which fails with it
        answer.send(f"{type(error).__name__}: {error}")
        if barrier is not None:
            barrier.abort()


class EngineProcesses:
    """Engines that replay sessions, dealt to them in turn. A context manager that ends them.

    Args:
        settings: One for each engine; all in step mode, or none.
        sessions: All sessions.
    """

    def __init__(self, settings: Sequence[EngineSettings], sessions: Sequence[Session]) -> None:
        n = len(settings)
        self._names = [s.name for s in settings]
        self._tokens: SynchronizedArray[int] = _context.Array("q", n)
        shared = _Shared(n) if settings[0].step else None
        self._barrier = shared.barrier if shared else None
        # Kept, since the children open their semaphores by name.
        self._paces: list[_Free] = []
        self._answers: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for i, one in enumerate(settings):
            pace = _Lockstep(self._tokens, i, shared) if shared else _Free(self._tokens, i)
            self._paces.append(pace)
            receiving, sending = _context.Pipe(duplex=False)
            process = _context.Process(target=_run, args=(sending, one, sessions[i::n], pace, self._barrier), name=one.name, daemon=True)
            process.start()
            sending.close()
            self._answers.append(receiving)
            self._processes.append(process)

    @property
    def tokens(self) -> int:
        """Tokens committed so far."""
        return sum(self._tokens[:])

    def results(self, tick: Callable[[], None] = lambda: None, timeout_s: float | None = None) -> list[EngineResult]:
        """Waits for every engine; calls `tick` a few times a second meanwhile.

        Raises:
            EngineFailed: An engine failed, died, or was not through after `timeout_s` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answers: dict[int, EngineResult | str] = {}
        while len(answers) < len(self._processes):
            pending = [i for i in range(len(self._processes)) if i not in answers]
            ready = wait([self._answers[i] for i in pending], _POLL_S)
            for i in [i for i in pending if self._answers[i] in ready]:
                answers[i] = self._receive(i)
            tick()
            failures = {i: answer for i, answer in answers.items() if isinstance(answer, str)}
            for i, why in failures.items():
                # In lockstep the engine that failed first stops the others, whose answers may come before its own.
                if why != _ANOTHER_FAILED or len(answers) == len(self._processes):
                    raise EngineFailed(f"engine {self._names[i]}: {why}")
            if deadline is not None and time.monotonic() > deadline:
                raise EngineFailed(f"{len(pending)} engines were not through after {timeout_s:.0f} s")
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, EngineResult)]

    def _receive(self, i: int) -> EngineResult | str:
        try:
            answer: EngineResult | str = self._answers[i].recv()
        except EOFError:
            self._processes[i].join()
            if self._barrier is not None:
                self._barrier.abort()
            return f"ended with exit code {self._processes[i].exitcode}"
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
            process.join()
        for answer in self._answers:
            answer.close()
