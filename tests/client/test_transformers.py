"""Drafts of every kind under transformers' own verification, without a service: the drafts are made up, the output must not notice."""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from draftd.client import Drafter
from draftd.client.transformers import drafting
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams

VOCAB_SIZE = 61
PROMPT = [5, 9, 17, 3, 40]
MAX_LENGTH = 96
K = 8

Script = Callable[[list[int]], list[int]]


class ScriptedDrafter(Drafter):
    """A drafter without a service that proposes what a script makes of a row's tokens, and notes which rows ended how."""

    def __init__(self, script: Script, max_rows: int = 2, max_length: int = 128, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(
            "unix:/nowhere/draftd.sock", engine="scripted", vocab_size=vocab_size, k=K, max_rows=max_rows, max_length=max_length
        )
        self.script = script
        self.ended: list[tuple[list[int], bool]] = []
        self.one_thread = threading.Lock()

    def propose(self, rows: ArrayLike, params: DraftParams | None = None) -> Drafts:
        assert self.one_thread.acquire(blocking=False), "two threads are in the drafter"
        try:
            drafts = Drafts.empty(1, K)
            (row,) = np.asarray(rows).tolist()
            draft = self.script(self._table.row_tokens(row).tolist())[:K]
            drafts.tokens[0, : len(draft)] = draft
            drafts.counts[0] = len(draft)
            return drafts
        finally:
            self.one_thread.release()

    def finish(self, row: int, discard: bool = False, *, length: int | None = None) -> None:
        self.ended.append((self._table.row_tokens(row).tolist(), discard))
        super().finish(row, discard)


def make_model(vocab_size: int = VOCAB_SIZE) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: Any, prompt: list[int] = PROMPT, **more: Any) -> list[int]:
    """All tokens after greedy decoding, unless `more` says otherwise."""
    ids = torch.tensor([prompt])
    settings = {"max_length": MAX_LENGTH, "do_sample": False, "attention_mask": torch.ones_like(ids)} | more
    return model.generate(ids, **settings)[0].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(model: Any) -> list[int]:
    output = generate(model)
    assert len(set(output)) > 20, "an output that says little"
    return output


