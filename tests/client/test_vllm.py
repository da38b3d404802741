"""The vLLM plugin without vLLM: what it makes of vLLM's calls, with stand-ins for vLLM's objects and for the session."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from draftd.client.vllm import plugin
from draftd.client.vllm.graphs import DraftGraphs, graph_sizes
from draftd.client.vllm.plugin import AfterImport, is_known
from draftd.client.vllm.requests import Requests
from draftd.client.vllm.runner import hook_runner
from draftd.client.vllm.scheduler import DISCARDED, ends_of, hook_scheduler, salt_of, salted
from draftd.client.vllm.settings import RequestOptions, Settings, unknown_options
from draftd.client.vllm.speculator import DraftdSpeculator, draft_params, make_speculator
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import DraftParams, Policy

K = 4
ROWS = 6
VOCAB_SIZE = 100
SETTINGS = Settings("unix:/nowhere", "engine", "model", ("model/lora/sql", "team"))


class FakeSession:
    """A DeviceSession that drafts what it is told to and notes its calls."""

    transport = "mapped"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.drafts: dict[int, tuple[list[int], list[float]]] = {}
        self.seen_rows: list[list[int]] = []
        self.collected: list[tuple[list[int], list[int]]] = []
        self.fails = False
        self.closed = False

    def start(
        self, row: int, tokens: Any, document_id: str | None = None, namespace: str | None = None, private: bool = False,
        *, prompt_length: int | None = None,
    ) -> None:  # fmt: skip
        self.calls.append(("start", row, np.asarray(tokens).tolist(), namespace, private, prompt_length))

    def finish(self, row: int, length: int | None = None, discard: bool = False) -> None:
        self.calls.append(("finish", row, length, discard))

    def propose(self, rows: torch.Tensor, out: DeviceDrafts | None = None) -> DeviceDrafts:
        if self.fails:
            raise RuntimeError("the device is gone")
        assert out is not None
        self.seen_rows.append(rows.tolist())
        out.counts.zero_()
        out.tokens.fill_(-1)
        out.probabilities.zero_()
        for place, row in enumerate(rows.tolist()):
            tokens, survivals = self.drafts.get(row, ([], []))
            out.tokens[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            out.probabilities[place, : len(tokens)] = torch.tensor(survivals)
            out.counts[place] = len(tokens)
        return out

    def collect(self, rows: torch.Tensor, drafts: DeviceDrafts) -> None:
        self.collected.append((rows.tolist(), drafts.counts.tolist()))

    def close(self) -> None:
        self.closed = True


@dataclass
class Output:
    """vLLM's SchedulerOutput, as far as it is read."""

    scheduled_new_reqs: list[Any] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None


def new_request(
    name: str, prompt: list[int], output: list[int] | None = None, lora: str | None = None, **extra_args: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=prompt,
        prefill_token_ids=prompt + (output or []),
        sampling_params=SimpleNamespace(extra_args=extra_args or None),
        lora_request=None if lora is None else SimpleNamespace(lora_name=lora),
    )


def told(output: Output, ends: dict[str, int] | None = None, salts: dict[str, str] | None = None) -> Output:
    """An output of a scheduler that is hooked."""
    output.__dict__.update(draftd_ends=ends or {}, draftd_salts={name: salted(salt) for name, salt in (salts or {}).items()})
    return output


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def masks() -> list[tuple[int, bool]]:
    return []


@pytest.fixture
def requests(session: FakeSession, masks: list[tuple[int, bool]]) -> Requests:
    return Requests(session, SETTINGS, lambda row, wanted: masks.append((row, wanted)))


# -- requests --------------------------------------------------------------------------------------------------------------------


def test_a_request_starts_with_its_prompt_and_ends_with_what_the_scheduler_counts(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1, 2, 3])])), {"a": 5})
    requests.end(told(Output(finished_req_ids={"a"}), {"a": 7}))
    assert session.calls == [("start", 5, [1, 2, 3], "model", False, 3), ("finish", 5, 7, False)]


def test_document_ids_differ_between_engines_requests_and_comebacks(session: FakeSession) -> None:
    ids: list[str] = []
    session.start = lambda row, tokens, document_id, *args, **more: ids.append(document_id)  # type: ignore[method-assign]
    for _ in range(2):
        requests = Requests(session, SETTINGS, lambda row, wanted: None)
        for _ in range(2):
            requests.begin(told(Output([new_request("0", [1])])), {"0": 0})
            requests.end(told(Output(finished_req_ids={"0"}), {"0": 1}))
    requests.begin(told(Output([new_request("ü" * 200, [1])])), {"ü" * 200: 0})
    assert len(set(ids)) == 5
    assert all(1 <= len(name.encode()) <= 128 for name in ids)


