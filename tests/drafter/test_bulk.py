"""Filling an empty index at once: what is in force afterwards, and that everything goes on from there as if it had grown that way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.errors import NotFound, ResourceExhausted
from draftd.drafter.index import MAIN
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.params import DraftParams
from draftd.drafter.records import RowContext, StoredDocument
from tests.drafter.bench import Bench, ints
from tests.drafter.texts import corpora, documents

PARAMS = DraftParams(k=4, max_depth=8, policy="tree")


class _Filled(Bench):
    """A Bench whose index was filled at once with `texts`, oldest first."""

    def __init__(self, texts: list[list[int]], quota: int = 64) -> None:
        super().__init__(vocab=2**21 - 1, depth=8, quota=quota, recent=16, live=64)
        stored = [StoredDocument(f"stored-{i}", ints(text), i, 1000 + i) for i, text in enumerate(texts) if text]
        self.segments.load(reversed(stored), 0)
        for document in self.documents.committed.values():
            self.known.append(document)
            self.copies[id(document)] = next(s.tokens.tolist() for s in stored if s.document_id == document.id)
        self._visible = {key: len(copy) for key, copy in self.copies.items()}
        self.log = list(self.documents.pieces)
        self._logged = {id(piece) for piece in self.log}


@settings(max_examples=60)
@given(texts=corpora(), row=st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_every_suffix_is_there_and_drafts_are_the_oracles(texts: list[list[int]], row: list[int]) -> None:
    filled = _Filled(texts, quota=256)
    filled.check()
    assert [filled.copies[id(d)] for d in filled.documents.committed.values()] == [text for text in texts if text]
    filled.assert_drafts([row, *(text[:3] for text in texts if text)], PARAMS)
    filled.close()


@settings(max_examples=60)
@given(texts=corpora(8), later=st.lists(documents(), max_size=8), row=st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_what_comes_later_evicts_the_oldest_first(texts: list[list[int]], later: list[list[int]], row: list[int]) -> None:
    filled = _Filled(texts)
    for i, text in enumerate(later):
        filled.ingest(str(i), text, complete=True)
        filled.refresh()
        filled.check()
    filled.settle()
    filled.check()
    filled.assert_drafts([row], PARAMS)
    filled.close()


@settings(max_examples=60)
@given(texts=corpora(12))
def test_the_newest_that_fit_are_taken(texts: list[list[int]]) -> None:
    filled = _Filled(texts, quota=200)
    texts = [text for text in texts if text]
    taken = [filled.copies[id(document)] for document in filled.documents.committed.values()]
    assert taken == texts[len(texts) - len(taken) :], "not the newest, or not in their order"
    if len(taken) < len(texts):
        # A document of up to 24 tokens is in one piece.
        assert filled.segments._used + len(texts[-len(taken) - 1]) + 1 > 200, "there was room for one more"
    filled.close()


def test_document_of_many_pieces_and_one_that_cannot_fit() -> None:
    long, too_long = [i % 7 for i in range(100)], [1] * 257
    filled = _Filled([long, too_long, [5, 6]], quota=256)
    assert list(filled.documents.committed) == ["stored-0", "stored-2"]
    assert len(filled.documents.committed["stored-0"].pieces) > 1
    filled.check()
    filled.close()


def test_of_one_id_twice_the_newest_is_taken() -> None:
    bench = Bench()
    old, new = (StoredDocument("same", ints(tokens), 0, us) for us, tokens in ((1, [1, 1]), (2, [2, 2, 2])))
    bench.segments.load(iter([new, old]), 0)
    assert [(d.length, d.committed_us) for d in bench.documents.committed.values()] == [(3, 2)]
    assert bench.index.current.lengths[MAIN] == 3
    bench.close()


def test_nothing_to_load_publishes_nothing() -> None:
    bench = Bench()
    number = bench.index.current.number
    bench.segments.load(iter([]), 3)
    assert (bench.index.current.number, bench.segments.evict_before) == (number, 3)
    bench.check()
    bench.close()


# -- the corpus --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus() -> Iterator[Corpus]:
    made = Corpus(CorpusConfig(depth=16, quota_tokens=2048, recent_tokens=256, live_tokens=256, max_namespaces=2, quotas=(("big*", 4096),)))
    made.start()
    yield made
    made.close()


def _kept(name: str) -> KeptNamespace:
    return KeptNamespace(7, name, 100, "tokenizer", 5, 3)


def test_restored_namespace_is_as_it_was_kept(corpus: Corpus) -> None:
    info = corpus.restore(_kept("n"), iter([StoredDocument("d", ints([1, 2, 3, 4]), 4, 99)]))
    assert (info.name, info.vocab_size, info.tokenizer_fingerprint, info.generation) == ("n", 100, "tokenizer", 5)
    (document,) = corpus.documents("n")
    assert (document.document_id, document.tokens.tolist(), document.generation, document.committed_us) == ("d", [1, 2, 3, 4], 4, 99)
    assert corpus.propose([RowContext(ints([1, 2]), "n", False)], PARAMS).row(0) == [3, 4]
    assert corpus.ingest("n", "d", 0, ints([1, 2, 3, 4]), True).kept_tokens == 0
    assert corpus.add("n", "old", ints([9]), 2) == 0, "its generation has been given up"
    assert corpus.add("n", "d", ints([9]), 5) == 0, "its id is there"
    assert corpus.add("n", "new", ints([9]), 6) == 1
    assert corpus.namespace("n").generation == 6
    corpus.advance_generation("n", keep=2)
    assert corpus.wait_visible(corpus.ticket(), 30)
    assert corpus.settle()
    assert [d.document_id for d in corpus.documents("n")] == ["new"]


def test_no_room_for_another_namespace(corpus: Corpus) -> None:
    corpus.ensure_namespace("a", 10)
    corpus.ensure_namespace("b", 10)
    before = sorted(path.name for path in corpus._dir.path.iterdir())
    with pytest.raises(ResourceExhausted, match="2 namespaces"):
        corpus.restore(_kept("c"), iter([]))
    assert sorted(path.name for path in corpus._dir.path.iterdir()) == before


def test_a_namespace_that_sleeps_is_gone_until_it_is_restored(corpus: Corpus) -> None:
    corpus.ensure_namespace("n", 100)
    corpus.ingest("n", "d", 0, ints([1, 2, 3, 4]), True)
    assert corpus.idle_for_s("n") < 60
    documents_ = list(corpus.documents("n"))
    kept, info = corpus.put_to_sleep("n")
    assert (kept.name, info.documents) == ("n", 1)
    with pytest.raises(NotFound):
        corpus.namespace("n")
    with pytest.raises(NotFound):
        corpus.idle_for_s("n")
    corpus.restore(kept, reversed(documents_))
    assert corpus.propose([RowContext(ints([1, 2]), "n", False)], PARAMS).row(0) == [3, 4]


def test_an_open_document_keeps_its_namespace_awake(corpus: Corpus) -> None:
    corpus.ensure_namespace("n", 100)
    corpus.ingest("n", "d", 0, ints([1]), False)
    assert corpus.idle_for_s("n") == 0


def test_quota_of_a_pattern(corpus: Corpus) -> None:
    corpus.ensure_namespace("big/one", 10)
    corpus.ensure_namespace("small", 10)
    assert [info.quota_tokens for info in corpus.namespaces()] == [4096, 2048]


def test_tokens_of_committed_documents_are_read_wherever_they_lie(corpus: Corpus) -> None:
    corpus.ensure_namespace("n", 100)
    rng = np.random.default_rng(0)
    written = {str(i): ints(rng.integers(0, 100, 70).tolist()) for i in range(25)}
    for document_id, tokens in written.items():
        corpus.ingest("n", document_id, 0, tokens[:40], False)
        corpus.wait_visible(corpus.ticket(), 30)
        corpus.ingest("n", document_id, 40, tokens[40:], True)
    space = corpus._namespaces["n"]
    known = list(space.documents.committed.values())
    read = corpus.read_committed("n", space.documents.key, known)
    assert [t.tolist() for t in read if t is not None] == [written[d.id].tolist() for d in known if not d.gone]
    assert corpus.read_committed("n", space.documents.key + 1, known[:1]) == [None]
    assert corpus.read_committed("other", space.documents.key, known[:1]) == [None]
