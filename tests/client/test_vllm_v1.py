"""The proposer for vLLM's V1 runner, with stand-ins for the runner and the drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from draftd.client.drafter import Drafter
from draftd.client.vllm import proposer as module
from draftd.client.vllm.proposer import DraftdProposer, count_until_stop, hook_v1_runner
from draftd.client.vllm.scheduler import DISCARDED, salted
from draftd.drafter.drafts import Drafts

K = 4
MAX_LENGTH = 32


class FakeDrafter:
    """A Drafter that knows the last token's successors, and keeps what it is told."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.started: list[tuple[Any, ...]] = []
        self.documents: list[list[int]] = []
        self.parked: dict[str, list[int]] = {}
        self.ids: dict[int, str] = {}

    def start(self, row: int, tokens: Any, document_id: str, namespace: str, private: bool, *, prompt_length: int) -> None:
        held = np.asarray(tokens).tolist()
        parked = self.parked.pop(document_id, None)
        assert row not in self.rows
        assert parked is None or held[: len(parked)] == parked
        self.rows[row], self.ids[row] = list(held), document_id
        self.started.append((row, held, namespace, private, prompt_length))

    def append(self, row: int, tokens: Any) -> None:
        self.rows[row] += np.asarray(tokens).tolist()

    def preempt(self, row: int) -> None:
        self.parked[self.ids[row]] = self.rows.pop(row)

    def finish(self, row: int, discard: bool = False, *, length: int | None = None) -> None:
        tokens = self.rows.pop(row)
        if not discard:
            self.documents.append(tokens[:length])

    def propose(self, rows: Any) -> Drafts:
        drafts = Drafts.empty(len(rows), K)
        for i, row in enumerate(rows.tolist()):
            drafts.tokens[i] = self.rows[row][-1] + 1 + np.arange(K)
            drafts.counts[i] = K
        return drafts