@pytest.fixture
def forwards(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward pass."""
    counted: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: counted.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    yield counted
    handle.remove()


@pytest.fixture
def right(plain: list[int]) -> Script:
    """What the model generates next, and rubbish past the end."""
    return lambda tokens: [*plain, *[1] * 40][len(tokens) :]


def test_right_drafts_save_forward_passes_and_change_nothing(model: Any, plain: list[int], right: Script, forwards: list[int]) -> None:
    with ScriptedDrafter(right) as drafter, drafting(model, drafter) as state:
        assert generate(model) == plain
    generated = len(plain) - len(PROMPT)
    assert len(forwards) == -(-generated // (K + 1))
    assert sum(forwards) == len(plain) - 1, "a token past the length limit was computed"
    assert (state.calls, state.undrafted_calls) == (1, 0)
    assert drafter.ended == [(plain, False)]
    assert drafter.stats.committed_tokens[0] == generated


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tokens, right: [(right[0] + 1) % VOCAB_SIZE, *right[1:]],
        lambda tokens, right: [*right[:3], (right[3] + 1) % VOCAB_SIZE, *right[4:]],
        lambda tokens, right: right[: len(tokens) % K],
        lambda tokens, right: [7] * K,
        lambda tokens, right: [],
    ],
    ids=["wrong", "wrong after three", "of all lengths", "one token repeated", "none"],
)
def test_no_draft_changes_the_output(model: Any, plain: list[int], right: Script, spoil: Callable[..., list[int]]) -> None:
    with ScriptedDrafter(lambda tokens: spoil(tokens, right(tokens))) as drafter, drafting(model, drafter):
        assert generate(model) == plain
        assert generate(model, repetition_penalty=1.3) == generate(model, repetition_penalty=1.3, draft=False)
    assert drafter.ended[0] == (plain, False)


def test_generation_stops_at_an_end_token_inside_a_draft(model: Any, plain: list[int], right: Script, forwards: list[int]) -> None:
    for place in range(len(PROMPT) + 1, len(PROMPT) + 2 * K):
        for ends in (plain[place], [plain[place], 60]):
            expected = generate(model, eos_token_id=ends)
            forwards.clear()
            with ScriptedDrafter(right) as drafter, drafting(model, drafter):
                assert generate(model, eos_token_id=ends) == expected
            assert drafter.ended == [(expected, False)]
            assert sum(forwards) == len(expected) - 1, "a token past the end was computed"


class StopAtToken(StoppingCriteria):  # type: ignore[misc]
    """Stops once a token was generated."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return (input_ids[:, len(PROMPT) :] == self.token).any(dim=1)


def test_generation_stops_where_the_callers_criteria_say_inside_a_draft(model: Any, plain: list[int], right: Script) -> None:
    letters = (string.ascii_letters + string.digits)[:VOCAB_SIZE]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    token = plain[len(PROMPT) + 5]
    text = {"stop_strings": [letters[token]], "tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer)}
    for stop in ({"stopping_criteria": [StopAtToken(token)]}, text):
        expected = generate(model, **stop)
        assert len(expected) < len(plain)
        with ScriptedDrafter(right) as drafter, drafting(model, drafter):
            assert generate(model, **stop) == expected
        assert drafter.ended == [(expected, False)]


def test_sampling_follows_the_models_distribution_whatever_is_drafted() -> None:
    model = make_model(vocab_size=4)
    prompt = torch.tensor([[1, 2, 3]])
    expected = np.zeros((4, 4))
    with torch.no_grad():
        first = model(prompt).logits[0, -1].softmax(-1)
        for token in range(4):
            both = torch.cat((prompt, torch.tensor([[token]])), dim=1)
            expected[token] = (first[token] * model(both).logits[0, -1].softmax(-1)).numpy()
    seen = np.zeros((4, 4))
    torch.manual_seed(11)
    drafted = int(first.argmin())
    with ScriptedDrafter(lambda tokens: [drafted] * 3, vocab_size=4) as drafter, drafting(model, drafter):
        for _ in range(400):
            a, b = model.generate(prompt, max_new_tokens=2, do_sample=True, top_k=0)[0, -2:].tolist()
            seen[a, b] += 1
    # 15 degrees of freedom; above 37.7 in one of a thousand cases, and the seed is fixed.
    assert (((seen - 400 * expected) ** 2) / (400 * expected)).sum() < 37.7


def test_a_streamer_gets_every_token_once(model: Any, plain: list[int], right: Script) -> None:
    got: list[int] = []
    streamer = SimpleNamespace(put=lambda value: got.extend(value.reshape(-1).tolist()), end=lambda: got.append(-1))
    assert set(BaseStreamer.__dict__) >= {"put", "end"}
    with ScriptedDrafter(right) as drafter, drafting(model, drafter):
        generate(model, streamer=streamer)
    assert got == [*plain, -1]


def test_the_output_of_a_call_that_failed_is_discarded_and_its_row_free_again(model: Any, plain: list[int]) -> None:
    def fail(tokens: list[int]) -> list[int]:
        if len(tokens) > 20:
            raise KeyboardInterrupt
        return []

    with ScriptedDrafter(fail, max_rows=1) as drafter, drafting(model, drafter) as state:
        with pytest.raises(KeyboardInterrupt):
            generate(model)
        assert drafter.ended == [(plain[:21], True)]
        drafter.script = lambda tokens: []
        assert generate(model) == plain
        assert (state.calls, state.undrafted_calls) == (2, 0)


def test_threads_generate_at_the_same_time_and_those_without_a_row_without_drafts(model: Any, right: Script) -> None:
    prompts = [[i, 2 * i, 7] for i in range(1, 9)]
    expected = [generate(model, prompt) for prompt in prompts]
    answers = {tuple(tokens[:3]): tokens for tokens in expected}

    def script(tokens: list[int]) -> list[int]:
        time.sleep(0.002)  # for another thread to come
        return answers[tuple(tokens[:3])][len(tokens) :]

    with ScriptedDrafter(script) as drafter, drafting(model, drafter) as state:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda prompt: generate(model, prompt), prompts)) == expected
        assert state.calls + state.undrafted_calls == len(prompts)
        assert sorted(tokens for tokens, _ in drafter.ended) == sorted(t for t in expected if t in [e for e, _ in drafter.ended])
        assert len(drafter.ended) == state.calls >= 2


