"""What replication asks of the corpus: what it holds under an id, what was committed since, and generations that others have advanced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.errors import NotFound
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.records import Comparison
from draftd.server.replicate.outbox import Outbox


@pytest.fixture
def outbox() -> Outbox:
    """A keeper."""
    return Outbox(lambda _: True)


@pytest.fixture
def corpus(tmp_path: Path, outbox: Outbox) -> Iterator[Corpus]:
    """A corpus with a namespace "n" of a small quota, which is refreshed by hand."""
    made = Corpus(CorpusConfig(shm_root=tmp_path, quota_tokens=4096, recent_tokens=1024, live_tokens=1024), outbox)
    made.ensure_namespace("n", 100)
    yield made
    made.close()


def _tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_compare_tells_what_is_held_under_an_id(corpus: Corpus) -> None:
    corpus.ingest("n", "done", 0, _tokens(1, 2, 3), True)
    corpus.ingest("n", "open", 0, _tokens(1, 2), False)
    assert corpus.compare("n", "nothing", _tokens(1)) is Comparison.ABSENT
    assert corpus.compare("n", "open", _tokens(1, 2)) is Comparison.IN_FLIGHT
    assert corpus.compare("n", "done", _tokens(1, 2, 3)) is Comparison.SAME
    for other in (_tokens(1, 2), _tokens(1, 2, 4), _tokens(1, 2, 3, 4)):
        assert corpus.compare("n", "done", other) is Comparison.OTHER
    with pytest.raises(NotFound):
        corpus.compare("missing", "done", _tokens(1))


def test_document_evicted_in_part_is_compared_by_its_length(corpus: Corpus) -> None:
    rng = np.random.default_rng(0)
    long = rng.integers(0, 100, 3000).astype(np.int32)
    for start in range(0, 3000, 500):
        corpus.ingest("n", "long", start, long[start : start + 500], start == 2500)
        corpus.refresh()
    held = next(d for d in corpus._namespaces["n"].documents.committed.values() if d.id == "long")
    for i in range(200):
        if held.gone:
            break
        corpus.ingest("n", f"{i}", 0, rng.integers(0, 100, 50).astype(np.int32), True)
        corpus.refresh()
        corpus._namespaces["n"].segments.wait_merged()
    assert 0 < held.gone < 3000
    assert corpus.compare("n", "long", long) is Comparison.SAME
    assert corpus.compare("n", "long", long[1:]) is Comparison.OTHER


def test_committed_since_is_in_the_order_of_commits_over_namespaces(corpus: Corpus) -> None:
    corpus.ensure_namespace("m", 100)
    for i, name in enumerate("nmnm"):
        corpus.ingest(name, f"{i}", 0, _tokens(i), True)
    corpus.ingest("n", "open", 0, _tokens(1), False)
    found = corpus.committed_since(0)
    assert [document.id for _, document in found] == ["0", "1", "2", "3"]
    assert [document.id for _, document in corpus.committed_since(found[2][1].committed_us)] == ["2", "3"]
    kept = corpus.kept(found[0][0])
    assert kept is not None
    assert kept.name == "n"
    corpus.drop_namespace("n")
    assert corpus.kept(found[0][0]) is None


def test_generation_is_raised_and_never_lowered(corpus: Corpus, outbox: Outbox) -> None:
    corpus.ingest("n", "old", 0, _tokens(1, 2, 3), True)
    assert corpus.raise_generation("n", 5, 0)
    assert corpus.document_count("n") == 1
    assert corpus.raise_generation("n", 5, 4)
    corpus.refresh()
    assert corpus.document_count("n") == 0
    for generation, evict_before in ((5, 4), (4, 4), (0, 0), (5, 3)):
        assert not corpus.raise_generation("n", generation, evict_before)
    assert corpus.namespace("n").generation == 5
    assert corpus.add("n", "late", _tokens(1), 3) == 0
    (told,) = outbox.take(9).generations.values()
    assert told == KeptNamespace(told.key, "n", 100, "", 5, 4)
    with pytest.raises(NotFound):
        corpus.raise_generation("missing", 1, 0)
