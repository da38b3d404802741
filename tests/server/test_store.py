"""The store behind a corpus: what comes back after a restart, what leaves it, what a full disk does. No network; see test_store_service."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.errors import DraftdError
from draftd.drafter.params import DraftParams
from draftd.drafter.records import RowContext, StoredDocument
from draftd.server.store.database import FILE, Row, write_documents
from draftd.server.store.opening import open_store
from draftd.server.store.restore import restore_all

VOCAB = 1000


def ints(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [n]."""
    return np.array(tokens, np.int32)


def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Waits until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Kept:
    """A corpus with its store, restored from `data`."""

    def __init__(self, data: Path, **config: Any) -> None:
        self.store = open_store(data, lag_ms=20)
        sizes = {"depth": 16, "quota_tokens": 8192, "recent_tokens": 1024, "live_tokens": 1024, **config}
        self.corpus = Corpus(CorpusConfig(shm_root=data / "shm", **sizes), self.store.backlog)
        self.corpus.start()
        self.waiting = restore_all(self.store, self.corpus)
        self.store.start(self.corpus.read_committed)

    def add(self, document_id: str, tokens: list[int], namespace: str = "n") -> None:
        """Commits a document."""
        self.corpus.ensure_namespace(namespace, VOCAB)
        self.corpus.ingest(namespace, document_id, 0, ints(tokens), True)

    def settle(self) -> None:
        """Waits until all is placed and on disk."""
        assert self.corpus.settle()
        self.store.hurry()
        until(lambda: self.store.settled)

    def documents(self, namespace: str = "n") -> list[StoredDocument]:
        """The committed documents."""
        return list(self.corpus.documents(namespace))

    def close(self) -> None:
        """As a service stops."""
        self.corpus.close()
        self.store.close()


@pytest.fixture
def data() -> Iterator[Path]:
    """A data directory, in shared memory since it holds shared memory too."""
    path = Path(tempfile.mkdtemp(prefix="draftd-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@contextmanager
def kept(data: Path, **config: Any) -> Iterator[Kept]:
    """A Kept that is closed."""
    made = Kept(data, **config)
    try:
        yield made
    finally:
        made.close()


def plain(documents: list[StoredDocument]) -> list[tuple[str, list[int], int, int]]:
    """Documents that can be compared."""
    return [(d.document_id, d.tokens.tolist(), d.generation, d.committed_us) for d in documents]


def rows(data: Path) -> list[Row]:
    """What the store of a service that has stopped holds."""
    with closing(sqlite3.connect(data / FILE)) as db:
        return [Row(*row) for row in db.execute("SELECT * FROM documents ORDER BY committed_us")]


# -- a restart ---------------------------------------------------------------------------------------------------------------

_steps = st.lists(
    st.one_of(
        st.tuples(st.just("whole"), st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 90)),
        st.tuples(st.just("part"), st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 90)),
        st.tuples(st.just("commit"), st.sampled_from("ab"), st.integers(0, 5)),
        st.tuples(st.just("discard"), st.sampled_from("ab"), st.integers(0, 5)),
        st.tuples(st.just("generation"), st.sampled_from("ab"), st.integers(1, 3)),
        st.tuples(st.just("drop"), st.sampled_from("ab")),
        st.tuples(st.just("pause")),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=_steps)
def test_restart_brings_back_what_was_committed_and_is_kept(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        data = Path(directory)
        with kept(data) as first:
            for step in steps:
                _do(first, step)
            first.settle()
            before = {info.name: (info, plain(first.documents(info.name))) for info in first.corpus.namespaces()}
            gone = {name: first.corpus._namespaces[name].segments.evict_before for name in before}
        with kept(data) as second:
            after = {info.name: (info, plain(second.documents(info.name))) for info in second.corpus.namespaces()}
            assert after.keys() == before.keys()
            for name, (info, documents) in before.items():
                # What a newer document keeps from being evicted in memory does not come back.
                assert after[name][1] == [d for d in documents if d[2] >= gone[name]]
                assert (after[name][0].vocab_size, after[name][0].generation) == (info.vocab_size, info.generation)
                assert second.corpus._namespaces[name].segments.evict_before == gone[name]


def _do(made: Kept, step: tuple[Any, ...]) -> None:
    kind, *rest = step
    if kind == "pause":
        time.sleep(0.01)
        return
    name = rest[0]
    made.corpus.ensure_namespace(name, VOCAB)
    try:
        if kind == "whole":
            made.corpus.ingest(name, f"whole-{rest[1]}", 0, ints([(rest[1] * 7 + i) % VOCAB for i in range(rest[2])]), True)
        elif kind == "part":
            space = made.corpus._namespaces[name].documents
            length = space.open[f"part-{rest[1]}"].length if f"part-{rest[1]}" in space.open else 0
            made.corpus.ingest(name, f"part-{rest[1]}", length, ints([i % 5 for i in range(rest[2])]), False)
        elif kind == "commit":
            made.corpus.commit(name, f"part-{rest[1]}")
        elif kind == "discard":
            made.corpus.discard(name, f"part-{rest[1]}")
        elif kind == "generation":
            made.corpus.advance_generation(name, rest[1])
        else:
            made.corpus.drop_namespace(name)
    except DraftdError:
        # The step does not fit the state, as of callers who are wrong.
        pass


def test_restart_changes_no_draft_and_knows_its_ids(data: Path) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 6, 40).tolist() for _ in range(60)]
    contexts = [RowContext(ints(text[:10]), "n", False) for text in texts]
    params = DraftParams(k=8, max_depth=16, use_local=False, policy="tree")
    with kept(data) as first:
        first.corpus.ensure_namespace("n", VOCAB, "tokenizer")
        for i, text in enumerate(texts):
            first.add(str(i), text)
        first.settle()
        before = first.corpus.propose(contexts, params)
    with kept(data) as second:
        after = second.corpus.propose(contexts, params)
        assert np.array_equal(before.counts, after.counts)
        assert np.array_equal(before.occurrences, after.occurrences)
        assert np.array_equal(before.probabilities, after.probabilities)
        assert second.corpus.namespace("n").tokenizer_fingerprint == "tokenizer"
        assert second.corpus.ingest("n", "3", 0, ints(texts[3]), True).kept_tokens == 0
        second.add("later", [1, 2, 3])
        second.settle()
        last = [d.committed_us for d in second.documents()]
        assert last == sorted(last)
        assert len(set(last)) == 61