def test_a_preempted_request_is_kept_once(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1, 2])])), {"a": 0})
    requests.end(told(Output(preempted_req_ids={"a"}), {"a": 4}))
    # Two more tokens were under way and were delivered before it came back.
    requests.begin(told(Output([new_request("a", [1, 2], [3, 4, 5, 6])])), {"a": 3})
    requests.end(told(Output(finished_req_ids={"a"}), {"a": 9}))
    assert session.calls == [
        ("start", 0, [1, 2], "model", False, 2),
        ("finish", 0, 4, False),
        ("start", 3, [1, 2, 3, 4, 5, 6], "model", False, 4),
        ("finish", 3, 9, False),
    ]


def test_a_request_preempted_in_its_prompt_keeps_no_prompt(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1, 2, 3])])), {"a": 0})
    requests.end(told(Output(preempted_req_ids={"a"}), {"a": 3}))
    requests.begin(told(Output([new_request("a", [1, 2, 3])])), {"a": 0})
    assert session.calls[-1] == ("start", 0, [1, 2, 3], "model", False, 3)


def test_a_request_that_ends_while_preempted_is_forgotten(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1])])), {"a": 0})
    requests.end(told(Output(preempted_req_ids={"a"}), {"a": 2}))
    requests.end(told(Output(finished_req_ids={"a"}), {"a": 3}))
    requests.begin(told(Output([new_request("a", [1])])), {"a": 0})
    assert session.calls[-1] == ("start", 0, [1], "model", False, 1)


def test_an_aborted_request_is_ended_and_an_unknown_one_ignored(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1])])), {"a": 0})
    requests.end(told(Output(finished_req_ids={"a", "never seen"}), {"a": 1, "never seen": 9}))
    assert session.calls[1:] == [("finish", 0, 1, False)]


def test_a_failed_request_is_forgotten(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1])])), {"a": 0})
    requests.end(told(Output(finished_req_ids={"a"}), {"a": DISCARDED}))
    assert session.calls[1:] == [("finish", 0, None, True)]


def test_nothing_is_kept_where_the_scheduler_says_no_lengths(
    requests: Requests, session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    requests.begin(Output([new_request("a", [1]), new_request("b", [1])]), {"a": 0, "b": 1})
    requests.end(Output(finished_req_ids={"a", "b"}))
    # Nobody can say whether they had a cache salt either.
    assert [call[4] for call in session.calls[:2]] == [True, True]
    assert sorted(session.calls[2:]) == [("finish", 0, None, True), ("finish", 1, None, True)]
    assert requests.counts.discarded == 2
    assert sum("how long outputs are" in record.message for record in caplog.records) == 1


def test_a_session_that_streams_its_input_goes_on_as_a_new_document(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1, 2])])), {"a": 0})
    requests.begin(told(Output([new_request("a", [1, 2, 7, 8])])), {"a": 0})
    assert session.calls[1:] == [("finish", 0, None, True), ("start", 0, [1, 2, 7, 8], "model", False, 4)]


@pytest.mark.parametrize("name", ["_warmup_0_", "_v2_mixed_warmup_decode_", "_dummy_req_3"])
def test_warm_up_requests_are_not_drafted_for(name: str, requests: Requests, session: FakeSession, masks: list[tuple[int, bool]]) -> None:
    requests.begin(told(Output([new_request(name, [0, 1])])), {name: 2})
    requests.end(told(Output(finished_req_ids={name}), {name: 3}))
    assert session.calls == []
    assert masks == [(2, False), (2, True)]


def test_requests_without_tokens_or_sampling_are_not_drafted_for(requests: Requests, session: FakeSession) -> None:
    embedded, pooled = new_request("embedded", [1]), new_request("pooled", [1])
    embedded.prompt_token_ids = None
    pooled.sampling_params = None
    requests.begin(told(Output([embedded, pooled])), {"embedded": 0, "pooled": 1})
    assert session.calls == []
    assert requests.counts.off == 2


