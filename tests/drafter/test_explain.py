"""Explanations: every matched suffix with the counts, next tokens and documents that brute force finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.ops.draft.oracle import Stretch, corpus_occurrences, local_occurrences, propose
from draftd.drafter.params import DraftParams
from tests.drafter.bench import assert_draft, ints
from tests.drafter.texts import corpora

PARAMS = DraftParams(k=8, max_depth=16, policy="tree")
_numbers = count()


@pytest.fixture(scope="module")
def corpus() -> Iterator[Corpus]:
    made = Corpus(CorpusConfig(depth=16, quota_tokens=2048, recent_tokens=256, live_tokens=256, max_namespaces=10_000))
    made.start()
    yield made
    made.close()


def _add(corpus: Corpus, name: str, document_id: str, tokens: list[int]) -> None:
    corpus.ingest(name, document_id, 0, ints(tokens), True)


@settings(max_examples=25)
@given(texts=corpora(8), row=st.lists(st.integers(0, 2), min_size=1, max_size=10), local=st.booleans(), settle=st.booleans())
def test_explanation_is_brute_force(corpus: Corpus, texts: list[list[int]], row: list[int], local: bool, settle: bool) -> None:
    name = f"explained-{next(_numbers)}"
    corpus.ensure_namespace(name, 2**21 - 1)
    for i, text in enumerate(texts):
        _add(corpus, name, str(i), text)
        if settle:
            assert corpus.settle()
    assert corpus.wait_visible(corpus.ticket(), 30)
    params = DraftParams(k=8, max_depth=16, use_local=local, policy="tree")
    explanation = corpus.explain(name, ints(row), params, limit=1000)
    stretches = [Stretch(text, len(text)) for text in texts]
    assert_draft(explanation.drafts, 0, row, stretches, params)
    seen = {(m.source, m.length): m for m in explanation.matches}
    assert list(seen) == sorted(seen, key=lambda key: (-key[1], key[0]))
    for length in range(1, min(16, len(row))):
        places = corpus_occurrences(stretches, row[-length:])
        match = seen.pop((2, length), None)
        assert (match.occurrences if match else 0) == len(places)
        if match:
            following = Counter(
                stretches[p.stretch].tokens[p.position + length] for p in places if p.position + length < len(texts[p.stretch])
            )
            assert dict(match.next_tokens) == dict(following)
            assert match.distinct_next_tokens == len(following)
            assert [(d.document_id, d.position) for d in match.documents] == [(str(p.stretch), p.position) for p in reversed(places)]
        ends = local_occurrences(row, length) if local else []
        match = seen.pop((1, length), None)
        assert (match.occurrences if match else 0) == (len(ends) + 1 if ends else 0)
    assert not seen
    best = propose(row, stretches, params)
    scores = [m for m in explanation.matches if (m.source, m.length) == (best.source, best.match_length)]
    assert [(m.draft, m.score) for m in scores] == ([(best.chain.tokens, best.chain.score)] if best.source else [])


def test_explanation_lists_no_more_than_asked(corpus: Corpus) -> None:
    corpus.ensure_namespace("listed", 100)
    for i in range(20):
        _add(corpus, "listed", str(i), [1, 2, 10 + i])
    assert corpus.wait_visible(corpus.ticket(), 30)
    (longest, shorter) = corpus.explain("listed", ints([7, 1, 2]), PARAMS, limit=3).matches
    assert (longest.length, shorter.length) == (2, 1)
    assert longest.occurrences == longest.distinct_next_tokens == 20
    assert len(longest.next_tokens) == len(longest.documents) == 3
    assert [d.document_id for d in longest.documents] == ["19", "18", "17"]
