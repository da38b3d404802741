"""Refreshing an index: whatever comes, every token that was not evicted is indexed once and drafts are the oracle's.

The rings are so small that wrap-around, eviction under a match, merges, and overflows of `live` and `recent` happen all the time.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from draftd.drafter import segments
from draftd.drafter.corpus_config import least_quota
from draftd.drafter.params import DraftParams
from tests.drafter.bench import Bench

IDS = "abcdef"


def _texts(vocab: int) -> st.SearchStrategy[list[int]]:
    """Random, periodic and constant texts."""
    token = st.integers(0, vocab - 1)
    return st.one_of(
        st.lists(token, max_size=14),
        st.builds(lambda unit, n: (unit * n)[:40], st.lists(token, min_size=1, max_size=3), st.integers(1, 20)),
    )


class IndexMachine(RuleBasedStateMachine):
    """Random lives of documents, refreshes, and merges that end whenever they like."""

    bench: Bench
    make_bench: ClassVar[type[Bench]] = Bench

    @initialize(
        vocab=st.sampled_from([1, 2, 3, 70]), depth=st.integers(2, 10), ring=st.integers(8, 30), recent=st.integers(2, 4),
        live=st.integers(2, 6), eager=st.booleans(),
    )  # fmt: skip
    def start(self, vocab: int, depth: int, ring: int, recent: int, live: int, eager: bool) -> None:
        self.vocab = vocab
        quota = max(least_quota(depth), ring * depth)
        self.bench = self.make_bench(vocab=vocab, depth=depth, quota=quota, recent=recent * depth, live=live * depth)
        self.bench.executor.eager = eager
        self.bench.refresh()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for document_id in list(bench.documents.open):
            bench.documents.commit(document_id, "")
        bench.settle()
        bench.check()
        visible = {(id(s.document)) for s in bench.segments.live_spans.get(bench.index.current.number, [])}
        missing = [d.id for d in bench.documents.pending.values() if d.placed < d.length and id(d) not in visible]
        assert not missing, "text that overflowed never came back"
        bench.close()

    @rule(document_id=st.sampled_from(IDS), data=st.data(), complete=st.booleans())
    def ingest(self, document_id: str, data: st.DataObject, complete: bool) -> None:
        if document_id not in self.bench.documents.committed:
            self.bench.ingest(document_id, data.draw(_texts(self.vocab)), complete)

    @rule(data=st.data(), copies=st.integers(2, 6))
    def ingest_equal_documents(self, data: st.DataObject, copies: int) -> None:
        text = data.draw(_texts(self.vocab))
        for _ in range(copies):
            self.bench.ingest(f"copy-{len(self.bench.known)}-{self.bench.documents.changed}", text, True)

    @precondition(lambda self: self.bench.documents.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.bench.documents.commit(data.draw(st.sampled_from(sorted(self.bench.documents.open))), "")

    @precondition(lambda self: self.bench.documents.open)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.bench.discard(data.draw(st.sampled_from(sorted(self.bench.documents.open))))

    @rule(keep=st.integers(1, 3))
    def advance_generation(self, keep: int) -> None:
        documents = self.bench.documents
        documents.generation += 1
        documents.changed += 1
        self.bench.segments.evict_generations(documents.generation - keep + 1)

    @rule()
    def end_merge(self) -> None:
        self.bench.executor.run()
        self.bench.check_older_versions()

    @rule(data=st.data(), factor=st.sampled_from([0.5, 1.0, 4.0]), floor=st.sampled_from([0.0, 0.1, 0.6]))
    def refresh(self, data: st.DataObject, factor: float, floor: float) -> None:
        self.bench.refresh()
        self.bench.check()
        params = DraftParams(k=8, max_depth=self.bench.index.depth, spec_factor=factor, min_token_prob=floor, policy="tree")
        rows = data.draw(st.lists(st.lists(st.integers(0, self.vocab - 1), max_size=12), max_size=2))
        own = [copy[-20:-1] for copy in list(self.bench.copies.values())[-2:]]
        self.bench.assert_drafts(rows + own, params)


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestIndexMachine = IndexMachine.TestCase


def test_nothing_is_evicted_while_there_is_room() -> None:
    bench = Bench(quota=640, recent=32, live=32)
    for i in range(16):
        bench.ingest(str(i), [i % 4] * 30, True)
        bench.settle()
        bench.check()
    assert bench.documents.evicted_tokens == 0
    assert bench.documents.tokens_held() == 16 * 30
    bench.close()


@pytest.mark.parametrize("depth", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [5, 13, 40])
def test_smallest_quota_settles(depth: int, length: int) -> None:
    """Also where a piece does not fit what is left before the ring's end."""
    bench = Bench(vocab=1, depth=depth, quota=least_quota(depth), recent=2 * depth, live=2 * depth)
    for i in range(5):
        bench.ingest(str(i), [0] * length, True)
        bench.settle()
        bench.check()
    bench.close()