def test_options_of_a_request_reach_the_session(requests: Requests, session: FakeSession, masks: list[tuple[int, bool]]) -> None:
    new = [
        new_request("off", [1], draftd_off=True),
        new_request("private", [1, 2], draftd_private="true"),
        new_request("team", [1, 2], draftd_namespace="team"),
        new_request("prompt", [1, 2], draftd_keep_prompt=1),
    ]
    requests.begin(told(Output(new)), {n.req_id: i for i, n in enumerate(new)})
    assert masks == [(0, False)]
    assert session.calls == [
        ("start", 1, [1, 2], "model", True, 2),
        ("start", 2, [1, 2], "team", False, 2),
        ("start", 3, [1, 2], "model", False, 0),
    ]


# -- settings ----------------------------------------------------------------------------------------------------------------------


def config(**more: Any) -> SimpleNamespace:
    speculative = SimpleNamespace(num_speculative_tokens=K, enable_adaptive_verification=False)
    model = SimpleNamespace(model="org/Model-7B", served_model_name=None, max_model_len=64, get_vocab_size=lambda: VOCAB_SIZE)
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, rank=0, tensor_parallel_size=1)
    scheduler = SimpleNamespace(max_num_seqs=ROWS)
    made = SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=speculative, scheduler_config=scheduler)
    for name, value in more.items():
        for part in (model, parallel, speculative):
            if hasattr(part, name):
                setattr(part, name, value)
    return made


def test_settings_come_from_the_environment_and_the_model() -> None:
    settings = Settings.of(config(), {"DRAFTD_ENDPOINT": "unix:/s"})
    assert (settings.endpoint, settings.namespace, settings.namespaces) == ("unix:/s", "org/Model-7B", ("org/Model-7B",))
    assert settings.engine.startswith("vllm-")
    assert settings.graphs
    environment = {
        "DRAFTD_ENDPOINT": "unix:/s",
        "DRAFTD_VLLM_ENGINE": "replica",
        "DRAFTD_VLLM_NAMESPACE": "base",
        "DRAFTD_VLLM_NAMESPACES": "a,b/c",
        "DRAFTD_VLLM_ATTACH_S": "0.5",
        "DRAFTD_VLLM_GRAPHS": "0",
        "DRAFTD_VLLM_POLICY": "tree",
    }
    settings = Settings.of(config(data_parallel_size=2, data_parallel_rank=1), environment)
    assert settings == Settings("unix:/s", "replica-dp1", "base", ("a", "b/c"), 0.5, False, "tree")


def test_a_model_whose_name_is_a_path_has_a_namespace() -> None:
    assert Settings.of(config(model="/models/my model+x"), {"DRAFTD_ENDPOINT": "x"}).namespace == "/models/my_model_x"
    assert Settings.of(config(served_model_name=["short"]), {"DRAFTD_ENDPOINT": "x"}).namespace == "short"


