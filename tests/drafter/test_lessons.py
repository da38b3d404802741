"""Collecting what drafts teach, and merging it: nothing is lost or counted twice, and nothing impossible is believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftd.drafter import policy
from draftd.drafter.calibration import Calibration
from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.drafts import Drafts, accepted_of
from draftd.drafter.index import Index
from draftd.drafter.layout import HEADER_CALIBRATION, LEARNING_BUSY, LEARNING_HALF, LEARNING_WORDS
from draftd.drafter.lessons import Learned
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import IndexReader
from draftd.drafter.records import RowContext
from draftd.drafter.rows import RowBlock
from tests.drafter.bench import ints

PARAMS = DraftParams(k=8)


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    """A corpus without a thread, which holds one document three times."""
    made = Corpus(CorpusConfig(shm_root=tmp_path, quota_tokens=4096, recent_tokens=1024, live_tokens=1024))
    made.ensure_namespace("n", 100)
    for i in range(3):
        made.ingest("n", str(i), 0, ints(range(20)), True)
    made.refresh()
    yield made
    made.close()


def draft(corpus: Corpus) -> Drafts:
    return corpus.propose([RowContext(ints([3, 4, 5]), "n", False)], PARAMS)


def learn(drafts: Drafts, truth: list[int]) -> None:
    for lessons in drafts.lessons:
        lessons.lesson.learn(lessons.places, ints(truth)[None], np.array([len(truth)]))


def trials(values: NDArray[np.float32]) -> float:
    return float(values[policy.COARSE_AT + 1 : policy.REFINED_AT : 2].sum())


def index_of(corpus: Corpus) -> Index:
    index = corpus._namespaces["n"].index
    assert isinstance(index, Index)
    return index


def test_what_the_services_own_drafts_teach_is_in_force_after_a_refresh(corpus: Corpus) -> None:
    index = index_of(corpus)
    before = index.calibration[index.header[HEADER_CALIBRATION] % 2].copy()
    drafts = draft(corpus)
    assert drafts.row(0)[:4] == [6, 7, 8, 9]
    learn(drafts, [6, 7, 8, 99])
    corpus.refresh()
    after = index.calibration[index.header[HEADER_CALIBRATION] % 2]
    assert trials(after) > trials(before)
    info = corpus.namespace("n")
    assert sum(d.drafted for d in info.deciles) == drafts.counts[0]
    assert sum(d.accepted * d.drafted for d in info.deciles) == pytest.approx(3)
    assert 0 < info.brier_score < 1
    assert draft(corpus).probabilities[0, 3] != drafts.probabilities[0, 3]


def test_what_an_engine_learns_in_its_row_block_is_merged(corpus: Corpus) -> None:
    """The mapped path: the engine drafts by itself and the service reads what it has learned."""
    block = RowBlock.open(corpus.rows.attach("engine", 4, 64, ["n"]))
    block.start(0, "d", ints([3, 4, 5]), 3, 0, False)
    reader = IndexReader.open(corpus.control_spec(), {"n": corpus.index_spec("n")}, block)
    reader.learn_into("n", block.learned(0, reserve=True))
    drafts = reader.propose(np.array([0], np.int32), None, PARAMS)
    learn(drafts, [6, 7])
    assert not any(d.drafted for d in corpus.namespace("n").deciles)
    corpus.refresh()
    assert sum(d.drafted for d in corpus.namespace("n").deciles) == 2
    corpus.refresh()
    assert sum(d.drafted for d in corpus.namespace("n").deciles) == 2, "taken twice"


def test_what_a_row_was_told_is_learned_though_nothing_was_drafted(corpus: Corpus) -> None:
    """It needs no exploration: also where tau forbids every draft the votes are judged."""
    drafts = corpus.propose([RowContext(ints([3, 4, 5]), "n", False)], DraftParams(k=8, tau=1.0))
    assert drafts.counts[0] == 0
    before = trials(index_of(corpus).calibration[0])
    learn(drafts, [6])
    corpus.refresh()
    index = index_of(corpus)
    assert trials(index.calibration[index.header[HEADER_CALIBRATION] % 2]) > before


def test_halves_are_turned_over_and_a_busy_one_is_left_for_later(corpus: Corpus) -> None:
    words, halves = np.zeros(LEARNING_WORDS, np.int64), np.zeros((2, policy.CALIBRATION_WORDS), np.float32)
    learned = Learned(words, halves)
    lesson = draft(corpus).lessons[0].lesson
    one = (np.array([0]), ints([6])[None], np.array([1]))
    assert learned.take() is None
    learned.learn(lesson, *one)
    words[LEARNING_BUSY] = int(words[LEARNING_HALF]) + 1
    assert learned.take() is None, "the reader is still adding to that half"
    words[LEARNING_BUSY] = 0
    learned.learn(lesson, *one)
    taken = [t for t in (learned.take(), learned.take(), learned.take()) if t is not None]
    assert len(taken) == 2
    assert (taken[0] == taken[1]).all()
    assert not halves.any()


@pytest.mark.parametrize("wrong", ["nan", "more hits than trials", "negative", "a step too far", "more accepted than drafted"])
def test_what_cannot_have_been_learned_is_refused(corpus: Corpus, wrong: str) -> None:
    """An engine shares the memory that it learns into: what it writes there must not spoil everybody's drafts."""
    delta = np.zeros(policy.CALIBRATION_WORDS, np.float32)
    learn_one = draft(corpus).lessons[0].lesson
    learn_one.teach(np.array([0]), ints([6])[None], np.array([1]), delta)
    calibration = Calibration(index_of(corpus))
    calibration.take_in([delta])
    assert (calibration.refused, calibration.changes) == (0, 1)
    bad = delta.copy()
    at = {"nan": 5, "more hits than trials": 0, "negative": 1, "a step too far": policy.WEIGHTS_AT, "more accepted than drafted": -2}[wrong]
    bad[at] = {"nan": np.nan, "more hits than trials": 7, "negative": -1, "a step too far": 3, "more accepted than drafted": 9}[wrong]
    before = calibration.values.copy()
    calibration.take_in([bad])
    assert calibration.refused == 1
    assert (calibration.values == before).all()


