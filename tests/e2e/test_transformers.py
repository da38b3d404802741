"""transformers drafts from a real service for the model of samples/tiny_llama: the outputs stay, the forward passes get fewer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from draftd.client import Drafter
from draftd.client.transformers import drafting
from draftd.drafter.drafts import SOURCE_GROUP
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

TINY = Path(__file__).parents[2] / "samples" / "tiny_llama"
TOKENS = json.loads((TINY / "tokens.json").read_text())
PROMPTS: list[list[int]] = TOKENS["prompts"][:8]
NEW_TOKENS = 80


class Model:
    """A copy of the tiny model that counts its forward passes."""

    def __init__(self) -> None:
        self.model: Any = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True).eval()
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def generate(self, prompt: list[int], **more: Any) -> list[int]:
        """Greedy output tokens."""
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)} | more
        return self.model.generate(ids, **settings)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def all(self, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
        """Outputs of all prompts, and the forward passes they took."""
        before = self.forwards
        return [self.generate(prompt) for prompt in prompts], self.forwards - before


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    threads = torch.get_num_threads()
    # For a model of this size more threads only wait for each other.
    torch.set_num_threads(1)
    yield Model()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(model: Model) -> tuple[list[list[int]], int]:
    """Outputs without drafts, and their forward passes."""
    return model.all(PROMPTS)


@pytest.fixture(scope="module")
def service() -> Iterator[PrivateService]:
    with PrivateService(http=False) as running:
        yield running


def attached(service: PrivateService, engine: str, **more: Any) -> Drafter:
    settings: dict[str, Any] = {"vocab_size": 2000, "max_rows": 4, "max_length": 512, "namespace": engine, "timeout_ms": 2000.0} | more
    drafter = Drafter(service.endpoint, engine=engine, **settings)
    assert drafter.wait_attached(60)
    return drafter


def documents(service: PrivateService, namespace: str) -> list[list[int]]:
    """What a namespace holds."""
    with grpc.insecure_channel(service.endpoint) as channel:
        messages = draftd_pb2_grpc.CorpusServiceStub(channel).Export(pb.ExportRequest(namespace=namespace))
        return [np.frombuffer(d.packed_tokens, "<i4").tolist() for message in messages for d in message.documents]


@pytest.mark.parametrize("transport", ["mapped", "inline"])
def test_b_needs_fewer_forward_passes_for_what_a_generated(
    service: PrivateService, model: Model, plain: tuple[list[list[int]], int], transport: str
) -> None:
    expected, plain_forwards = plain
    assert plain_forwards == sum(map(len, expected))
    namespace = f"shared-{transport}"
    settings = {"namespace": namespace, "transport": transport}
    with attached(service, f"a-{transport}", **settings) as drafter, drafting(model.model, drafter) as state:
        outputs, cold = model.all(PROMPTS)
        assert (state.calls, state.undrafted_calls) == (len(PROMPTS), 0)
        assert drafter.wait_visible(60)
        assert drafter.stats.fail_opens.sum() == 0
    assert outputs == expected
    assert documents(service, namespace) == expected
    other = Model()
    with attached(service, f"b-{transport}", **settings) as drafter, drafting(other.model, drafter):
        outputs, warm = other.all(PROMPTS)
        # Every step commits one token of the model's own; the one that ends an output may have been drafted, and is not shown to the model.
        by_model = sum(map(len, expected)) - warm
        assert by_model <= drafter.stats.accepted.sum() <= by_model + len(PROMPTS)
    assert outputs == expected
    print(f"{transport}: {sum(map(len, expected))} tokens; forward passes: {plain_forwards} plain, {cold} cold, {warm} on what A generated")
    assert cold < plain_forwards
    assert warm < cold / 2


def test_calls_of_a_group_draft_from_one_another(service: PrivateService, model: Model, plain: tuple[list[list[int]], int]) -> None:
    """Only from one another: there is no corpus here."""
    expected, _ = plain
    with (
        attached(service, "grouped", params=DraftParams(use_corpus=False)) as drafter,
        drafting(model.model, drafter),
    ):
        assert [model.generate(PROMPTS[0], draft_group="g") for _ in range(2)] == [expected[0]] * 2
        assert drafter.stats.accepted[SOURCE_GROUP].sum() > 10


def test_a_private_call_gains_and_gives_nothing(service: PrivateService, model: Model, plain: tuple[list[list[int]], int]) -> None:
    expected, _ = plain
    with attached(service, "private", extra_namespaces=("elsewhere",)) as drafter, drafting(model.model, drafter):
        assert model.generate(PROMPTS[0], draft_private=True) == expected[0]
        assert model.generate(PROMPTS[1], draft_namespace="elsewhere") == expected[1]
        assert drafter.wait_visible(60)
        assert documents(service, "private") == []
        assert documents(service, "elsewhere") == [expected[1]]


@pytest.mark.parametrize("transport", ["mapped", "inline"])
def test_a_service_that_is_killed_while_generating_changes_no_output(
    model: Model, plain: tuple[list[list[int]], int], transport: str
) -> None:
    expected, _ = plain

    def killer(service: PrivateService) -> Callable[[torch.Tensor], None]:
        """Kills the service once some tokens have come."""
        seen = [0]

        def put(tokens: torch.Tensor) -> None:
            seen[0] += tokens.numel()
            if seen[0] - tokens.numel() < len(PROMPTS[0]) + 10 <= seen[0]:
                service.kill()

        return put

    with PrivateService(http=False) as service, attached(service, "survivor", transport=transport) as drafter:
        with drafting(model.model, drafter):
            streamer = SimpleNamespace(put=killer(service), end=lambda: None)
            assert model.generate(PROMPTS[0], streamer=streamer) == expected[0]
            # A mapped engine drafts on from the index as it was; it takes a heartbeat until it knows.
            deadline = time.monotonic() + 60
            while not drafter.stats.fail_opens.sum():
                assert time.monotonic() < deadline
                assert model.generate(PROMPTS[1]) == expected[1]
            service.start()
            assert drafter.wait_attached(60)
            assert [model.generate(prompt) for prompt in PROMPTS[2:4]] == expected[2:4]
            assert drafter.wait_visible(60)
        kept = documents(service, "survivor")
        assert kept[-2:] == expected[2:4]
        assert expected[0] in kept, "what ended without a service is delivered to the next one"


def test_the_documentation_shows_what_works(model: Model, service: PrivateService, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    code = page.partition("## transformers")[2].partition("```python\n")[2].partition("```")[0]
    prompt = {"input_ids": torch.tensor([PROMPTS[0]])}
    methods = {"__call__": lambda self, text, return_tensors: prompt, "decode": lambda self, tokens: tokens.tolist()}
    tokenizer = type("Words", (), methods)()
    monkeypatch.setenv("DRAFTD_ENDPOINT", service.endpoint)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tokenizer)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name: model.model)
    shown: list[list[int]] = []
    exec(code, {"print": shown.append})
    assert shown == [PROMPTS[0] + model.generate(PROMPTS[0], max_new_tokens=200)]