def test_oldest_goes_first_and_is_counted() -> None:
    bench = Bench(vocab=100, quota=64, recent=16, live=16)
    for i in range(20):
        bench.ingest(str(i), [i] * 15, True)
        bench.settle()
        bench.check()
    assert bench.documents.evicted_tokens + bench.documents.tokens_held() == 20 * 15
    assert bench.draft([[0, 0, 0]], DraftParams(max_depth=8, use_local=False, policy="tree")).counts[0] == 0
    assert bench.draft([[19, 19]], DraftParams(max_depth=8, use_local=False, policy="tree")).counts[0] > 0
    bench.close()


def test_eviction_in_the_middle_of_a_match() -> None:
    """A long document is evicted piece by piece; a match that spans the cut is exact on both sides."""
    bench = Bench(vocab=50, depth=8, quota=64, recent=16, live=16)
    text = [i % 40 for i in range(200)]
    for at in range(0, 200, 10):
        bench.ingest("long", text[at : at + 10])
        bench.refresh()
        bench.check()
        rows = [text[start : start + 6] for start in range(0, at, 23)]
        bench.assert_drafts(rows, DraftParams(k=8, max_depth=8, spec_factor=4, use_local=False, policy="tree"))
        if at % 30 == 0:
            bench.executor.run()
    assert bench.documents.evicted_tokens > 0
    bench.close()


def test_document_longer_than_the_quota_keeps_its_end() -> None:
    bench = Bench(vocab=300, depth=4, quota=64, recent=8, live=8)
    bench.ingest("long", list(range(300)), True)
    bench.settle()
    bench.check()
    params = DraftParams(max_depth=4, spec_factor=4, use_local=False, policy="tree")
    assert bench.draft([[296, 297]], params).row(0) == [298, 299]
    assert bench.draft([[0, 1]], params).counts[0] == 0
    bench.close()


def test_documents_that_come_faster_than_they_are_placed_wait_within_the_quota() -> None:
    """Fault: a bulk import into a small namespace waited in the process's memory, many times the quota, and was placed bit by bit."""
    bench = Bench(vocab=1000, depth=8, quota=640, recent=64, live=64)
    bench.ingest("open", [1, 2, 3])
    for i in range(1000):
        bench.ingest(str(i), [i] * 20, True)
    bench.refresh()
    bench.check()
    newest = [str(i) for i in range(968, 1000)]
    assert list(bench.documents.committed) == newest
    assert bench.documents.tokens_held() == 640 + 3
    assert bench.documents.evicted_tokens == 968 * 20
    bench.settle()
    bench.check()
    assert list(bench.documents.committed) == newest[1000 - 968 - len(bench.documents.committed) :]
    assert bench.documents.evicted_tokens + bench.documents.tokens_held() == 1000 * 20 + 3
    assert bench.draft([[999, 999]], DraftParams(max_depth=8, use_local=False, policy="tree")).counts[0] > 0
    bench.close()


def test_longer_match_in_a_segment_that_lacks_the_shorter_one() -> None:
    """Fault: where a document goes on in another segment, a segment without a suffix was not searched for longer ones."""
    bench = Bench(vocab=300, depth=16, quota=640, recent=128, live=64)
    text = list(range(40, 120))
    bench.ingest("split", text)
    bench.refresh()
    (piece,) = bench.documents.pieces
    bench.ingest("other", [7, *text[piece.indexed : piece.indexed + 4], 200], True)
    bench.refresh()
    for before in range(1, 12):
        row = text[piece.indexed - before : piece.indexed + 4]
        for factor in (0.5, 1.0, 2.0, 4.0):
            for k in (1, 4, 12):
                bench.assert_drafts([row], DraftParams(k=k, max_depth=16, spec_factor=factor, use_local=False, policy="tree"))
    bench.close()


def test_drafts_while_a_merge_runs() -> None:
    """A merge that has begun but not ended changes nothing; what comes meanwhile is drafted from."""
    bench = Bench(vocab=64, depth=8, quota=128, recent=32, live=32)
    for i in range(8):
        bench.ingest(f"first-{i}", [i, i + 1, i + 2, i + 3] * 3, True)
        bench.refresh()
    assert bench.segments._merge is not None
    for i in range(3):
        bench.ingest(f"second-{i}", [30 + i, 31 + i, 32 + i], True)
        bench.refresh()
        bench.check()
        bench.assert_drafts([[30 + i], [1, 2], [2, 3]], DraftParams(max_depth=8, policy="tree"))
    bench.executor.run()
    bench.settle()
    bench.check()
    bench.close()


