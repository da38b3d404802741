"""Replaying while the service is killed and restarted again and again: what engines must come through unharmed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from draftd.server.replay.engine import EngineResult
from draftd.server.replay.processes import EngineProcesses
from draftd.server.replay.run import ReplaySettings
from draftd.server.replay.service import PrivateService
from draftd.server.replay.trace import Session


@dataclass(frozen=True, slots=True)
class KilledReplay:
    """A replay with kills: what each engine did, and how often the service was killed while they ran."""

    results: list[EngineResult]
    kills: int


def replay_with_kills(
    settings: ReplaySettings, sessions: Sequence[Session], kill_every_s: float, timeout_s: float | None = None
) -> KilledReplay:
    """Replays on a private service that is killed with SIGKILL every `kill_every_s` seconds and started again at once on its socket.

    The first kill comes that long after the first token.

    Raises:
        EngineFailed: An engine failed, or was not through after `timeout_s` seconds.
    """
    kills = 0
    next_kill: float | None = None
    with PrivateService(http=False) as service, EngineProcesses(settings.engine_settings(service.endpoint, sessions), sessions) as engines:

        def tick() -> None:
            nonlocal kills, next_kill
            if next_kill is None:
                next_kill = time.monotonic() + kill_every_s if engines.tokens else None
            elif time.monotonic() >= next_kill:
                service.kill()
                service.spawn()
                kills += 1
                next_kill += kill_every_s

        return KilledReplay(engines.results(tick, timeout_s), kills)
