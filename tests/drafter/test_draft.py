"""The draft rule: kernel = oracle, to the last token, count and bit of probability, for any corpus, row and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.index import MAIN
from draftd.drafter.ops.draft.oracle import Stretch, cap_of
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import draft_local, propose_local
from draftd.drafter.records import RowContext
from tests.drafter.bench import Bench, addresses, assert_draft, ints
from tests.drafter.texts import MAX_TOKEN, corpora, documents

_numbers = count()

PARAMETERS = st.builds(
    DraftParams,
    policy=st.just("tree"),
    k=st.sampled_from([1, 2, 3, 7, 16, 64]),
    max_depth=st.sampled_from([2, 3, 5, 12, 16]),
    spec_factor=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 1000.0]),
    spec_offset=st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.25, 2.0]),
    min_token_prob=st.sampled_from([0.0, 0.05, 0.1, 0.34, 0.5, 1.0]),
    use_local=st.booleans(),
    use_corpus=st.booleans(),
)


def _rows(texts: list[list[int]], extra: list[list[int]]) -> list[list[int]]:
    """Rows that are in the corpus, that end in it, that are not in it, and that are too short to match."""
    inside = [document[start:end] for document in texts[:4] for start, end in ((0, None), (0, len(document) // 2), (2, 6))]
    return [*inside, *(e + document[:3] for e, document in zip(extra, texts, strict=False)), *extra, [], [0], [MAX_TOKEN], [1, 2]]


@settings(max_examples=150)
@given(texts=corpora(max_documents=8), extra=st.lists(documents(16), max_size=3), params=PARAMETERS, data=st.data())
def test_kernel_is_the_oracle(texts: list[list[int]], extra: list[list[int]], params: DraftParams, data: st.DataObject) -> None:
    """Documents end up in all three segments, some of them open and cut into pieces."""
    bench = Bench(vocab=MAX_TOKEN + 1, depth=16, quota=1024, recent=data.draw(st.sampled_from([32, 128, 1024])), live=32)
    for i, text in enumerate(texts):
        bench.ingest(str(i), text, data.draw(st.booleans()))
        if data.draw(st.booleans()):
            bench.refresh()
        if data.draw(st.booleans()):
            bench.executor.run()
    bench.refresh()
    bench.assert_drafts(_rows(texts, extra), params)
    bench.close()


@settings(max_examples=150)
@given(rows=st.lists(documents(60), min_size=1, max_size=4), params=PARAMETERS)
def test_own_tokens_only(rows: list[list[int]], params: DraftParams) -> None:
    arrays = [ints(r) for r in rows]
    drafts = draft_local(*addresses(arrays), params)
    for i, row in enumerate(rows):
        assert_draft(drafts, i, row, [], params)
    assert not drafts.version.any()


@pytest.mark.parametrize("floor", [0.0, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("continuations", [3, 40])
def test_large_loci_with_many_continuations(floor: float, continuations: int) -> None:
    """Loci that are sampled, not read: counts around the floor, ties above and below the limit of recency."""
    bench = Bench(vocab=64, depth=8, quota=4096, recent=512, live=512)
    rng = np.random.default_rng(continuations)
    for i in range(330):
        token = int(rng.integers(0, continuations))
        bench.ingest(str(i), [50, 51, token, token % 3, token % 2, 7], True)
        if i % 37 == 0:
            bench.refresh()
            bench.executor.run()
    bench.refresh()
    assert bench.index.current.lengths[MAIN]
    params = DraftParams(k=6, max_depth=8, spec_factor=4, min_token_prob=floor, policy="tree")
    bench.assert_drafts([[50, 51], [51], [50], [0, 50, 51], [50, 51, 1]], params)
    bench.close()


@pytest.mark.parametrize("copies", [16, 32, 33, 40])
def test_ties_go_to_the_most_recent_up_to_a_limit_and_to_the_smaller_token_above(copies: int) -> None:
    bench = Bench(vocab=16, depth=8, quota=2048, recent=256, live=64)
    for i in range(2 * copies):
        bench.ingest(str(i), [5, 6, 2 if i % 2 else 1], True)
        if i % 10 == 0:
            bench.refresh()
            bench.executor.run()
    bench.refresh()
    params = DraftParams(k=4, max_depth=8, spec_factor=4, use_local=False, policy="tree")
    assert bench.draft([[5, 6]], params).row(0) == [2 if copies <= 32 else 1]
    bench.assert_drafts([[5, 6]], params)
    bench.close()


def test_long_rows_that_match_themselves_often() -> None:
    """Local loci above and below the size from which continuations are counted in a table."""
    rng = np.random.default_rng(0)
    for vocabulary in (1, 2, 3, 20):
        rows = [rng.integers(0, vocabulary, n).astype(np.int32) for n in (1, 2, 30, 64, 65, 200, 700)]
        for floor in (0.0, 0.1):
            params = DraftParams(k=8, max_depth=12, spec_factor=2, min_token_prob=floor, policy="tree")
            drafts = draft_local(*addresses(rows), params)
            for i, row in enumerate(rows):
                assert_draft(drafts, i, row.tolist(), [], params)


def test_rows_of_a_block_of_rows() -> None:
    tokens = np.array([[1, 2, 3, 1, 2, 9], [7, 7, 7, 7, 7, 7], [1, 2, 1, 9, 9, 9]], np.int32)
    params = DraftParams(k=4, max_depth=8, policy="tree")
    drafts = propose_local(tokens, np.array([5, 6, 3]), np.array([2, 0], np.int32), params)
    assert_draft(drafts, 0, [1, 2, 1], [], params)
    assert_draft(drafts, 1, [1, 2, 3, 1, 2], [], params)


@pytest.mark.parametrize("factor", [0.1, 0.3, 0.7, 1.1, 2.3])
def test_caps_are_rounded_as_the_peer_rounds_them(factor: float) -> None:
    """A factor that is no binary fraction: 10 x 0.1 and the like must give whole tokens."""
    params = DraftParams(k=64, max_depth=64, spec_factor=factor, policy="tree")
    bench = Bench(vocab=200, depth=64, quota=1024, recent=256, live=256)
    bench.ingest("d", list(range(150)), True)
    bench.refresh()
    for length in (2, 3, 7, 10, 20, 30):
        row = [199, *range(length)]
        assert bench.draft([row], params).counts[0] == max(cap_of(n, params) for n in range(1, length + 1))
        bench.assert_drafts([row], params)
    bench.close()


@pytest.fixture(scope="module")
def corpus() -> Iterator[Corpus]:
    with_thread = Corpus(CorpusConfig(depth=16, quota_tokens=2048, recent_tokens=256, live_tokens=256, max_namespaces=10_000))
    with_thread.start()
    yield with_thread
    with_thread.close()


@settings(max_examples=25)
@given(first=corpora(4), second=corpora(4), extra=st.lists(documents(12), max_size=2), params=PARAMETERS)
def test_batch_of_several_namespaces_and_private_rows(
    corpus: Corpus, first: list[list[int]], second: list[list[int]], extra: list[list[int]], params: DraftParams
) -> None:
    """Each row drafts from its own namespace only, a private one from its own tokens only."""
    number = next(_numbers)
    stretches = {}
    for name, texts in ((f"a{number}", first), (f"b{number}", second)):
        corpus.ensure_namespace(name, MAX_TOKEN + 1)
        for i, text in enumerate(texts):
            corpus.ingest(name, str(i), 0, ints(text), True)
        stretches[name] = [Stretch(text, len(text)) for text in texts]
    assert corpus.wait_visible(corpus.ticket(), 30)
    rows = [
        RowContext(ints(row), name, private)
        for row in _rows(first + second, extra)
        for name in stretches
        for private in (False, True)
    ]  # fmt: skip
    drafts = corpus.propose(rows, params)
    for i, row in enumerate(rows):
        assert_draft(drafts, i, row.tokens.tolist(), [] if row.private else stretches[row.namespace], params)
        assert (drafts.version[i] == 0) == row.private
    for name in stretches:
        corpus.drop_namespace(name)


def test_empty_batch(corpus: Corpus) -> None:
    drafts = corpus.propose([], DraftParams(k=5, max_depth=16, policy="tree"))
    assert drafts.tokens.shape == (0, 5)
    assert len(drafts.counts) == 0


def test_token_outside_the_vocabulary_reads_nothing_outside_the_index() -> None:
    bench = Bench(vocab=8, depth=16, quota=1024, recent=32, live=32)
    for i in range(8):
        bench.ingest(str(i), [0, 1, 2, 3, 4, 5, 6, 7] * 4, True)
        bench.refresh()
        bench.executor.run()
    bench.refresh()
    assert bench.segments.index.current.lengths[MAIN]
    bench.assert_drafts([[1, 2, 2**31 - 1], [2**31 - 1, 1, 2], [-1], [-(2**31), 3]], DraftParams(max_depth=16, policy="tree"))
    bench.close()
