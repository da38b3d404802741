"""The three transports draft alike, share alike, and keep private what is private."""

import json
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest

from draftd.client import Drafter
from draftd.client.courier import UPLOAD_TOKENS
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams
from draftd.server.replay.service import PrivateService

Attach = Callable[..., Drafter]
Eventually = Callable[[Callable[[], bool]], None]
TRANSPORTS = ("mapped", "handle", "inline")
VISIBLE_S = 20
VOCAB_SIZE = 1000


def corpus_of(seed: int, documents: int = 12) -> list[np.ndarray]:
    """Documents over few tokens, so that there are many matches; lengths differ."""
    rng = np.random.default_rng(seed)
    motifs = [rng.integers(0, 60, 9) for _ in range(5)]
    return [np.concatenate([motifs[i] for i in rng.integers(0, 5, 6 + d % 4)]) for d in range(documents)]


def feed(drafter: Drafter, documents: list[np.ndarray]) -> None:
    """Commits documents through an engine's row."""
    for i, tokens in enumerate(documents):
        drafter.start(0, [999], f"fed-{i}")
        drafter.append(0, tokens)
        drafter.finish(0)
        assert drafter.wait_visible(VISIBLE_S)


def assert_same(first: Drafts, second: Drafts) -> None:
    for field in ("tokens", "probabilities", "counts", "source", "match_length", "occurrences", "version"):
        np.testing.assert_array_equal(getattr(first, field), getattr(second, field), err_msg=field)


@pytest.mark.parametrize(
    "params",
    [DraftParams(policy="tree"), DraftParams(k=5, max_depth=20, spec_factor=1.3, spec_offset=0.7, min_token_prob=0.3, policy="tree")],
)
def test_transports_draft_identically(attach: Attach, params: DraftParams) -> None:
    feed(attach("mapped"), corpus_of(1))
    contexts = [np.concatenate([document[:30], document[:7]]) for document in corpus_of(1)[:7]] + [np.array([998])]
    drafts = {}
    for name in TRANSPORTS:
        drafter = attach(name, params=params)
        assert drafter.transport == name
        for row, context in enumerate(contexts):
            # The same rows in every engine must not draft from each other, so they share nothing new: all of it is prompt.
            drafter.start(row, context)
        assert drafter.wait_visible(VISIBLE_S)
        drafts[name] = drafter.propose(range(len(contexts)))
        assert drafts[name].tokens.shape == (8, 16)
    assert set(drafts["mapped"].source.tolist()) == {0, 1, 2}
    assert_same(drafts["mapped"], drafts["inline"])
    assert_same(drafts["mapped"], drafts["handle"])


@pytest.mark.parametrize("reader", TRANSPORTS)
@pytest.mark.parametrize("writer", TRANSPORTS)
def test_tokens_in_flight_reach_other_engines(attach: Attach, writer: str, reader: str) -> None:
    writing, reading = attach(writer), attach(reader)
    writing.start(3, [1, 2], "in-flight")
    writing.append(3, [10, 11, 12, 13, 14, 15])
    assert writing.wait_visible(VISIBLE_S)
    reading.start(0, [9, 10, 11, 12])
    drafts = reading.propose([0])
    assert drafts.row(0) == [13, 14, 15]
    assert drafts.source[0] == 2
    assert drafts.match_length[0] == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_commits_without_a_propose_get_there_too(attach: Attach, eventually: Eventually, transport: str) -> None:
    writing, reading = attach(transport), attach("mapped")
    writing.start(0, [1])
    writing.append(0, [20, 21, 22, 23, 24])
    reading.start(0, [20, 21, 22])
    eventually(lambda: reading.propose([0]).row(0) == [23, 24])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_appended_to_together_share_as_those_one_by_one(attach: Attach, transport: str) -> None:
    """Of a batch as large as is done at once; a private row of it stays private, and one that gets nothing stays as it is."""
    writing, reading = attach(transport), attach("mapped")
    rng = np.random.default_rng(3)
    counts = np.array([9, 12, 5, 0, 12, 7, 8, 11])
    tokens = rng.integers(100, 900, (8, 12)).astype(np.int32)
    for row in range(8):
        writing.start(row, [row], f"row-{row}", private=row == 5)
    rows = np.array([4, 1, 0, 7, 5, 2, 3, 6])
    writing.append_rows(rows, tokens, counts)
    writing.append_rows(rows, tokens + 1, np.full(8, 3))
    assert writing.wait_visible(VISIBLE_S)
    assert writing.stats.committed_tokens[0] == counts.sum() + 24
    for row, given, count in zip(rows.tolist(), tokens, counts.tolist(), strict=True):
        expected = [*given[:count].tolist(), *(given[:3] + 1).tolist()]
        known = len(expected) - (3 if count else 1)
        reading.start(0, expected[:known])
        assert reading.propose([0]).row(0) == ([] if row == 5 else expected[known:]), row


