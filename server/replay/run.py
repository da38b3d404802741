"""One replay from settings to figures: a service, engine processes, and what came of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftd.client.config import TransportName
from draftd.drafter.params import DraftParams
from draftd.server.replay.engine import EngineSettings
from draftd.server.replay.processes import EngineProcesses
from draftd.server.replay.report import summarize
from draftd.server.replay.service import PrivateService
from draftd.server.replay.trace import Session, vocab_size_of

Sharing = Literal["shared", "silo", "none"]
FREE_TIMEOUT_MS = 2.0
STEP_TIMEOUT_MS = 5000.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """A replay.

    Attributes:
        engines: Engine processes.
        sharing: `shared`, one namespace for all; `silo`, one each; `none`, each request only its own tokens.
        concurrency: Sessions at a time, in each engine.
        step: After each step, wait until what was committed can be drafted from, all engines in lockstep: figures repeat, by
            the rule `tree` exactly.
        step_ms: Least time of a step, in milliseconds: what a model would take to decode.
        timeout_ms: Longest wait of a propose; None: 2 ms, or in step mode 5 s, since a late draft would not repeat.
        vocab_size: None: the smallest that has all of the trace's tokens.
        namespace: First part of the namespaces' names.
        groups: Requests carry their session's group.
        device: Where a private service drafts.
    """

    engines: int = 1
    sharing: Sharing = "shared"
    transport: TransportName = "auto"
    params: DraftParams = field(default_factory=DraftParams)
    concurrency: int = 16
    step: bool = False
    step_ms: float = 0.0
    timeout_ms: float | None = None
    vocab_size: int | None = None
    namespace: str = "replay"
    groups: bool = False
    device: str = "cpu"

    def namespaces(self) -> list[str]:
        """The namespace of each engine."""
        return [self.namespace if self.sharing != "silo" else f"{self.namespace}/{i}" for i in range(self.engines)]

    def engine_settings(self, endpoint: str, sessions: Sequence[Session]) -> list[EngineSettings]:
        """The settings of each engine."""
        default_ms = STEP_TIMEOUT_MS if self.step else FREE_TIMEOUT_MS
        return [
            EngineSettings(
                endpoint=endpoint,
                name=f"replay-{os.getpid()}-{i}",
                namespace=namespace,
                private=self.sharing == "none",
                transport=self.transport,
                params=self.params,
                concurrency=self.concurrency,
                step=self.step,
                step_ms=self.step_ms,
                timeout_ms=self.timeout_ms or default_ms,
                vocab_size=self.vocab_size or vocab_size_of(list(sessions)),
                max_length=max(session.length for session in sessions),
                groups=self.groups,
            )
            for i, namespace in enumerate(self.namespaces())
        ]


def service_for(settings: ReplaySettings, sessions: Sequence[Session]) -> PrivateService:
    """A private service with room for a replay, not started yet."""
    longest = max(session.length for session in sessions)
    return PrivateService(
        [
            "--max-length",
            str(max(16, longest)),
            "--max-rows",
            str(max(1024, settings.concurrency)),
            "--log-level",
            "warning",
            "--device",
            settings.device,
        ]
    )


def run_replay(
    settings: ReplaySettings,
    sessions: Sequence[Session],
    endpoint: str,
    http_url: str,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:
    """Replays sessions on a running service; the figures of report.summarize.

    Args:
        progress: Called a few times a second with the tokens committed so far.

    Raises:
        EngineFailed: An engine failed.
    """
    started = time.perf_counter()
    with EngineProcesses(settings.engine_settings(endpoint, sessions), sessions) as engines:
        results = engines.results(lambda: progress(engines.tokens))
        seconds = max((result.seconds for result in results), default=time.perf_counter() - started)
        return summarize(results, seconds, endpoint, http_url, settings.namespaces())
