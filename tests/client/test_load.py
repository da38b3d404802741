"""tau from an engine's load."""

from __future__ import annotations

import pytest

from draftd.client.load import LEAST_TAU, Load
from draftd.drafter.errors import InvalidArgument


def test_nothing_is_known_at_first() -> None:
    assert Load().tau(8) is None


def test_told_costs_give_the_share_of_a_requests_part_of_a_step() -> None:
    load = Load()
    load.tell(slot=1, step=90)
    assert load.tau(10) == pytest.approx(0.1)
    assert load.tau(1) == pytest.approx(1 / 91)
    load.tell(slot=0, step=90)
    assert load.tau(10) == LEAST_TAU


def test_where_only_verified_tokens_cost_nothing_is_drafted() -> None:
    load = Load()
    load.tell(slot=1, step=0)
    assert load.tau(4) == 1


@pytest.mark.parametrize(("slot", "step"), [(-1, 1), (1, -1), (0, 0), (float("nan"), 1)])
def test_costs_that_are_none_are_refused(slot: float, step: float) -> None:
    with pytest.raises(InvalidArgument):
        Load().tell(slot, step)


def test_costs_are_fitted_to_steps() -> None:
    load = Load()
    for i in range(40):
        load.observe(16, 7 * i % 50, 0.010 + 0.0001 * (16 + 7 * i % 50))
    assert load.tau(16) == pytest.approx(0.0016 / 0.0116, rel=0.01)


def test_steps_that_are_all_alike_tell_nothing() -> None:
    load = Load()
    for _ in range(40):
        load.observe(16, 16, 0.01)
    assert load.tau(16) is None


def test_a_change_of_costs_is_followed() -> None:
    load = Load()
    for cost in (0.0001, 0.0005):
        for i in range(400):
            load.observe(16, i % 50, 0.010 + cost * (16 + i % 50))
    assert load.tau(16) == pytest.approx(0.008 / 0.018, rel=0.02)