def test_what_is_committed_is_on_disk_without_a_stop(data: Path) -> None:
    with kept(data) as made:
        made.add("a", [1, 2, 3])
        until(lambda: made.store.settled)
        copied = data / "copy"
        copied.mkdir()
        for file in made.store.database.files():
            if file.exists():
                shutil.copy(file, copied / file.name)
        with kept(copied) as other:
            assert [d.document_id for d in other.documents()] == ["a"]


def test_a_clock_that_went_back_gives_no_number_twice(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(data) as first:
        first.add("a", [1, 2])
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    with kept(data) as second:
        second.add("b", [3, 4])
    with kept(data) as third:
        assert [d.document_id for d in third.documents()] == ["a", "b"]


# -- what leaves the store ---------------------------------------------------------------------------------------------------


def test_evicted_documents_leave_the_store(data: Path) -> None:
    with kept(data, quota_tokens=2048, recent_tokens=256, live_tokens=256) as made:
        for i in range(200):
            made.add(str(i), [i] * 40)
            if i % 20 == 0:
                made.settle()
        made.settle()
        held = {d.committed_us for d in made.documents()}
        assert 20 < len(held) < 60
        # A document of which a part was evicted is still in the store.
        known = {d.committed_us for d in made.corpus._namespaces["n"].documents.committed.values()}
        assert made.store.counts.deleted_documents + made.store.backlog.never_written == 200 - len(known)
    assert {row.committed_us for row in rows(data)} == known


def test_smaller_quota_after_a_restart_keeps_the_newest(data: Path) -> None:
    with kept(data) as first:
        for i in range(100):
            first.add(str(i), [i] * 40)
        first.settle()
        assert len(first.documents()) == 100
    with kept(data, quota_tokens=1024, recent_tokens=256, live_tokens=256) as second:
        ids = [d.document_id for d in second.documents()]
        assert ids == [str(i) for i in range(100 - len(ids), 100)]
        assert 20 <= len(ids) <= 1024 // 41
    assert [row.document_id for row in rows(data)] == ids


def test_dropped_namespace_leaves_the_store_and_its_name_is_free(data: Path) -> None:
    with kept(data) as first:
        first.add("a", [1, 2, 3])
        first.add("b", [1, 2, 3], "other")
        first.settle()
        first.corpus.drop_namespace("n")
        first.corpus.ensure_namespace("n", 50)
        first.corpus.ingest("n", "c", 0, ints([4, 5]), True)
        first.settle()
        until(lambda: first.store.counts.deleted_documents == 1)
    assert [row.document_id for row in rows(data)] == ["b", "c"]
    with kept(data) as second:
        assert [(info.name, info.vocab_size) for info in second.corpus.namespaces()] == [("n", 50), ("other", VOCAB)]


def test_documents_of_a_namespace_that_went_before_a_crash_are_removed_at_the_start(data: Path) -> None:
    with kept(data) as first:
        first.add("a", [1, 2, 3])
        first.add("b", [1, 2, 3], "other")
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        db.execute("DELETE FROM namespaces WHERE name = 'other'")
    with kept(data) as second:
        second.store.hurry()
        until(lambda: second.store.counts.deleted_documents == 1)
    assert [row.document_id for row in rows(data)] == ["a"]


def test_generations_that_are_not_kept_leave_the_store(data: Path) -> None:
    with kept(data) as first:
        for generation in range(4):
            first.add(str(generation), [generation, 1, 2])
            first.settle()
            first.corpus.advance_generation("n", keep=2)
        first.settle()
        assert [d.generation for d in first.documents()] == [3]
        assert first.corpus.namespace("n").generation == 4
    assert [row.generation for row in rows(data)] == [3]
    with kept(data) as second:
        assert [d.generation for d in second.documents()] == [3]
        second.add("new", [7, 8])
        assert second.documents()[-1].generation == 4


def test_space_is_given_back(data: Path) -> None:
    with kept(data, quota_tokens=2**21, recent_tokens=65_536, live_tokens=65_536) as made:
        rng = np.random.default_rng(0)
        for i in range(300):
            made.add(str(i), rng.integers(0, VOCAB, 5000).tolist(), "large")
        made.add("a", [1, 2])
        made.settle()
        large = made.store.database.size_bytes()
        made.corpus.drop_namespace("large")
        until(lambda: made.store.counts.deleted_documents == 300)
    assert (data / FILE).stat().st_size < large / 2


# -- the disk ----------------------------------------------------------------------------------------------------------------


def _limit(made: Kept, more_pages: int) -> None:
    """Lets the file grow by so many pages, as on a disk that is nearly full."""
    db = made.store.database._db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + more_pages}")


