"""Sorting suffixes: kernel = oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.ops.sort import oracle
from draftd.drafter.ops.sort.cpu import sort_suffixes
from tests.drafter.bench import ints
from tests.drafter.texts import MAX_TOKEN, corpora, flat


@given(texts=corpora(), depth=st.integers(2, 64), data=st.data())
def test_kernel_is_the_oracle(texts: list[list[int]], depth: int, data: st.DataObject) -> None:
    text, positions = flat(texts, depth)
    chosen = [p for p in positions if data.draw(st.booleans())] if data.draw(st.booleans()) else positions
    order = sort_suffixes(ints(text), ints(chosen), depth)
    assert order.dtype == np.int32
    assert order.tolist() == oracle.sort_suffixes(text, chosen, depth)


@pytest.mark.parametrize(
    ("texts", "depth"),
    [
        ([], 2),
        ([[0]], 2),
        ([[MAX_TOKEN]], 64),
        ([[0], [MAX_TOKEN], [0], [MAX_TOKEN]], 3),
        ([[7] * 200], 64),
        ([[1, 2] * 100, [2, 1] * 100], 64),
        ([[1, 2, 3, 4, 5]] * 40, 64),
        ([[0] * n for n in range(20)], 10),
        ([[5, 6, 7, 8, 9, i] for i in (3, 1, 2, 1)], 5),
        ([[5, 6, 7, 8, 9, i] for i in (3, 1, 2, 1)], 6),
        ([[MAX_TOKEN, 0] * 30, [0, MAX_TOKEN] * 30], 7),
    ],
    ids=["empty", "one token", "one largest token", "separators everywhere", "constant", "periodic", "equal documents",
         "prefixes of each other", "tie at depth", "decided at depth", "both ends of the vocabulary"],
)  # fmt: skip
def test_adversarial(texts: list[list[int]], depth: int) -> None:
    text, positions = flat(texts, depth)
    assert sort_suffixes(ints(text), ints(positions), depth).tolist() == oracle.sort_suffixes(text, positions, depth)


def test_what_lies_after_a_separator_does_not_count() -> None:
    texts = [[1, 2], [9], [1, 2], [0]]
    text, positions = flat(texts, 8)
    order = sort_suffixes(ints(text), ints(positions), 8).tolist()
    assert order.index(0) < order.index(5), "equal suffixes keep the order of their positions"
    assert order == oracle.sort_suffixes(text, positions, 8)