def test_a_calibration_goes_on_from_its_bytes_and_from_the_prior_where_they_are_no_calibration(corpus: Corpus) -> None:
    index = index_of(corpus)
    first = Calibration(index)
    assert (first.values == policy.shipped_prior()).all()
    first.values[7] += 1
    assert (Calibration(index, first.to_bytes()).values == first.values).all()
    for wrong in (b"", b"1234", first.to_bytes()[:-4], np.full_like(first.values, np.inf).tobytes()):
        assert (Calibration(index, wrong).values == policy.shipped_prior()).all()


def test_a_calibration_from_before_there_were_groups_is_taken_over(corpus: Corpus) -> None:
    """Votes of own tokens and of the corpus find what theirs were worth; those of groups start blank."""
    now = np.arange(1, policy.CALIBRATION_WORDS + 1, dtype=np.float32)
    tables = np.split(now, [policy.COARSE_AT, policy.REFINED_AT])
    before = np.concatenate([tables[0].reshape(3, -1)[:2].ravel(), tables[1].reshape(3, -1)[:2].ravel(), tables[2]])
    values = Calibration(index_of(corpus), before.tobytes()).values
    for first, last in ((policy.FINE_AT, policy.COARSE_AT), (policy.COARSE_AT, policy.REFINED_AT)):
        got, cells = values[first:last].reshape(3, -1), now[first:last].reshape(3, -1)
        assert (got[:2] == cells[:2]).all()
        assert not got[2].any()
    assert (values[policy.REFINED_AT :] == tables[2]).all()


def test_sleeping_and_waking_keeps_what_was_learned(corpus: Corpus) -> None:
    learn(draft(corpus), [6, 7])
    corpus.refresh()
    deciles = corpus.namespace("n").deciles
    kept, _ = corpus.put_to_sleep("n")
    assert corpus.restore(kept, []).deciles == deciles


def test_accepted_tokens_of_a_tree() -> None:
    """5 and 6 may come first, 7 after 5, 8 after 7."""
    tokens, parents = [5, 6, 7, 8], [-1, -1, 0, 2]
    assert accepted_of(tokens, parents, [5, 7, 8]) == 3
    assert accepted_of(tokens, parents, [6, 7]) == 1
    assert accepted_of(tokens, parents, [7]) == 0
    assert accepted_of(tokens, parents, []) == 0


def test_parts_of_a_batch_keep_their_lessons_and_trees(corpus: Corpus) -> None:
    """Rows of several namespaces, and private ones, are drafted for apart and answered together."""
    params = DraftParams(k=8, branches=3)
    rows = [RowContext(ints([9, 1, 9, 1]), "n", True), RowContext(ints([3, 4, 5]), "n", False)]
    drafts = corpus.propose(rows, params)
    assert drafts.parents is not None
    assert [lessons.rows.tolist() for lessons in drafts.lessons] == [[1]]
    taken = drafts.take(np.array([1]))
    assert taken.parents is not None
    assert taken.row(0) == drafts.row(1)
    assert [lessons.rows.tolist() for lessons in taken.lessons] == [[0]]