def test_a_call_inside_a_call_has_a_row_of_its_own_or_none(model: Any, plain: list[int], right: Script) -> None:
    other = make_model()
    with ScriptedDrafter(right) as drafter, ScriptedDrafter(right) as others, drafting(model, drafter), drafting(other, others):
        lookup: dict[str, Any] = {"prompt_lookup_num_tokens": 2, "eos_token_id": next(t for t in range(VOCAB_SIZE) if t not in plain)}

        def nest(_: torch.Tensor) -> None:
            assert generate(model, draft=False, **lookup) == plain
            assert GenerationMixin.generate(other, torch.tensor([PROMPT]), max_length=20, **lookup)[0].tolist() == plain[:20]
            assert generate(model) == plain
            assert generate(other) == plain

        assert generate(model, streamer=SimpleNamespace(put=nest, end=lambda: None), max_length=12) == plain[:12]
    assert {tuple(tokens) for tokens, _ in drafter.ended} == {tuple(plain), tuple(plain[:12])}
    assert {tuple(tokens) for tokens, _ in others.ended} == {tuple(plain)}


def test_what_is_longer_than_a_row_goes_on_without_drafts(model: Any, plain: list[int], right: Script) -> None:
    with ScriptedDrafter(right, max_length=40) as drafter, drafting(model, drafter) as state:
        assert generate(model) == plain
        assert (state.calls, state.undrafted_calls) == (1, 1)
        assert drafter.ended == [(plain[:40], False)]
        longer = generate(model, plain[:50])
        assert longer == plain
        assert (state.calls, state.undrafted_calls) == (1, 2)
        assert drafter.stats.fail_opens[3] == 0, "a wrong call"


def test_beam_search_takes_no_drafts_and_is_counted(model: Any, right: Script) -> None:
    expected = generate(model, num_beams=2)
    with ScriptedDrafter(right) as drafter, drafting(model, drafter) as state:
        assert generate(model, num_beams=2) == expected
        assert (state.calls, state.undrafted_calls) == (0, 1)


def test_what_cannot_be_drafted_for_is_refused_with_the_way_out(model: Any, plain: list[int], right: Script) -> None:
    batch = torch.tensor([PROMPT, PROMPT])
    with ScriptedDrafter(right) as drafter, drafting(model, drafter):
        with pytest.raises(ValueError, match=r"got 2 prompts.*draft=False"):
            model.generate(batch, max_length=20)
        assert model.generate(batch, max_length=20, draft=False).tolist() == [plain[:20]] * 2
        with pytest.raises(ValueError, match=r"assistant_model.*draft=False"):
            generate(model, assistant_model=model)
        assert generate(model, assistant_model=make_model(), draft=False) == plain
        with pytest.raises(ValueError, match="draft_namespace is 'other'; the drafter's are default"):
            generate(model, draft_namespace="other")
        with pytest.raises(ValueError, match="draft_group has 129 bytes; it must have 1 to 128"):
            generate(model, draft_group="x" * 129)
        with pytest.raises(ValueError, match="inside another"), drafting(model, drafter):
            pass
        assert generate(model) == plain
    with (
        ScriptedDrafter(right, vocab_size=50) as drafter,
        pytest.raises(ValueError, match=r"61 tokens.*made for 50"),
        drafting(model, drafter),
    ):
        pass
    sharded = make_model()
    sharded._tp_size = 2
    with ScriptedDrafter(right) as drafter:
        with pytest.raises(TypeError, match="Linear"), drafting(torch.nn.Linear(1, 1), drafter):
            pass
        with pytest.raises(ValueError, match="tensor-parallel"), drafting(sharded, drafter):
            pass


def test_only_this_model_changes_and_it_is_put_back(model: Any, plain: list[int], right: Script) -> None:
    other = make_model()
    kept = dict(model.__dict__)
    with ScriptedDrafter(right) as drafter:
        for _ in range(2):
            with drafting(model, drafter):
                assert generate(other) == plain
                with pytest.raises(ValueError, match="draft"):
                    generate(other, draft=False)
            assert model.__dict__ == kept
    assert drafter.ended == []
    custom = make_model()
    custom.generate = own = lambda *args, **kwargs: LlamaForCausalLM.generate(custom, *args, **kwargs)
    with ScriptedDrafter(right) as drafter, drafting(custom, drafter):
        assert generate(custom) == plain
    assert drafter.ended == [(plain, False)]
    assert custom.generate is own


def test_a_version_of_transformers_that_is_not_known_is_refused(model: Any, right: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, generation_config: Any, prompt: Any) -> None: ...

    with ScriptedDrafter(right) as drafter:
        for version in ("4.56.2", "6.0.0.dev0", "6.1"):
            monkeypatch.setattr("draftd.client.transformers.transformers.__version__", version)
            with pytest.raises(RuntimeError, match=f"{version} is not known"), drafting(model, drafter):
                pass
        monkeypatch.undo()
        monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", changed)
        with pytest.raises(RuntimeError, match="not known"), drafting(model, drafter):
            pass
