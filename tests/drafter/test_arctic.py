"""arctic-inference 0.3.0 as a second oracle: the same drafts wherever the counts leave no tie.

Where counts tie, each may follow another token: then arctic's draft must be one that some way of resolving the ties gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.ops.draft.oracle import Stretch, cap_of, corpus_occurrences, local_occurrences
from draftd.drafter.params import DraftParams
from draftd.drafter.records import RowContext
from tests.drafter.arctic_replay import DEPTH, SETTINGS, ArcticDraft, K, Request, Setting, recorded, replay
from tests.drafter.bench import ints

VOCABULARY = 128_256
RECORDED = recorded()


class Option(NamedTuple):
    """A draft that some way of resolving ties gives, and the sum of its probabilities."""

    tokens: list[int]
    score: float


def _options(
    occurrences: Sequence[tuple[int, int]], token_at: Callable[[int, int], int | None], extra: int, cap: int, floor: float
) -> Iterator[Option]:
    """All ways to follow the most frequent continuation; occurrences are (text, position after the match)."""

    def follow(current: list[tuple[int, int]], total: int, tokens: list[int], prob: float, score: float) -> Iterator[Option]:
        following: dict[int, list[tuple[int, int]]] = {}
        for text, at in current:
            token = token_at(text, at)
            if token is not None:
                following.setdefault(token, []).append((text, at + 1))
        most = max(map(len, following.values()), default=0)
        share = float(np.float32(prob) * np.float32(most / total)) if total else 0.0
        if len(tokens) >= cap or most == 0 or share < floor:
            yield Option(tokens, score)
            return
        for token, where in following.items():
            if len(where) == most:
                yield from follow(where, most, [*tokens, token], share, score + share)

    yield from follow(list(occurrences), len(occurrences) + extra, [], 1.0, 0.0)


def _candidates(row: list[int], corpus: list[Stretch], params: DraftParams) -> Iterator[tuple[int, list[Option]]]:
    """For each match length of each source, all drafts that it may give."""

    def row_token(_: int, at: int) -> int | None:
        return row[at] if at < len(row) else None

    def corpus_token(text: int, at: int) -> int | None:
        tokens = corpus[text].tokens
        return int(tokens[at]) if at < len(tokens) else None

    for length in range(1, min(params.max_depth, len(row))):
        own = [(0, end + 1) for end in local_occurrences(row, length)]
        places = [(p.stretch, p.position + length) for p in corpus_occurrences(corpus, row[-length:])]
        if not own and not places:
            return
        cap, floor = cap_of(length, params), float(np.float32(params.min_token_prob))
        yield length, list(_options(own, row_token, 1, cap, floor))
        yield length, list(_options(places, corpus_token, 0, cap, floor))


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5)


def _may_come_from_ties(arctic: ArcticDraft, row: list[int], corpus: list[Stretch], params: DraftParams) -> bool:
    """There was a tie, and one way of resolving it makes arctic's draft the best."""
    candidates = list(_candidates(row, corpus, params))
    best = max((o.score for _, options in candidates for o in options), default=0.0)
    winners = {tuple(o.tokens) for _, options in candidates for o in options if _is_close(o.score, best)}
    tied = any(len(options) > 1 for _, options in candidates) or len(winners) > 1
    possible = any(
        option.tokens == arctic.tokens and _is_close(option.score, arctic.score)
        for length, options in candidates
        if length == arctic.match_length
        for option in options
    )
    return tied and possible and all(min(o.score for o in options) <= arctic.score + 1e-5 for _, options in candidates)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.trace}-{s.factor:g}-{s.probability:g}")
def test_same_drafts_as_arctic_where_counts_leave_no_tie(setting: Setting) -> None:
    corpus = Corpus(CorpusConfig(depth=DEPTH, quota_tokens=65_536, recent_tokens=4096, live_tokens=2048))
    corpus.ensure_namespace("n", VOCABULARY)
    params = DraftParams(k=K, max_depth=DEPTH, spec_factor=setting.factor, min_token_prob=setting.probability, policy="tree")
    drafts = iter(RECORDED[setting])
    outputs: dict[int, list[int]] = {}
    same = tied = drafted = 0

    def draft(requests: list[Request]) -> list[ArcticDraft]:
        nonlocal same, tied, drafted
        corpus.refresh()
        rows = [r.context + r.output for r in requests]
        got = corpus.propose([RowContext(ints(row), "n", False) for row in rows], params)
        answers = [next(drafts) for _ in requests]
        for i, arctic in enumerate(answers):
            drafted += bool(arctic.tokens)
            equal = got.row(i) == arctic.tokens and _is_close(float(got.probabilities[i].sum()), arctic.score)
            if equal and (not arctic.tokens or got.match_length[i] == arctic.match_length):
                same += 1
                continue
            tied += 1
            stretches = [Stretch(output, len(output)) for output in outputs.values()]
            assert _may_come_from_ties(arctic, rows[i], stretches, params), (requests[i].number, got.row(i), arctic)
        return answers

    def commit(request: Request, tokens: list[int], ended: bool) -> None:
        corpus.ingest("n", str(request.number), len(request.output) - len(tokens), ints(tokens), ended)

    def begin(request: Request) -> None:
        outputs[request.number] = request.output

    replay(setting, draft, begin, commit)
    corpus.close()
    assert next(drafts, None) is None
    assert drafted > 1000
    assert same > 2 * tied


def test_only_ties_excuse_another_draft() -> None:
    """The comparison above can fail: it tells a tie from a wrong draft."""
    params = DraftParams(k=4, max_depth=8, spec_factor=2, policy="tree")
    clear = [Stretch([1, 2, 3], 3), Stretch([1, 2, 3], 3), Stretch([1, 2, 4], 3)]
    assert not _may_come_from_ties(ArcticDraft([4], 1 / 3, 2), [9, 1, 2], clear, params)
    assert not _may_come_from_ties(ArcticDraft([3], 2 / 3, 2), [9, 1, 2], clear, params), "equal where there is no tie is no excuse either"
    tie = clear[1:]
    assert _may_come_from_ties(ArcticDraft([3], 0.5, 2), [9, 1, 2], tie, params)
    assert _may_come_from_ties(ArcticDraft([4], 0.5, 2), [9, 1, 2], tie, params)
    assert not _may_come_from_ties(ArcticDraft([5], 0.5, 2), [9, 1, 2], tie, params)
    assert not _may_come_from_ties(ArcticDraft([4], 0.6, 2), [9, 1, 2], tie, params)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.trace}-{s.factor:g}-{s.probability:g}")
def test_recording_is_what_arctic_drafts(setting: Setting) -> None:
    pytest.importorskip("arctic_inference.suffix_decoding")
    from tests.drafter.record_arctic import record

    assert record(setting) == RECORDED[setting]