@pytest.mark.parametrize(
    "wrong",
    [
        {"DRAFTD_VLLM_NAMESPACES": "a b"},
        {"DRAFTD_VLLM_ATTACH_S": "soon"},
        {"DRAFTD_VLLM_ATTACH_S": "-1"},
        {"DRAFTD_VLLM_POLICY": "suffix"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        Settings.of(config(), {"DRAFTD_ENDPOINT": "x", **wrong})


def test_adapter_and_salt_choose_the_namespace() -> None:
    assert RequestOptions.of(SETTINGS, None, "sql", "").namespace == "model/lora/sql"
    assert not RequestOptions.of(SETTINGS, None, "sql", "").private
    salt = salted("tenant 7")
    of_salt = Settings("x", "e", "model", (f"model/salt/{salt}", f"model/lora/sql/salt/{salt}"))
    assert RequestOptions.of(of_salt, None, "", salt).namespace == f"model/salt/{salt}"
    assert RequestOptions.of(of_salt, None, "sql", salt).namespace == f"model/lora/sql/salt/{salt}"


@pytest.mark.parametrize(("adapter", "salt"), [("other", ""), ("", salted("tenant")), ("", None), ("a/b", ""), ("sql/salt/x", "")])
def test_what_has_no_namespace_of_its_own_shares_none(adapter: str, salt: str | None) -> None:
    assert RequestOptions.of(SETTINGS, {}, adapter, salt).private


def test_a_namespace_that_is_not_listed_makes_the_request_private(requests: Requests, session: FakeSession) -> None:
    requests.begin(told(Output([new_request("a", [1], draftd_namespace="someone else's")])), {"a": 0})
    assert session.calls == [("start", 0, [1], "model", True, 1)]
    assert requests.counts.unlisted == 1


def test_adapters_with_odd_names_do_not_meet() -> None:
    names = {RequestOptions.of(SETTINGS, None, adapter, "").unlisted for adapter in ("a b", "a_b", "a/b", "ä_b")}
    assert len(names) == 4


def test_options_that_do_not_exist_are_noticed() -> None:
    assert unknown_options({"draftd_private": 1, "draftd_of": 1, "other": 2}) == ["draftd_of"]
    assert not RequestOptions.of(SETTINGS, {"draftd_off": "no", "draftd_private": 0}, "", "").off


# -- the speculator ------------------------------------------------------------------------------------------------------------------


class FakeStock:
    """vLLM's own speculator."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, input_batch: Any, *args: Any, **more: Any) -> torch.Tensor:
        self.calls += 1
        assert len(args) == 10
        assert set(more) == {"num_speculative_tokens", "dp_sync_state", "mm_inputs", "dummy_run"}
        return torch.full((input_batch.num_reqs, K), 77, dtype=torch.int64)


class FakeRanks:
    """One tensor-parallel rank; what rank 0 broadcasts, another one gets from `sent`."""

    def __init__(self, rank: int = 0, world_size: int = 1, sent: list[Any] | None = None) -> None:
        self.rank_in_group = rank
        self.world_size = world_size
        self.sent = [] if sent is None else sent

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self.rank_in_group == src:
            self.sent.append(input_.clone())
        else:
            input_.copy_(self.sent.pop(0))
        return input_

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            self.sent.append(obj)
            return obj
        return self.sent.pop(0)


def req_states() -> SimpleNamespace:
    last = torch.arange(ROWS, dtype=torch.int64).reshape(ROWS, 1) + 50
    return SimpleNamespace(max_num_reqs=ROWS, vocab_size=VOCAB_SIZE, last_sampled_tokens=last, req_id_to_index={})


def make(
    session: FakeSession | None, ranks: FakeRanks | None = None, stock: FakeStock | None = None, adaptive: bool = False
) -> DraftdSpeculator:
    return DraftdSpeculator(
        stock or FakeStock(), config(enable_adaptive_verification=adaptive), torch.device("cpu"), req_states(), ranks or FakeRanks(),
        session, SETTINGS if session else None,
    )  # fmt: skip


def propose(speculator: DraftdSpeculator, rows: list[int], sampled: list[int] | None = None, most: int = K, dummy: bool = False) -> Any:
    """What the model runner calls after a step."""
    batch = SimpleNamespace(num_reqs=len(rows), idx_mapping=torch.tensor(rows, dtype=torch.int64))
    num_sampled = torch.tensor(sampled or [1] * len(rows), dtype=torch.int32)
    none = torch.zeros(1)
    return speculator.propose(
        batch, {}, {}, none, None, num_sampled, torch.zeros_like(num_sampled), none, none, none, none,
        num_speculative_tokens=most, dp_sync_state=None, mm_inputs=None, dummy_run=dummy,
    ).tolist()  # fmt: skip


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


# -- hooks -----------------------------------------------------------------------------------------------------------------------------


class FakeScheduler:
    """vLLM's Scheduler, as far as it is hooked."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.next = Output()

    def schedule(self, throttle_prefills: bool = False) -> Output:
        output, self.next = self.next, Output()
        return output

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> str:
        self.next.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]
        return "freed"

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        self.next.preempted_req_ids = {request.request_id}


def scheduled(name: str, tokens: int, salt: str | None = None, status: str = "FINISHED_STOPPED") -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_tokens=tokens, cache_salt=salt, status=SimpleNamespace(name=status))


def test_the_scheduler_tells_lengths_and_salts() -> None:
    class Scheduler(FakeScheduler):
        pass

    hook_scheduler(Scheduler)
    scheduler = Scheduler()
    for request in (scheduled("a", 9), scheduled("b", 5), scheduled("c", 7, status="FINISHED_ERROR"), scheduled("d", 1, "pepper")):
        scheduler.requests[request.request_id] = request
    scheduler.next.scheduled_new_reqs = [new_request("a", [1]), new_request("d", [1])]
    output = pickle.loads(pickle.dumps(scheduler.schedule()))
    assert ends_of(output) == {}
    assert salt_of(output, "a") == ""
    assert salt_of(output, "d") == salted("pepper")
    assert scheduler._free_request(scheduler.requests["a"], delay_free_blocks=False) == "freed"
    scheduler._preempt_request(scheduler.requests["b"], 1.0)
    scheduler._free_request(scheduler.requests["c"])
    output = scheduler.schedule()
    assert ends_of(output) == {"a": 9, "b": 5, "c": DISCARDED}
    assert ends_of(scheduler.schedule()) == {}


def test_an_output_of_another_scheduler_tells_nothing() -> None:
    assert ends_of(Output()) == {}
    assert salt_of(Output(), "a") is None


class FakeRunner:
    """vLLM's GPUModelRunner, as far as it is hooked."""

    def __init__(self, speculator: Any) -> None:
        self.speculator = speculator
        self.req_states = req_states()
        self.log: list[str] = []

    def finish_requests(self, scheduler_output: Output) -> None:
        self.log.append("finish")

    def add_requests(self, scheduler_output: Output) -> None:
        for i, new in enumerate(scheduler_output.scheduled_new_reqs):
            self.req_states.req_id_to_index[new.req_id] = i
        self.log.append("add")

    def shutdown(self) -> None:
        self.log.append("shutdown")


def test_the_runner_tells_its_speculator(session: FakeSession) -> None:
    class Runner(FakeRunner):
        pass

    hook_runner(Runner)
    runner = Runner(make(session))
    runner.add_requests(told(Output([new_request("a", [1, 2])])))
    runner.finish_requests(told(Output(finished_req_ids={"a"}), {"a": 4}))
    runner.shutdown()
    assert session.calls == [("start", 0, [1, 2], "model", False, 2), ("finish", 0, 4, False)]
    assert session.closed
    assert runner.log == ["add", "finish", "shutdown"]


def test_a_runner_with_another_speculator_is_left_alone() -> None:
    class Runner(FakeRunner):
        pass

    hook_runner(Runner)
    for speculator in (None, FakeStock()):
        runner = Runner(speculator)
        runner.add_requests(told(Output([new_request("a", [1])])))
        runner.finish_requests(told(Output(finished_req_ids={"a"})))
        runner.shutdown()
        assert runner.log == ["add", "finish", "shutdown"]


# -- the entry point ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts Python's finders of modules back after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def installed() -> int:
    return sum(isinstance(finder, AfterImport) for finder in sys.meta_path)


@pytest.mark.usefixtures("finders")
def test_without_an_endpoint_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTD_ENDPOINT", raising=False)
    monkeypatch.setattr(plugin, "installed_release", lambda: "0.33.0")
    plugin.register()
    assert installed() == 0


@pytest.mark.usefixtures("finders")
def test_the_plugin_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/s")
    monkeypatch.setattr(plugin, "installed_release", lambda: "0.33.0+cu130")
    plugin.register()
    plugin.register()
    assert installed() == 1


@pytest.mark.usefixtures("finders")
def test_other_releases_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/s")
    monkeypatch.setattr(plugin, "installed_release", lambda: "0.34.1")
    plugin.register()
    assert installed() == 0
    assert [record.message for record in caplog.records] == [
        "draftd does not know vLLM 0.34.1, only 0.33: vLLM runs as it is, without draftd"
    ]


def test_the_package_names_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"draftd": f"{plugin.__name__}:{plugin.register.__name__}"}


