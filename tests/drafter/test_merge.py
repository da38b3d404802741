"""Merging suffixes with eviction, and the first-token table: kernel = oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.ops.merge import oracle
from draftd.drafter.ops.merge.cpu import compare, fill_buckets, merge
from draftd.drafter.ops.sort.oracle import sort_suffixes, suffix
from tests.drafter.bench import ints
from tests.drafter.texts import MAX_TOKEN, corpora, flat


def _merge(text: list[int], old: list[int], new: list[int], depth: int, start: int = 0, length: int = 0, ring: int = 1) -> list[int]:
    out = np.full(len(old) + len(new) + 1, -7, np.int32)
    written = merge(ints(text), ints(old), ints(new), out, depth=depth, evict_start=start, evict_length=length, ring=ring)
    assert (out[written:] == -7).all() or written < len(old) + len(new)
    assert out[-1] == -7, "more was written than there is"
    return [int(p) for p in out[:written]]


@given(texts=corpora(max_documents=6), depth=st.integers(2, 64), cut=st.floats(0, 1))
def test_kernel_is_the_oracle(texts: list[list[int]], depth: int, cut: float) -> None:
    text, positions = flat(texts, depth)
    split = round(cut * len(positions))
    old, new = (sort_suffixes(text, part, depth) for part in (positions[:split], positions[split:]))
    merged = _merge(text, old, new, depth)
    assert merged == oracle.merge(text, old, new, set(), depth)
    assert merged == sort_suffixes(text, positions, depth), "what is older lies before what is newer here, so it is a sort"


@given(texts=corpora(max_documents=6), depth=st.integers(2, 16), data=st.data())
def test_eviction_is_the_oracle(texts: list[list[int]], depth: int, data: st.DataObject) -> None:
    """The evicted stretch may wrap around the ring's end."""
    text, positions = flat(texts, depth)
    ring = len(text)
    start = data.draw(st.integers(0, ring - 1))
    length = data.draw(st.integers(0, ring))
    evicted = {p for p in range(ring) if (p - start) % ring < length}
    kept = [p for p in positions if p not in evicted]
    new = [p for p in kept if data.draw(st.booleans())]
    old = sort_suffixes(text, [p for p in positions if p not in new], depth)
    new = sort_suffixes(text, new, depth)
    assert _merge(text, old, new, depth, start, length, ring) == oracle.merge(text, old, new, evicted, depth)


@pytest.mark.parametrize("depth", [2, 5, 64])
def test_equal_suffixes_old_first(depth: int) -> None:
    text, positions = flat([[3, 3, 3, 3]] * 6, depth)
    old = sort_suffixes(text, positions[12:], depth)
    new = sort_suffixes(text, positions[:12], depth)
    assert _merge(text, old, new, depth) == oracle.merge(text, old, new, set(), depth)


def test_nothing_to_merge() -> None:
    text, positions = flat([[1, 0, 2]], 4)
    order = sort_suffixes(text, positions, 4)
    assert _merge(text, [], [], 4) == []
    assert _merge(text, order, [], 4) == order
    assert _merge(text, [], order, 4) == order
    assert _merge(text, order, [], 4, 0, len(text), len(text)) == []


@given(texts=corpora(max_documents=3), depth=st.integers(2, 64))
def test_compare_orders_as_the_oracle_does(texts: list[list[int]], depth: int) -> None:
    text, positions = flat(texts, depth)
    array = ints(text)
    for a in positions[:12]:
        for b in positions[-12:]:
            x, y = suffix(text, a, depth), suffix(text, b, depth)
            assert compare(array, a, b, depth) == (x > y) - (x < y)


@given(texts=corpora(), shift=st.integers(0, 21))
def test_buckets_point_to_the_first_suffix_of_a_token(texts: list[list[int]], shift: int) -> None:
    shift = max(shift, 12) if any(t > 40 for document in texts for t in document) else shift
    top = max((t for document in texts for t in document), default=0) if shift < 12 else MAX_TOKEN
    text, positions = flat(texts, 8)
    order = sort_suffixes(text, positions, 8)
    buckets = np.full((top >> shift) + 2, -7, np.int32)
    fill_buckets(ints(text), ints(order), shift, buckets)
    assert buckets.tolist() == [sum(text[p] < bucket << shift for p in order) for bucket in range(len(buckets) - 1)] + [len(order)]
