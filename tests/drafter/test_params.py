"""Parameters of the draft rule: ranges, and errors that name the field and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import MAX_DEPTH, MAX_K, DraftParams


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("k", 1, MAX_K), ("max_depth", 2, MAX_DEPTH), ("spec_factor", 0, 1000), ("spec_offset", -1000, 1000), ("min_token_prob", 0, 1)],
)
def test_range(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(DraftParams(**{name: value}), name) == value  # type: ignore[arg-type]
    wrong: list[Any] = [low - 1, high + 1, float("nan"), float("inf"), float("-inf")]
    for value in wrong:
        with pytest.raises(InvalidArgument) as caught:
            DraftParams(**{name: value})
        assert caught.value.field == f"parameters.{name}"
        assert f"parameters.{name} is {value}; it must be in [{low}, {high}]" in str(caught.value)
        assert caught.value.code == "INVALID_ARGUMENT"