def test_full_disk_keeps_drafting_says_so_and_loses_nothing(data: Path) -> None:
    rng = np.random.default_rng(0)
    texts = {str(i): rng.integers(0, VOCAB, 500).tolist() for i in range(30)}
    with kept(data, quota_tokens=65_536, live_tokens=32_768, recent_tokens=32_768) as made:
        made.add("before", [1, 2, 3])
        made.settle()
        _limit(made, 2)
        for document_id, text in texts.items():
            made.add(document_id, text)
        until(lambda: made.store.failure)
        assert "full" in made.store.failure
        assert made.store.counts.errors > 0
        assert made.store.backlog.waiting == 30
        assert made.store.lag_s() > 0
        assert made.corpus.wait_visible(made.corpus.ticket(), 30)
        params = DraftParams(k=4, max_depth=16, use_local=False, policy="tree")
        assert made.corpus.propose([RowContext(ints(texts["7"][:8]), "n", False)], params).row(0) == texts["7"][8:12]
        assert [row.document_id for row in _rows_now(made)] == ["before"]
        _limit(made, 2**20)
        until(lambda: not made.store.failure)
        assert made.store.settled
    assert {row.document_id for row in rows(data)} == {"before", *texts}


def _rows_now(made: Kept) -> list[Row]:
    key = made.corpus._namespaces["n"].documents.key
    return list(made.store.database.newest_first(key))


def test_full_disk_at_the_stop_is_said(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = Kept(data)
    made.add("before", [1, 2, 3])
    made.settle()
    _limit(made, 0)
    made.add("never", np.random.default_rng(0).integers(0, VOCAB, 4000).tolist())
    made.close()
    assert "store_not_complete" in "".join(capfd.readouterr())
    with kept(data) as second:
        assert [d.document_id for d in second.documents()] == ["before"]


def test_defect_in_the_writer_is_counted_and_tried_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(data) as made:
        made.settle()
        read = made.store._read
        made.store._read = lambda *_: 1 / 0  # type: ignore[assignment]
        made.add("a", [1, 2, 3])
        until(lambda: made.store.failure)
        assert made.store.failure == "internal error, see the log"
        made.store._read = read
        made.store.hurry()
        until(lambda: made.store.settled)
    assert [row.document_id for row in rows(data)] == ["a"]


def test_more_namespaces_than_may_be_stay_in_the_store(data: Path) -> None:
    with kept(data) as first:
        for name in "abc":
            first.add("d", [1, 2, 3], name)
    with kept(data, max_namespaces=2) as second:
        assert [info.name for info in second.corpus.namespaces()] == ["b", "c"]
        assert [(namespace.name, documents) for namespace, documents in second.waiting] == [("a", 1)]
    with kept(data) as third:
        assert len(third.corpus.namespaces()) == 3


def test_failed_transaction_leaves_nothing(data: Path) -> None:
    with kept(data) as made:
        good, bad = Row(1, 1, "a", 0, 1, b"", 0), Row("x", 1, "b", 0, 1, b"", 0)  # type: ignore[arg-type]
        with pytest.raises(sqlite3.IntegrityError), made.store.database.transaction() as db:
            write_documents(db, [good, bad])
        assert list(made.store.database.newest_first(1)) == []
