"""The vLLM plugin without vLLM: what its speculator drafts, whatever happens."""

from __future__ import annotations

import logging
from typing import Any, get_args

import numpy as np
import pytest
import torch

from draftd.client.vllm.graphs import DraftGraphs, graph_sizes
from draftd.client.vllm.speculator import DraftdSpeculator, draft_params, make_speculator
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import DraftParams, Policy
from tests.client.fake_vllm import (
    ROWS,
    VOCAB_SIZE,
    FakeRanks,
    FakeSession,
    FakeStock,
    K,
    Output,
    config,
    make,
    new_request,
    propose,
    req_states,
    told,
)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


def test_drafts_are_spread_over_all_places_with_valid_tokens(session: FakeSession) -> None:
    session.drafts = {2: ([7, 8, 9, 10], [0.9, 0.8, 0.8, 0.2]), 4: ([5, 6], [0.5, 0.5])}
    speculator = make(session)
    assert propose(speculator, [4, 0, 2]) == [[5, 6, 54, 54], [50] * 4, [7, 8, 9, 10]]
    confidences = speculator.draft_token_confidence_probs[:3].numpy()
    # vLLM multiplies them; draftd's are of a token and all before it.
    np.testing.assert_allclose(confidences, [[0.5, 1.0, 0.0, 0.0], [0.0] * 4, [0.9, 0.8 / 0.9, 1.0, 0.25]], rtol=1e-6)
    assert session.seen_rows == [[4, 0, 2]]
    assert session.collected == [([4, 0, 2], [2, 0, 4])]


def test_tokens_outside_the_vocabulary_do_not_reach_vllm(session: FakeSession) -> None:
    session.drafts = {0: ([1, VOCAB_SIZE, -5, 2], [1.0, 1.0, 1.0, 1.0])}
    speculator = make(session)
    assert propose(speculator, [0]) == [[1, 50, 50, 2]]
    assert speculator.draft_token_confidence_probs[0].tolist() == [1, 0, 0, 1]


def test_a_survival_of_zero_is_worth_nothing(session: FakeSession) -> None:
    session.drafts = {0: ([1, 2, 3], [0.0, 0.0, 0.0])}
    speculator = make(session)
    propose(speculator, [0])
    assert speculator.draft_token_confidence_probs[0].tolist() == [0, 0, 0, 0]


def test_chunks_of_a_prompt_are_not_drafted_for(session: FakeSession) -> None:
    session.drafts = {1: ([3], [1.0]), 3: ([4], [1.0])}
    assert propose(make(session), [1, 3], sampled=[0, 2]) == [[51] * 4, [4, 53, 53, 53]]
    assert session.seen_rows == [[-1, 3]]


def test_rows_that_are_off_get_vllms_filling_until_their_request_ends(session: FakeSession) -> None:
    session.drafts = {row: ([9], [1.0]) for row in range(ROWS)}
    speculator = make(session)
    speculator.begin_requests(told(Output([new_request("a", [1], draftd_off=1), new_request("b", [1])])), {"a": 0, "b": 1})
    assert propose(speculator, [0, 1]) == [[50] * 4, [9, 51, 51, 51]]
    speculator.end_requests(told(Output(finished_req_ids={"a"})))
    assert propose(speculator, [0, 1])[0] == [9, 50, 50, 50]
    assert session.seen_rows == [[-1, 1], [0, 1]]


def test_a_dummy_run_launches_and_drafts_for_nobody(session: FakeSession) -> None:
    session.drafts = {0: ([9], [1.0])}
    stock = FakeStock()
    assert len(propose(make(session, stock=stock), [0, 1, 2], dummy=True)) == 3
    assert session.seen_rows == [[-1, -1, -1]]
    assert stock.calls == 0


def test_a_draft_that_vllm_cuts_is_counted_as_cut(session: FakeSession) -> None:
    session.drafts = {0: ([1, 2, 3, 4], [1.0] * 4)}
    speculator = make(session)
    assert propose(speculator, [0], most=2) == [[1, 2, 50, 50]]
    propose(speculator, [0], most=0)
    assert session.collected == [([0], [2]), ([0], [0])]


