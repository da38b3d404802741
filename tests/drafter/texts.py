"""Texts for property tests: random ones over small vocabularies, and those that suffix arrays find hard."""

from __future__ import annotations

from hypothesis import strategies as st

MAX_TOKEN = 2**21 - 2
"""The largest token of the largest vocabulary."""


def documents(max_tokens: int = 24) -> st.SearchStrategy[list[int]]:
    """One document: random, constant, periodic, or of tokens at both ends of the largest vocabulary."""
    tokens = st.one_of(st.integers(0, 2), st.sampled_from([0, MAX_TOKEN]), st.integers(0, 40))
    return st.one_of(
        st.lists(st.integers(0, 2), max_size=max_tokens),
        st.lists(tokens, max_size=max_tokens),
        st.builds(lambda token, n: [token] * n, tokens, st.integers(0, max_tokens)),
        st.builds(lambda unit, n: (unit * n)[:max_tokens], st.lists(tokens, min_size=1, max_size=4), st.integers(1, max_tokens)),
    )


def corpora(max_documents: int = 5, max_tokens: int = 24) -> st.SearchStrategy[list[list[int]]]:
    """Documents: different ones, or equal ones; single tokens put a separator at every position."""
    return st.one_of(
        st.lists(documents(max_tokens), max_size=max_documents),
        st.builds(lambda document, n: [document] * n, documents(max_tokens), st.integers(1, max_documents)),
        st.lists(st.lists(st.integers(0, 2), max_size=1), max_size=4 * max_documents),
    )


def flat(texts: list[list[int]], depth: int) -> tuple[list[int], list[int]]:
    """The text of the documents, each ended by a separator, with `depth` guard tokens at the end; where their tokens are."""
    text: list[int] = []
    positions: list[int] = []
    for document in texts:
        positions += range(len(text), len(text) + len(document))
        text += [*document, -1]
    return text + [-1] * (depth + 1), positions