def test_discard_while_a_merge_places_the_document() -> None:
    bench = Bench(vocab=64, depth=4, quota=64, recent=8, live=8)
    bench.ingest("d", list(range(20)))
    for _ in range(10):
        bench.refresh()
        if bench.segments._merging:
            break
    assert bench.segments._merging == {"d"}
    bench.discard("d")
    bench.ingest("d", list(range(30, 40)), True)
    for _ in range(3):
        bench.refresh()
        bench.check()
        bench.assert_drafts([[30, 31], [3, 4]], DraftParams(max_depth=4, policy="tree"))
    bench.settle()
    bench.check()
    bench.assert_drafts([[30, 31], [3, 4]], DraftParams(max_depth=4, policy="tree"))
    bench.close()


def test_old_generation_in_live_is_not_drafted_from_any_more() -> None:
    """Fault: a few finished documents stayed in `live`, and so in every draft, whatever generation they were of."""
    bench = Bench(vocab=64, depth=8, quota=6400, recent=640, live=640)
    bench.ingest("old", list(range(40)), True)
    bench.ingest("open", list(range(40, 60)))
    bench.settle()
    bench.documents.generation += 1
    bench.documents.changed += 1
    assert bench.segments.evict_generations(1) == 40
    bench.settle()
    bench.check()
    assert bench.documents.evicted_tokens == 40
    assert "old" not in bench.documents.committed
    params = DraftParams(max_depth=8, use_local=False, policy="tree")
    assert bench.draft([[3, 4, 5]], params).counts[0] == 0
    assert bench.draft([[43, 44, 45]], params).counts[0] > 0, "a request in flight is still drafted from"
    bench.ingest("open", [60], True)
    bench.settle()
    assert bench.draft([[43, 44, 45]], params).counts[0] == 0
    bench.close()


def test_rest_of_a_document_of_an_old_generation_goes_with_its_pieces() -> None:
    bench = Bench(vocab=200, depth=8, quota=640, recent=64, live=64)
    bench.ingest("old", list(range(100)))
    bench.settle()
    assert bench.documents.pieces
    bench.documents.commit("old", "")
    bench.documents.generation += 1
    bench.documents.changed += 1
    bench.segments.evict_generations(1)
    bench.settle()
    bench.check()
    assert not bench.documents.pieces
    assert not bench.documents.committed
    assert (bench.documents.evicted_tokens, bench.documents.tokens_held()) == (100, 0)
    bench.close()


def test_merges_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(vocab=30, depth=8, quota=512, recent=64, live=64)
    monkeypatch.setattr(segments, "PLACE_OPEN_TOKENS", 16)
    with ThreadPoolExecutor(1) as executor:
        bench.segments._executor = executor
        for i in range(300):
            bench.ingest(f"d{i // 3}", [(i * i + j) % 30 for j in range(i % 23)], i % 3 == 2)
            bench.refresh()
            if i % 10 == 0:
                bench.check()
                bench.assert_drafts([[1, 2, 3], [5, 6]], DraftParams(max_depth=8, policy="tree"))
        while not bench.segments.settled:
            bench.segments.wait_merged()
            bench.refresh()
        bench.check()
    bench.close()


@pytest.mark.parametrize("step", ["write_text", "fill_live", "add_recent", "recent_copy", "merge_main", "drop_recent"])
def test_refresh_that_fails_is_tried_again_and_nothing_is_lost(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cannot be written for want of memory, once it can, every token is indexed once."""
    bench = Bench(vocab=9, quota=128, recent=48, live=16)
    whole = getattr(bench.index, step)
    failures = 0

    def failing(*args: object) -> object:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise OSError("no memory")
        return whole(*args)

    monkeypatch.setattr(bench.index, step, failing)
    for i in range(12):
        bench.ingest(str(i), [(i + j) % 9 for j in range(15)], True)
        for _ in range(6):
            with contextlib.suppress(OSError):
                bench.refresh()
                bench.check()
            bench.executor.run()
    assert failures == 3
    bench.settle()
    bench.check()
    bench.assert_drafts([[(3 + j) % 9 for j in range(6)], [8, 0]], DraftParams(k=8, max_depth=8, spec_factor=4, policy="tree"))
    assert bench.documents.evicted_tokens + bench.documents.tokens_held() == 12 * 15
    bench.close()
