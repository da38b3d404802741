"""Stand-ins for vLLM's objects and for a DeviceSession, for tests of the plugin without vLLM and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from draftd.client.vllm.scheduler import salted
from draftd.client.vllm.settings import Settings
from draftd.client.vllm.speculator import DraftdSpeculator
from draftd.drafter.device import DeviceDrafts

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
