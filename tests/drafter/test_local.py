"""Matching a row against itself: kernel = oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.ops.local import oracle
from draftd.drafter.ops.local.cpu import matches
from tests.drafter.bench import ints
from tests.drafter.texts import MAX_TOKEN, documents


def _matches(row: list[int], longest: int) -> dict[int, int]:
    ends, lengths = np.full(len(row) + 1, -7, np.int32), np.full(len(row) + 1, -7, np.int32)
    found = matches(ints([*row, row[-1]]), len(row), longest, ends, lengths)
    assert (ends[found:] == -7).all()
    assert ends[:found].tolist() == sorted(ends[:found].tolist())
    return dict(zip(ends[:found].tolist(), lengths[:found].tolist(), strict=True))


@given(row=documents(90).filter(bool), longest=st.integers(1, 63))
def test_kernel_is_the_oracle(row: list[int], longest: int) -> None:
    assert _matches(row, longest) == oracle.matches(row, longest)


@given(before=st.integers(0, 200), gap=st.integers(0, 140), longest=st.integers(1, 63), tail=documents(20).filter(bool))
def test_one_hit_anywhere_in_skipped_blocks(before: int, gap: int, longest: int, tail: list[int]) -> None:
    """Blocks of tokens that are not the last one, around an occurrence at any offset in its block."""
    row = [50] * before + tail + [51] * gap + tail
    assert _matches(row, longest) == oracle.matches(row, longest)


@pytest.mark.parametrize(
    "row",
    [[0], [MAX_TOKEN], [0, 0], [0, MAX_TOKEN, 0], [1] * 300, [1, 2, 3] * 80, [9] * 127 + [8], [8] + [9] * 128 + [8], [8] + [9] * 63 + [8]],
    ids=["one token", "largest token", "two", "both ends", "constant", "periodic", "none", "first", "at a block's edge"],
)  # fmt: skip
def test_adversarial(row: list[int]) -> None:
    for longest in (1, 2, 63):
        assert _matches(row, longest) == oracle.matches(row, longest)
