"""Search in a suffix array: kernel = oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.ops.search import oracle
from draftd.drafter.ops.search.cpu import child, locus, run_end, run_start
from draftd.drafter.ops.sort.oracle import sort_suffixes
from tests.drafter.bench import ints
from tests.drafter.texts import MAX_TOKEN, corpora, documents, flat


def _patterns(texts: list[list[int]], extra: list[list[int]]) -> list[list[int]]:
    """Parts of the documents, and what may not be in them."""
    parts = [document[start : start + n] for document in texts for start in range(0, len(document), 3) for n in (1, 2, 5, 9)]
    return [p for p in [*parts[:40], *extra, [0], [MAX_TOKEN], [1, 1]] if p]


@given(texts=corpora(), extra=st.lists(documents(6), max_size=4), depth=st.integers(10, 64))
def test_locus_is_the_oracle(texts: list[list[int]], extra: list[list[int]], depth: int) -> None:
    text, positions = flat(texts, depth)
    order = sort_suffixes(text, positions, depth)
    for pattern in _patterns(texts, extra):
        if len(pattern) > depth:
            continue
        row = ints([99, *pattern, 98])
        assert locus(ints(text), ints(order), 0, len(order), row, 1, len(pattern)) == oracle.locus(text, order, pattern)


@given(texts=corpora(), depth=st.integers(10, 64))
def test_locus_in_a_narrowed_interval(texts: list[list[int]], depth: int) -> None:
    """An interval that holds the locus, such as a bucket, gives the same."""
    text, positions = flat(texts, depth)
    order = sort_suffixes(text, positions, depth)
    for pattern in _patterns(texts, []):
        firsts = [text[p] for p in order]
        low, high = sum(f < pattern[0] for f in firsts), sum(f <= pattern[0] for f in firsts)
        found = locus(ints(text), ints(order), low, high, ints(pattern), 0, len(pattern))
        expected = oracle.locus(text, order, pattern)
        assert found == expected or (found[0] == found[1] and expected[0] == expected[1])


@given(texts=corpora(max_tokens=40), depth=st.integers(10, 64))
def test_children_are_the_oracle(texts: list[list[int]], depth: int) -> None:
    """Intervals above and below the size from which `child` searches."""
    text, positions = flat(texts, depth)
    order = sort_suffixes(text, positions, depth)
    array, suffixes = ints(text), ints(order)
    for pattern in [*_patterns(texts, [])[:12], []]:
        low, high = oracle.locus(text, order, pattern)
        offset = len(pattern)
        expected = oracle.children(text, order, low, high, offset)
        for token in {*expected, 0, 1, 2, 3, MAX_TOKEN}:
            first, last = child(array, suffixes, low, high, offset, token)
            assert [order[i] for i in range(first, last)] == expected.get(token, [])
            if first == last:
                assert low <= first <= high
                continue
            assert run_end(array, suffixes, first, high, offset, token) == last
            for inside in {first, (first + last) // 2, last - 1}:
                assert run_start(array, suffixes, low, inside, offset, token) == first
        assert run_end(array, suffixes, high, high, offset, 0) == high


def test_nothing_in_an_empty_suffix_array() -> None:
    assert locus(ints([-1, -1]), ints([]), 0, 0, ints([1]), 0, 1) == (0, 0)
    assert child(ints([-1, -1]), ints([]), 0, 0, 1, 1) == (0, 0)