def test_loading_the_plugin_is_cheap() -> None:
    code = (
        "import sys; from draftd.client.vllm.plugin import register; register();"
        "print([name for name in ('torch', 'numba', 'numpy', 'grpc') if name in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DRAFTD_ENDPOINT"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_releases_that_are_known() -> None:
    assert [is_known(release) for release in ("0.33", "0.33.0", "0.33.2+cu130", "0.330.1", "0.34.0", "1.0", "?")] == [True] * 3 + [
        False
    ] * 4


@pytest.mark.usefixtures("finders")
def test_modules_are_changed_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("draftd_test_later", "draftd_test_sooner", "draftd_test_broken"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    changed: list[str] = []

    def change(module: Any) -> None:
        changed.append(module.__name__)
        module.value += 1

    def fail(module: Any) -> None:
        raise AttributeError("no such class")

    sooner = __import__("draftd_test_sooner")
    AfterImport({"draftd_test_later": change, "draftd_test_sooner": change, "draftd_test_broken": fail}).install()
    assert (sooner.value, changed) == (2, ["draftd_test_sooner"])
    assert __import__("draftd_test_later").value == 2
    assert __import__("draftd_test_broken").value == 1
    assert "draftd cannot change draftd_test_broken" in caplog.text
    for name in ("draftd_test_later", "draftd_test_sooner", "draftd_test_broken"):
        del sys.modules[name]