class Runner:
    """vLLM's V1 GPUModelRunner, as far as it is hooked: rows of tokens, and what the proposer answered."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.requests: dict[str, Any] = {}
        self.tokens = np.zeros((8, MAX_LENGTH), np.int32)
        self.lengths = np.zeros(8, np.int64)
        self.input_batch = SimpleNamespace(req_ids=[])

    def _update_states(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = new

    def propose_draft_token_ids(self, scheduler_output: Any, sampled: list[list[int]]) -> list[list[int]]:
        drafts: list[list[int]] = self.drafter.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        return drafts

    def step(
        self,
        texts: dict[str, tuple[list[int], list[int]]],
        new: tuple[Any, ...] = (),
        finished: tuple[str, ...] = (),
        ends: dict[str, int] | None = None,
    ) -> Any:
        """A step over requests, each with the tokens it had and those that are sampled now."""
        told = {"draftd_salts": SALTS, "draftd_ends": ends or {}}
        output = SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished), **told)
        self._update_states(output)
        self.input_batch.req_ids = list(texts)
        for place, (before, sampled) in enumerate(texts.values()):
            self.lengths[place] = len(before) + len(sampled)
            self.tokens[place, : self.lengths[place]] = before + sampled
        return self.propose_draft_token_ids(output, [sampled for _, sampled in texts.values()])


SALTS = {"salty": salted("pepper")}


def request(name: str, prompt: list[int], **more: Any) -> SimpleNamespace:
    given: dict[str, Any] = {"eos_token_id": 2, "stop_token_ids": None, "max_tokens": 100, "extra_args": None} | more
    return SimpleNamespace(req_id=name, prompt_token_ids=prompt, sampling_params=SimpleNamespace(**given), lora_request=None)


def config(rank: int = 0, rows: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model="m", served_model_name=None, max_model_len=MAX_LENGTH, get_vocab_size=lambda: 100),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2, data_parallel_size=1, data_parallel_rank=0),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
    )


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> FakeDrafter:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/nowhere")
    return FakeDrafter()


@pytest.fixture
def runner(drafter: FakeDrafter) -> Runner:
    class Hooked(Runner):
        pass

    hook_v1_runner(Hooked)
    hook_v1_runner(Hooked)
    return Hooked(DraftdProposer(config(), cast(Drafter, drafter)))


def test_requests_are_followed_from_their_first_token_to_their_end(runner: Runner, drafter: FakeDrafter) -> None:
    new = request("a", [10, 11])
    assert runner.step({"a": ([10, 11], [])}, (new,)) == [[]]
    assert runner.step({"a": ([10, 11], [12])}) == [[13, 14, 15, 16]]
    assert runner.step({"a": ([10, 11, 12], [13, 14, 50])}) == [[51, 52, 53, 54]]
    runner.step({}, finished=("a",))
    assert drafter.started == [(1, [10, 11, 12], "m", False, 2)]
    assert drafter.documents == [[10, 11, 12, 13, 14, 50]]


def test_documents_end_at_the_stop(runner: Runner, drafter: FakeDrafter) -> None:
    new = (request("eos", [10]), request("length", [20], max_tokens=3))
    runner.step({"eos": ([10], [11]), "length": ([20], [21])}, new)
    drafts = runner.step({"eos": ([10, 11], [12, 2, 40]), "length": ([20, 21], [22, 23, 24])})
    assert drafts == [[], []]
    # One more step may be made before the scheduler's news arrive.
    assert runner.step({"eos": ([10, 11, 12, 2, 40], [41]), "length": ([20, 21, 22, 23, 24], [25])}) == [[], []]
    runner.step({}, finished=("eos", "length"))
    assert sorted(drafter.documents) == [[10, 11, 12, 2], [20, 21, 22, 23]]


def test_the_schedulers_length_counts_where_the_proposer_sees_no_stop(runner: Runner, drafter: FakeDrafter) -> None:
    new = (request("repeating", [10]), request("failed", [20]))
    runner.step({"repeating": ([10], [11, 11, 11]), "failed": ([20], [21])}, new)
    runner.step({}, finished=("repeating", "failed"), ends={"repeating": 3, "failed": DISCARDED})
    assert drafter.documents == [[10, 11, 11]]


def test_a_preempted_request_gives_its_row_to_another_and_comes_back(runner: Runner, drafter: FakeDrafter) -> None:
    new = [request(name, [i]) for name, i in (("a", 10), ("b", 20), ("c", 30))]
    runner.step({"a": ([10], [11]), "b": ([20], [21])}, tuple(new[:2]))
    assert runner.step({"b": ([20, 21], [22]), "c": ([30], [31])}, (new[2],)) == [[23, 24, 25, 26], [32, 33, 34, 35]]
    runner.step({}, finished=("b",))
    assert runner.step({"a": ([10, 11], [12]), "c": ([30, 31], [32])}) == [[13, 14, 15, 16], [33, 34, 35, 36]]
    runner.step({}, finished=("a", "c"))
    assert sorted(drafter.documents) == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]


def test_a_preempted_request_that_ends_is_left_to_the_drafter(runner: Runner, drafter: FakeDrafter) -> None:
    new = [request(name, [i]) for name, i in (("a", 10), ("b", 20), ("c", 30))]
    runner.step({"a": ([10], [11]), "b": ([20], [21])}, tuple(new[:2]))
    runner.step({"b": ([20, 21], [22]), "c": ([30], [31])}, (new[2],))
    runner.step({}, finished=("a", "b", "c"))
    assert sorted(drafter.documents) == [[20, 21, 22], [30, 31]]
    assert list(drafter.parked.values()) == [[10, 11]]


def test_no_draft_reaches_past_the_models_length(runner: Runner) -> None:
    before = list(range(10, 10 + MAX_LENGTH - 3))
    assert runner.step({"a": (before, [60])}, (request("a", before),)) == [[61]]


def test_options_and_salts_apply(runner: Runner, drafter: FakeDrafter) -> None:
    new = (request("salty", [10]), request("off", [20], extra_args={"draftd_off": True}))
    assert runner.step({"salty": ([10], [11]), "off": ([20], [21])}, new) == [[12, 13, 14, 15], []]
    assert drafter.started == [(1, [10, 11], "m", True, 1)]


def test_a_request_whose_salt_nobody_told_is_private(runner: Runner, drafter: FakeDrafter) -> None:
    runner.requests["a"] = request("a", [10])
    runner.step({"a": ([10], [11])})
    assert drafter.started == [(1, [10, 11], "m", True, 1)]


def test_other_ranks_do_not_draft(drafter: FakeDrafter) -> None:
    proposer = DraftdProposer(config(rank=1), cast(Drafter, drafter))
    proposer.see_batch(["a"], {"a": request("a", [10])})
    assert proposer.propose([[11]], np.array([2]), np.array([[10, 11]])) == [[]]
    proposer.see_scheduled(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids={"a"}))


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTD_ENDPOINT", raising=False)
    with pytest.raises(RuntimeError, match="needs DRAFTD_ENDPOINT"):
        DraftdProposer(config())
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/nowhere")
    monkeypatch.setattr(module, "installed_release", lambda: "0.40.0")
    with pytest.raises(RuntimeError, match=r"does not know vLLM 0\.40\.0, only 0\.33"):
        DraftdProposer(config())


@pytest.mark.parametrize(
    ("sampled", "before", "count"),
    [([5, 6], 0, None), ([5, 2, 6], 0, 2), ([9, 2], 0, 1), ([5, 6, 7], 8, 2), ([5], 9, 1), ([], 0, None)],
)
def test_tokens_until_the_stop(sampled: list[int], before: int, count: int | None) -> None:
    params = SimpleNamespace(eos_token_id=2, stop_token_ids=[9], max_tokens=10)
    assert count_until_stop(sampled, before, params) == count
