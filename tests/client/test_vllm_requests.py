"""The vLLM plugin without vLLM: what it makes of requests, of what they ask for, and of its own settings."""

from __future__ import annotations

import pytest

from draftd.client.vllm.requests import Requests
from draftd.client.vllm.scheduler import DISCARDED, salted
from draftd.client.vllm.settings import RequestOptions, Settings, unknown_options
from draftd.drafter.errors import InvalidArgument
from tests.client.fake_vllm import (
    SETTINGS,
    FakeSession,
    Output,
    config,
    new_request,
    told,
)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def masks() -> list[tuple[int, bool]]:
    return []


@pytest.fixture
def requests(session: FakeSession, masks: list[tuple[int, bool]]) -> Requests:
    return Requests(session, SETTINGS, lambda row, wanted: masks.append((row, wanted)))


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