@pytest.mark.parametrize("wrong", ["token", "row", "length"])
def test_a_wrong_row_of_several_costs_only_itself(attach: Attach, wrong: str) -> None:
    writing, reading = attach("mapped", max_length=64, strict=False), attach("mapped")
    rows, counts = np.arange(8), np.full(8, 10)
    tokens = np.random.default_rng(4).integers(100, 900, (8, 10)).astype(np.int32)
    for row in range(8):
        writing.start(row, [row] * (60 if wrong == "length" and row == 3 else 1))
    if wrong == "token":
        tokens[3, 4] = VOCAB_SIZE
    elif wrong == "row":
        rows[3] = 99
    writing.append_rows(rows, tokens, counts)
    assert sum(writing.stats.fail_opens) == 1
    assert writing.stats.committed_tokens[0] == 70
    assert writing.wait_visible(VISIBLE_S)
    for row in range(8):
        reading.start(0, tokens[row, :7])
        assert reading.propose([0]).row(0) == ([] if row == 3 else tokens[row, 7:].tolist())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_private_rows_draft_from_themselves_and_are_never_kept(attach: Attach, transport: str) -> None:
    drafter, other = attach(transport), attach("mapped")
    feed(other, [np.array([50, 51, 52, 53, 54, 55])])
    drafter.start(0, [30, 31, 32, 33, 30, 31], private=True)
    drafter.start(1, [50, 51, 52], private=True)
    drafter.append(1, [40, 41, 42, 43])
    assert drafter.wait_visible(VISIBLE_S)
    drafts = drafter.propose([1, 0])
    assert drafts.row(1)[:2] == [32, 33]
    assert drafts.source.tolist() == [0, 1]
    drafter.finish(1)
    assert drafter.wait_visible(VISIBLE_S)
    other.start(0, [40, 41, 42])
    assert other.propose([0]).counts[0] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_discarded_and_prompt_tokens_are_not_drafted_from(attach: Attach, transport: str) -> None:
    drafter, other = attach(transport), attach("inline")
    drafter.start(0, [60, 61, 62, 63, 64])
    drafter.propose([0])
    drafter.append(0, [70, 71])
    drafter.finish(0)
    drafter.start(0, [1])
    drafter.append(0, [80, 81, 82, 83])
    drafter.finish(0, discard=True)
    assert drafter.wait_visible(VISIBLE_S)
    for row, context in enumerate(([60, 61, 62], [80, 81, 82], [9, 70])):
        other.start(row, context)
    assert other.propose([0, 1, 2]).counts.tolist() == [0, 0, 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_preempted_request_comes_back_in_another_row(attach: Attach, transport: str) -> None:
    drafter, other = attach(transport), attach("mapped")
    drafter.start(0, [1, 2, 3], "preempted")
    drafter.propose([0])
    drafter.append(0, [10, 11, 12])
    drafter.preempt(0)
    drafter.start(0, [4, 5], "in its row")
    drafter.append(0, [20, 21])
    drafter.start(5, [1, 2, 3, 10, 11, 12, 13], "preempted", prompt_length=3)
    drafter.propose([0, 5])
    drafter.append(5, [14, 15])
    drafter.finish(5)
    assert drafter.wait_visible(VISIBLE_S)
    other.start(0, [9, 10, 11])
    assert other.propose([0]).row(0) == [12, 13, 14, 15]
    stats = drafter.stats
    assert stats.fail_opens.sum() == 0
    assert stats.lost_tokens[0] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_may_use_further_namespaces(attach: Attach, namespace: str, transport: str) -> None:
    drafter = attach(transport, extra_namespaces=[f"{namespace}/b"])
    drafter.start(0, [1], namespace=f"{namespace}/b")
    drafter.append(0, [10, 11, 12, 13])
    assert drafter.wait_visible(VISIBLE_S)
    drafter.start(1, [10, 11])
    drafter.start(2, [10, 11], namespace=f"{namespace}/b")
    drafts = drafter.propose([2, 1])
    assert [drafts.row(0), drafts.row(1)] == [[12, 13], []]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_prompts_are_drafted_from(attach: Attach, transport: str) -> None:
    tokens = np.arange(100_000) % 997
    drafter = attach(transport, max_length=120_000)
    drafter.start(0, tokens)
    assert drafter.wait_visible(VISIBLE_S)
    drafts = drafter.propose([0])
    first = int(tokens[-1])
    assert drafts.row(0) == [(first + 1 + i) % 997 for i in range(16)]


def test_many_short_requests_lose_nothing(attach: Attach) -> None:
    drafter, other = attach("mapped", max_rows=2), attach("inline")
    for i in range(100):
        drafter.start(0, [1])
        drafter.append(0, [100 + i, 300 + i, 500 + i])
        drafter.finish(0)
    assert drafter.wait_visible(VISIBLE_S)
    for start in range(0, 100, 8):
        rows = range(min(8, 100 - start))
        for row in rows:
            other.start(row, [9, 100 + start + row])
        assert [d for i in rows for d in other.propose([i]).row(0)[:1]] == [300 + start + row for row in rows]
    assert drafter.stats.lost_tokens[0] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_and_service_count_the_same(attach: Attach, service: PrivateService, eventually: Eventually, transport: str) -> None:
    drafter = attach(transport)
    feed(drafter, corpus_of(3))
    for row, document in enumerate(corpus_of(3)[:4]):
        drafter.start(row, [997, *document[:12].tolist()])
        for at in range(12, 40, 4):
            drafter.propose([row])
            drafter.append(row, document[at : at + 4])
        drafter.finish(row)
    assert drafter.wait_visible(VISIBLE_S)
    stats = drafter.stats
    assert stats.accepted.sum() > 0
    assert stats.drafted.sum() > stats.accepted.sum()

    def counted() -> dict[str, int]:
        with urllib.request.urlopen(f"{service.http_url}/v1/status") as answer:
            engines = {one["engine"]: one for one in json.load(answer)["attachments"]}
        return {key: engines[drafter.engine][key] for key in ("proposals", "drafted_tokens", "accepted_tokens")}

    expected = {"proposals": 28, "drafted_tokens": int(stats.drafted.sum()), "accepted_tokens": int(stats.accepted.sum())}
    eventually(lambda: counted() == expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_output_of_a_row_longer_than_an_upload_is_not_lost(attach: Attach, transport: str) -> None:
    drafter = attach(transport, max_rows=2, max_length=3 * UPLOAD_TOKENS)
    drafter.start(0, np.arange(2 * UPLOAD_TOKENS) % VOCAB_SIZE)
    output = np.arange(40) * 7 % VOCAB_SIZE
    for token in output:
        drafter.append(0, [token])
        drafter.wait_visible(VISIBLE_S)
    drafter.finish(0)
    assert drafter.wait_visible(VISIBLE_S)
    other = attach("inline")
    other.start(0, output[:20])
    drafts = other.propose([0])
    assert drafts.row(0)[:5] == output[20:25].tolist()
    assert drafter.stats.lost_tokens[0] == 0
