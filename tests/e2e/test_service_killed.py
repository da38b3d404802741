"""Engine processes replay while the service is killed with SIGKILL and started again: all finish, and no output changes."""

from pathlib import Path

import pytest

from draftd.client.config import TransportName
from draftd.server.replay.chaos import replay_with_kills
from draftd.server.replay.run import ReplaySettings
from draftd.server.replay.trace import load_trace

SAMPLE = Path(__file__).parents[2] / "samples" / "specbench_math_reasoning.jsonl.gz"


@pytest.mark.parametrize("transport", ["mapped", "inline"])
def test_engines_finish_exactly_while_the_service_is_killed(transport: TransportName) -> None:
    sessions = load_trace(str(SAMPLE))
    settings = ReplaySettings(engines=2, transport=transport, concurrency=2, step_ms=6.0, timeout_ms=20.0)
    replayed = replay_with_kills(settings, sessions, kill_every_s=2.0, timeout_s=200)
    assert replayed.kills >= 1
    assert len(replayed.results) == 2
    assert sum(result.tokens for result in replayed.results) == sum(len(turn.output) for s in sessions for turn in s.turns)
    for result in replayed.results:
        assert result.wrong_outputs == 0
        assert sum(result.fail_opens.values()) > 0
        assert result.drafted.sum() > 0
