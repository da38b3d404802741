"""Nothing that one namespace holds or does changes another's drafts, nor how much work they take: their timing class.

A draft's timing class is the length of each segment that it searches and how many suffixes it compares for each suffix length of its row,
counted in the search itself. It is a number, not a time: how busy the machine is shows in times, and is everybody's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftd.drafter import layout
from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.errors import DraftdError
from draftd.drafter.index import LIVE, MAIN, RECENT, Index
from draftd.drafter.ops.search.cpu import locus
from draftd.drafter.params import DraftParams
from draftd.drafter.records import RowContext
from tests.drafter.bench import ints
from tests.drafter.texts import corpora, documents

MINE, THEIRS = "mine", "theirs"
VOCAB = 2**21 - 1
PARAMS = (DraftParams(k=8, max_depth=16, policy="tree"), DraftParams(k=8, max_depth=16, policy="calibrated", branches=2, tau=0.01))

Act = Callable[[Corpus], None]


class Counting:
    """A suffix array that counts the suffixes looked at."""

    def __init__(self, array: NDArray[np.int32]) -> None:
        self._array = array
        self.probes = 0

    def __getitem__(self, at: int) -> Any:
        self.probes += 1
        return self._array[at]


def timing_class(corpus: Corpus, row: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Of each segment, its length and the probes for each suffix length of `row`."""
    index = corpus._get(MINE).index
    assert isinstance(index, Index)
    found = []
    for segment in (MAIN, RECENT, LIVE):
        suffixes = index.suffixes(segment)
        text = index.live_text[index.current.copies[LIVE]] if segment == LIVE else index.text
        probes = []
        for length in range(1, len(row) + 1):
            counting = Counting(suffixes)
            locus.py_func(text, counting, 0, len(suffixes), ints(row), len(row) - length, length)
            probes.append(counting.probes)
        found.append((len(suffixes), tuple(probes)))
    return found


def read_by_drafts(corpus: Corpus) -> list[bytes]:
    """All that a draft reads of its namespace: text, segments, table, calibration, and what its header says of them."""
    index = corpus._get(MINE).index
    assert isinstance(index, Index)
    version = index.current
    texts = [index.text.tobytes(), index.live_text[version.copies[LIVE]].tobytes(), index.buckets[version.copies[MAIN]].tobytes()]
    header = [
        int(index.header[word]) for word in (layout.HEADER_VOCAB, layout.HEADER_DEPTH, layout.HEADER_BUCKET_SHIFT, layout.HEADER_DROPPED)
    ]
    calibration = index.calibration[int(index.header[layout.HEADER_CALIBRATION]) & 1]
    return [*texts, *(index.suffixes(segment).tobytes() for segment in (MAIN, RECENT, LIVE)), repr(header).encode(), calibration.tobytes()]


def drafted(corpus: Corpus, row: list[int], params: DraftParams, learn: bool = True) -> list[list[Any]]:
    """What is drafted after a row, and why; what came next teaches its namespace where `learn`."""
    drafts = corpus.propose([RowContext(ints(row), MINE, False)], params)
    if learn:
        _learn(drafts.lessons, row)
    fields = (drafts.tokens, drafts.probabilities, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences)
    return [field.tolist() for field in (*fields, *([] if drafts.parents is None else [drafts.parents]))]


def _learn(lessons: Sequence[Any], truth: list[int]) -> None:
    for of in lessons:
        of.lesson.learn(np.zeros(1, np.int64), ints(truth)[None], np.array([len(truth)], np.int64))


@contextlib.contextmanager
def _corpus() -> Iterator[Corpus]:
    """A corpus without a thread of its own, so that what happens when is the test's choice."""
    corpus = Corpus(CorpusConfig(depth=16, quota_tokens=1024, recent_tokens=128, live_tokens=256))
    corpus.ensure_namespace(MINE, VOCAB)
    try:
        yield corpus
    finally:
        corpus.close()


def _refresh(corpus: Corpus) -> None:
    corpus.refresh()
    assert not corpus.refresh_errors, corpus.refresh_failure
    for namespace in list(corpus._namespaces.values()):
        namespace.segments.wait_merged()


def _ingest(text: list[int], number: int) -> Act:
    def act(corpus: Corpus) -> None:
        corpus.ensure_namespace(THEIRS, VOCAB)
        # The same ids as mine, in any order: a document's id is its namespace's.
        corpus.ingest(THEIRS, str(number), 0, ints(text), number % 2 == 0, "an engine")

    return act


def _draft(row: list[int]) -> Act:
    def act(corpus: Corpus) -> None:
        corpus.ensure_namespace(THEIRS, VOCAB)
        _learn(corpus.propose([RowContext(ints(row), THEIRS, False)], PARAMS[1]).lessons, row)

    return act


def _forget(corpus: Corpus) -> None:
    if corpus.has_namespace(THEIRS):
        corpus.advance_generation(THEIRS, 1)


def _drop(corpus: Corpus) -> None:
    if corpus.has_namespace(THEIRS):
        corpus.drop_namespace(THEIRS)


def _leave(corpus: Corpus) -> None:
    corpus.commit_owned("an engine")


ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
ACTS = st.lists(
    st.one_of(
        st.builds(_ingest, documents(80).filter(bool), st.integers(0, 5)),
        st.builds(_draft, ROWS),
        st.sampled_from([_forget, _drop, _leave]),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(mine=corpora(4, 80), before=ACTS, between=ACTS, after=ACTS, row=ROWS)
def test_nothing_of_a_namespace_changes_anothers_drafts_or_their_timing_class(
    mine: list[list[int]], before: list[Act], between: list[Act], after: list[Act], row: list[int]
) -> None:
    seen = []
    for others in ((before, between, after), ([], [], [])):
        with _corpus() as corpus:
            results: list[Any] = []

            def act(acts: list[Act], corpus: Corpus = corpus) -> None:
                for one in acts:
                    # An id that is there with other tokens is refused, as it would be for anybody.
                    with contextlib.suppress(DraftdError):
                        one(corpus)

            act(others[0])
            for i, text in enumerate(mine):
                corpus.ingest(MINE, str(i), 0, ints(text), i % 3 != 2)
                act(others[1][i : i + 1])
                _refresh(corpus)
                results += [drafted(corpus, row, params) for params in PARAMS]
            act(others[2])
            _refresh(corpus)
            results += [drafted(corpus, row, params, learn=False) for params in PARAMS]
            seen.append((results, timing_class(corpus, row), read_by_drafts(corpus)))
    (drafts, work, read), (drafts_alone, work_alone, read_alone) = seen
    assert drafts == drafts_alone
    assert work == work_alone
    assert read == read_alone


@pytest.mark.parametrize("text", [[1, 2, 3, 4, 5] * 12, [7] * 60])
def test_what_a_namespace_holds_itself_does_change_its_timing_class(text: list[int]) -> None:
    with _corpus() as corpus:
        corpus.ingest(MINE, "a", 0, ints([1, 2, 3, 1, 2]), True)
        _refresh(corpus)
        little, read = timing_class(corpus, [1, 2]), read_by_drafts(corpus)
        assert sum(probes[0] for _, probes in little) > 0
        corpus.ingest(MINE, "b", 0, ints(text), True)
        _refresh(corpus)
        assert timing_class(corpus, [1, 2]) != little
        assert read_by_drafts(corpus) != read
