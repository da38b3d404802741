"""The corpus: namespaces and their isolation, limits, generations, export, visibility, explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.errors import DraftdError, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from draftd.drafter.ops.draft.oracle import Stretch
from draftd.drafter.params import DraftParams
from draftd.drafter.records import RowContext, check_tokens
from tests.drafter.bench import assert_draft, ints
from tests.drafter.texts import corpora

PARAMS = DraftParams(k=8, max_depth=16, policy="tree")


def _corpus(**config: float) -> Corpus:
    sizes = {"depth": 16, "quota_tokens": 2048, "recent_tokens": 256, "live_tokens": 256, **config}
    made = Corpus(CorpusConfig(**sizes))  # type: ignore[arg-type]
    made.start()
    return made


@pytest.fixture
def corpus() -> Iterator[Corpus]:
    made = _corpus()
    made.ensure_namespace("n", 100)
    yield made
    made.close()


def _add(corpus: Corpus, name: str, document_id: str, tokens: list[int], complete: bool = True) -> None:
    corpus.ingest(name, document_id, 0, ints(tokens), complete)


def _drafted(corpus: Corpus, row: list[int], name: str = "n", params: DraftParams = PARAMS) -> list[int]:
    return corpus.propose([RowContext(ints(row), name, False)], params).row(0)


# -- namespaces --------------------------------------------------------------------------------------------------------------


def test_namespace_is_made_once_and_checked_afterwards(corpus: Corpus) -> None:
    corpus.ensure_namespace("n", 100)
    assert [n.name for n in corpus.namespaces()] == ["n"]
    with pytest.raises(FailedPrecondition, match="has 100") as caught:
        corpus.ensure_namespace("n", 101)
    assert caught.value.field == "vocab_size"


def test_fingerprint_is_learnt_and_then_checked(corpus: Corpus) -> None:
    corpus.ensure_namespace("n", 100, "tokenizer-a")
    corpus.ensure_namespace("n", 100)
    corpus.ensure_namespace("n", 100, "tokenizer-a")
    assert corpus.namespace("n").tokenizer_fingerprint == "tokenizer-a"
    with pytest.raises(FailedPrecondition) as caught:
        corpus.ensure_namespace("n", 100, "tokenizer-b")
    assert caught.value.field == "tokenizer_fingerprint"


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, "a\n", "../é"])
def test_name_that_is_not_allowed(corpus: Corpus, name: str) -> None:
    with pytest.raises(InvalidArgument, match="1 to 128 characters") as caught:
        corpus.ensure_namespace(name, 100)
    assert caught.value.field == "namespace"


def test_name_does_not_become_a_path(corpus: Corpus) -> None:
    corpus.ensure_namespace("../../outside/of:it", 100)
    assert Path(corpus.index_spec("../../outside/of:it").handle).parent == Path(corpus.control_spec().handle).parent


@pytest.mark.parametrize("vocab", [0, -1, 2**21])
def test_vocabulary_out_of_range(corpus: Corpus, vocab: int) -> None:
    with pytest.raises(InvalidArgument, match=r"must be in \[1, 2097151\]"):
        corpus.ensure_namespace("other", vocab)
    assert not corpus.has_namespace("other")


def test_as_many_namespaces_as_may_be() -> None:
    corpus = _corpus(max_namespaces=2)
    corpus.ensure_namespace("a", 10)
    corpus.ensure_namespace("b", 10)
    with pytest.raises(ResourceExhausted, match="2 namespaces"):
        corpus.ensure_namespace("c", 10)
    corpus.drop_namespace("a")
    corpus.ensure_namespace("c", 10)
    corpus.close()


def test_dropped_namespace_is_gone_and_starts_empty_again(corpus: Corpus) -> None:
    _add(corpus, "n", "d", [1, 2, 3, 4])
    assert corpus.wait_visible(corpus.ticket(), 30)
    handle = Path(corpus.index_spec("n").handle)
    assert corpus.drop_namespace("n") == (1, 4)
    assert not handle.exists()
    calls: list[Callable[[], object]] = [
        lambda: corpus.namespace("n"),
        lambda: corpus.drop_namespace("n"),
        lambda: corpus.index_spec("n"),
        lambda: corpus.ingest("n", "d", 0, ints([1]), True),
        lambda: _drafted(corpus, [1, 2]),
        lambda: corpus.advance_generation("n"),
        lambda: list(corpus.documents("n")),
        lambda: corpus.explain("n", ints([1, 2]), PARAMS),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="'n' does not exist"):
            call()
    corpus.ensure_namespace("n", 50)
    assert _drafted(corpus, [1, 2]) == []


@settings(max_examples=15)
@given(mine=corpora(4), theirs=corpora(4), row=st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_nothing_in_one_namespace_changes_anothers_drafts(
    shared: Corpus, mine: list[list[int]], theirs: list[list[int]], row: list[int]
) -> None:
    names = [f"ns{len(shared.namespaces())}-{i}" for i in range(2)]
    for name in names:
        shared.ensure_namespace(name, 2**21 - 1)
    for i, text in enumerate(mine):
        _add(shared, names[0], str(i), text)
    assert shared.wait_visible(shared.ticket(), 30)
    before = shared.namespace(names[0])
    for i, text in enumerate(theirs):
        _add(shared, names[1], str(i), text)
    shared.advance_generation(names[1], 1)
    assert shared.wait_visible(shared.ticket(), 30)
    drafts = shared.propose([RowContext(ints(row), names[0], False)], PARAMS)
    assert_draft(drafts, 0, row, [Stretch(text, len(text)) for text in mine], PARAMS)
    after = shared.namespace(names[0])
    assert (after.tokens, after.documents, after.generation) == (before.tokens, before.documents, 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Corpus]:
    made = _corpus(max_namespaces=10_000)
    yield made
    made.close()


# -- documents ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "field"), [([1, 100], "tokens[1]"), ([-1], "tokens[0]"), ([0] * 9 + [2**31 - 1], "tokens[9]"), ([-(2**31)], "tokens[0]")]
)
def test_token_outside_the_vocabulary(corpus: Corpus, tokens: list[int], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _add(corpus, "n", "d", tokens)
    assert caught.value.field == field
    assert "must be in [0, 100)" in str(caught.value)
    with pytest.raises(InvalidArgument) as caught:
        corpus.propose([RowContext(ints([1]), "n", False), RowContext(ints(tokens), "n", True)], PARAMS)
    assert caught.value.field == f"rows[1].{field}"
    assert corpus.namespace("n").tokens == 0
    check_tokens(ints([]), 1)
    check_tokens(ints([0, 99]), 100)


@pytest.mark.parametrize("document_id", ["", "x" * 129])
def test_document_id_of_wrong_length(corpus: Corpus, document_id: str) -> None:
    with pytest.raises(InvalidArgument, match="1 to 128") as caught:
        _add(corpus, "n", document_id, [1])
    assert caught.value.field == "document_id"


def test_negative_offset(corpus: Corpus) -> None:
    with pytest.raises(InvalidArgument, match="at least 0"):
        corpus.ingest("n", "d", -1, ints([1]), False)


def test_refused_call_changes_nothing(corpus: Corpus) -> None:
    _add(corpus, "n", "d", [1, 2, 3])
    before = corpus.namespace("n").tokens
    calls: list[Callable[[], object]] = [
        lambda: corpus.ingest("n", "d", 3, ints([4]), True),
        lambda: corpus.ingest("n", "e", 5, ints([4]), True),
        lambda: corpus.commit("n", "nothing"),
        lambda: corpus.discard("n", "d"),
    ]
    for call in calls:
        with pytest.raises(DraftdError):
            call()
    assert corpus.namespace("n").tokens == before
    assert [d.document_id for d in corpus.documents("n")] == ["d"]


def test_commit_owned_commits_the_owners_only(corpus: Corpus) -> None:
    corpus.ensure_namespace("m", 100)
    corpus.ingest("n", "a", 0, ints([1]), False, "first")
    corpus.ingest("m", "b", 0, ints([2]), False, "first")
    corpus.ingest("n", "c", 0, ints([3]), False, "second")
    assert corpus.commit_owned("first") == 2
    assert corpus.commit_owned("first") == 0
    assert (corpus.namespace("n").open_documents, corpus.document_count("n"), corpus.document_count("m")) == (1, 1, 1)


def test_quota_is_kept_and_evictions_counted(corpus: Corpus) -> None:
    for i in range(200):
        _add(corpus, "n", str(i), [i % 100] * 50)
        if i % 20 == 0:
            assert corpus.settle()
    assert corpus.settle()
    info = corpus.namespace("n")
    assert info.tokens <= info.quota_tokens == 2048
    assert info.tokens + info.evicted_tokens == 200 * 50
    assert info.tokens > info.quota_tokens // 2
    assert info.documents >= info.tokens // 50
    assert info.main + info.recent + info.live == info.tokens
    assert corpus.refresh_errors == 0


def test_export_is_what_was_ingested_wherever_it_lies(corpus: Corpus) -> None:
    rng = np.random.default_rng(0)
    texts = {str(i): rng.integers(0, 100, int(rng.integers(1, 90))).tolist() for i in range(30)}
    for i, (document_id, text) in enumerate(texts.items()):
        half = len(text) // 2
        corpus.ingest("n", document_id, 0, ints(text[:half]), False)
        if i % 3 == 0:
            assert corpus.settle()
        corpus.ingest("n", document_id, half, ints(text[half:]), True)
        held = {d.document_id: d.tokens.tolist() for d in corpus.documents("n")}
        assert held == {d: texts[d] for d in held}
        assert document_id in held
    assert corpus.settle()
    held = {d.document_id: d.tokens.tolist() for d in corpus.documents("n")}
    assert list(held) == list(texts)[-len(held) :], "oldest first, and only the oldest are missing"


def test_export_leaves_out_what_is_open_or_no_longer_whole(corpus: Corpus) -> None:
    _add(corpus, "n", "open", [1, 2, 3], complete=False)
    _add(corpus, "n", "done", [4, 5])
    assert [(d.document_id, d.generation) for d in corpus.documents("n")] == [("done", 0)]


# -- generations -------------------------------------------------------------------------------------------------------------


def test_new_generation_forgets_what_is_not_kept(corpus: Corpus) -> None:
    for i in range(20):
        _add(corpus, "n", f"old-{i}", [i] * 40)
    assert corpus.settle()
    generation, evicted = corpus.advance_generation("n", 1)
    assert (generation, evicted) == (1, 800)
    _add(corpus, "n", "new", [50, 51, 52])
    assert corpus.settle()
    info = corpus.namespace("n")
    assert (info.tokens, info.documents, info.evicted_tokens, info.generation) == (3, 1, 800, 1)
    assert _drafted(corpus, [3, 3, 3], params=DraftParams(max_depth=16, use_local=False, policy="tree")) == []
    assert _drafted(corpus, [50, 51]) == [52]
    assert [(d.document_id, d.generation) for d in corpus.documents("n")] == [("new", 1)]


def test_generations_that_are_kept_stay(corpus: Corpus) -> None:
    for generation in range(4):
        _add(corpus, "n", f"g{generation}", [10 * generation, 1, 2])
        assert corpus.advance_generation("n", 2)[0] == generation + 1
        assert corpus.settle()
    assert [d.document_id for d in corpus.documents("n")] == ["g3"]
    with pytest.raises(InvalidArgument, match="at least 1"):
        corpus.advance_generation("n", 0)


def test_generations_are_kept_as_configured() -> None:
    corpus = _corpus(keep_generations=1)
    corpus.ensure_namespace("n", 100)
    _add(corpus, "n", "d", [1, 2, 3])
    assert corpus.advance_generation("n") == (1, 3)
    assert corpus.settle()
    assert corpus.namespace("n").tokens == 0
    corpus.close()


# -- visibility --------------------------------------------------------------------------------------------------------------


def test_what_came_before_a_ticket_is_visible(corpus: Corpus) -> None:
    for i in range(30):
        _add(corpus, "n", str(i), [i, i + 1, i + 2, 99 - i])
        assert corpus.wait_visible(corpus.ticket(), 30)
        assert _drafted(corpus, [i, i + 1, i + 2]) == [99 - i]
    lags = corpus.visibility_lags()
    assert len(lags) == 30
    assert min(lags) >= 0
    assert corpus.visibility_lags() == []


def test_waiting_has_an_end() -> None:
    corpus = Corpus(CorpusConfig(depth=16, quota_tokens=2048))
    assert not corpus.wait_visible(corpus.ticket(), 0.01)
    assert not corpus.settle(0.01)
    corpus.close()


def test_max_depth_above_the_index_depth(corpus: Corpus) -> None:
    with pytest.raises(InvalidArgument, match="at most the index depth 16") as caught:
        _drafted(corpus, [1], params=DraftParams(max_depth=17, policy="tree"))
    assert caught.value.field == "parameters.max_depth"


def test_refresh_that_finds_no_memory_keeps_the_old_version(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(corpus, "n", "a", [1, 2, 3])
    assert corpus.wait_visible(corpus.ticket(), 30)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(corpus._namespaces["n"].index, "reserve", full)
        _add(corpus, "n", "b", [5, 6, 7])
        assert corpus.wait_visible(corpus.ticket(), 30)
        assert corpus.refresh_errors > 0
        assert _drafted(corpus, [1, 2]) == [3]
    corpus.wait_visible(corpus.ticket(), 30)
    _add(corpus, "n", "c", [8, 9])
    assert corpus.settle()
    assert _drafted(corpus, [5, 6]) == [7]


def test_blocks_are_removed_at_the_end() -> None:
    corpus = _corpus()
    corpus.ensure_namespace("n", 10)
    folder = Path(corpus.control_spec().handle).parent
    assert folder.name == corpus.instance
    corpus.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "config",
    [{"depth": 1}, {"depth": 65}, {"quota_tokens": 511}, {"max_namespaces": 0}, {"refresh_interval_ms": 0}, {"recent_tokens": 127},
     {"live_tokens": 127}, {"keep_generations": 0}],
)  # fmt: skip
def test_configuration_out_of_range(config: dict[str, int]) -> None:
    (name,) = config
    with pytest.raises(InvalidArgument, match=f"{name} is {config[name]}; it must be in") as caught:
        CorpusConfig(**config)  # type: ignore[arg-type]
    assert caught.value.field == name
