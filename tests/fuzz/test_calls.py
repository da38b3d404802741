"""Hostile calls of every rpc by the clock, as bench/hostile.py makes them: the service answers right after them and has not grown."""

from bench.hostile import ENGINE_EVERY, attack
from tests.fuzz.conftest import FUZZ_S


def test_service_survives_hostile_calls() -> None:
    outcome = attack(10**9, FUZZ_S, seed=1)
    assert outcome.calls > ENGINE_EVERY, "too few calls to mean anything"
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"} <= set(outcome.codes)
    assert outcome.failures == []