def test_after_a_failure_vllms_speculator_drafts(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    stock = FakeStock()
    speculator = make(session, stock=stock, adaptive=True)
    session.fails = True
    for _ in range(3):
        assert propose(speculator, [0, 1]) == [[77] * K] * 2
    assert stock.calls == 3
    assert speculator.failures == 1
    assert session.closed
    assert speculator.draft_token_confidence_probs[:2].eq(1).all()
    assert sum(record.levelno >= logging.ERROR for record in caplog.records) == 1
    speculator.begin_requests(told(Output([new_request("a", [1])])), {"a": 0})
    speculator.end_requests(told(Output(finished_req_ids={"a"})))
    speculator.close()
    assert session.calls == []


def test_without_graphs_that_cannot_be_captured_drafts_come_all_the_same(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: DraftGraphs) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(DraftGraphs, "capture", fail)
    session.drafts = {1: ([7, 8], [0.5, 0.25])}
    speculator = make(session)
    before = propose(speculator, [1])
    speculator.capture()
    assert propose(speculator, [1]) == before
    assert before[0][:2] == [7, 8]
    assert not session.closed
    assert (speculator.failures, "out of memory" in caplog.text) == (1, True)


def test_a_failure_at_a_requests_begin_does_not_reach_vllm(session: FakeSession) -> None:
    speculator = make(session)
    speculator.begin_requests(told(Output([new_request("a", [1])])), {})
    assert speculator.failures == 1
    assert propose(speculator, [0]) == [[77] * K]


def test_all_ranks_get_the_first_ones_drafts(session: FakeSession) -> None:
    session.drafts = {1: ([7, 8], [0.5, 0.25])}
    sent: list[Any] = []
    first = make(session, FakeRanks(0, 2, sent), adaptive=True)
    second = make(None, FakeRanks(1, 2, sent), adaptive=True)
    drafts = propose(first, [1, 2])
    assert propose(second, [1, 2]) == drafts
    assert second.draft_token_confidence_probs[:2].tolist() == first.draft_token_confidence_probs[:2].tolist()
    propose(first, [1], dummy=True)
    propose(second, [1], dummy=True)
    assert sent == []


@pytest.mark.parametrize("error", [TimeoutError("no answer"), AttributeError("no answer")])
def test_ranks_agree_to_go_without_draftd(error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/nowhere")
    sent: list[Any] = []
    stock = FakeStock()

    def refuse(*_: Any) -> Any:
        raise error

    device = torch.device("cpu")
    assert make_speculator(stock, config(), device, req_states(), FakeRanks(0, 2, sent), refuse) is stock
    assert make_speculator(stock, config(), device, req_states(), FakeRanks(1, 2, sent), refuse) is stock
    assert [record.message for record in caplog.records] == [
        f"draftd is not used, vLLM drafts with ngram_gpu instead: {type(error).__name__}: no answer"
    ]


def test_ranks_agree_to_use_draftd(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/nowhere")
    sent: list[Any] = []
    for rank in (0, 1):
        made = make_speculator(FakeStock(), config(), torch.device("cpu"), req_states(), FakeRanks(rank, 2, sent), lambda *_: session)
        assert isinstance(made, DraftdSpeculator)


def test_drafts_are_long_unless_vllm_chooses_by_confidence() -> None:
    fixed, adaptive = (config(enable_adaptive_verification=on).speculative_config for on in (False, True))
    plain, chosen = draft_params(fixed, "tree"), draft_params(adaptive, "tree")
    assert (plain.k, plain.min_token_prob, plain.policy) == (K, 0.0, "tree")
    assert (chosen.k, chosen.policy) == (K, "tree")
    assert chosen.min_token_prob > 0
    assert draft_params(fixed, "calibrated") == DraftParams(k=K, tau=0.0)
    assert 0 < draft_params(adaptive, "calibrated").tau < DraftParams().tau
    for policy in get_args(Policy):
        with pytest.raises(InvalidArgument):
            draft_params(config(num_speculative_tokens=65).speculative_config, policy)


def test_graph_sizes_cover_every_batch_and_waste_little() -> None:
    for most in (1, 3, 64, 100, 256, 1000):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for batch in range(1, most + 1):
            assert min(size for size in sizes if size >= batch) - batch < max(8, batch / 2)
