"""What does drafting save in transformers? Forward passes and time of `model.generate` for the tiny model of samples/tiny_llama on the CPU.

Two copies of the model share one service: A generates, then B generates the same, and answers to problems that neither has seen.
Exits 1 if an output is not what it is without drafts, or B needs more than a third of the passes for what A generated.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.machine import parser, report
from draftd.client import Drafter
from draftd.client.transformers import drafting
from draftd.server.replay.service import PrivateService

TINY = Path(__file__).parents[1] / "samples" / "tiny_llama"
NEW_TOKENS = 128
ROUNDS = 3
MOST_OF_PLAIN = 1 / 3
KNOWN, NEW = "problems A: ", "new problems: "
PLAIN, LOOKUP, SHARED = "no drafts", "prompt lookup, 10 tokens", "draftd on B, A has generated them"


class Run:
    """Greedy outputs of prompts, the forward passes they took, and the seconds of processor time of the thread that decodes."""

    def __init__(self, model: Any, prompts: list[list[int]], **more: Any) -> None:
        self.forwards = 0
        handle = model.register_forward_pre_hook(self._count)
        started = time.thread_time()
        self.outputs = [self._generate(model, prompt, more) for prompt in prompts]
        self.seconds = time.thread_time() - started
        handle.remove()

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _generate(self, model: Any, prompt: list[int], more: dict[str, Any]) -> list[int]:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **more)
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.outputs))


def load() -> Any:
    """The tiny model."""
    return LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True).eval()


def measure(service: PrivateService, number: int, known: list[list[int]], new: list[list[int]]) -> dict[str, Run]:
    """One run of everything, in a namespace of its own."""
    a, b = load(), load()
    Run(a, known[:2])
    Run(b, known[:2])
    runs = {KNOWN + PLAIN: Run(a, known), KNOWN + LOOKUP: Run(a, known, prompt_lookup_num_tokens=10)}
    settings: dict[str, Any] = {"vocab_size": 2000, "max_rows": 1, "max_length": 512, "namespace": f"round-{number}"}
    with Drafter(service.endpoint, engine=f"a-{number}", **settings) as drafter, drafting(a, drafter):
        drafter.wait_attached(60)
        Run(a, known[:2], draft_private=True)
        runs[f"{KNOWN}draftd, nothing known yet"] = Run(a, known)
        drafter.wait_visible(60)
    runs_new = {NEW + PLAIN: Run(b, new), NEW + LOOKUP: Run(b, new, prompt_lookup_num_tokens=10)}
    with Drafter(service.endpoint, engine=f"b-{number}", **settings) as drafter, drafting(b, drafter):
        drafter.wait_attached(60)
        runs[KNOWN + SHARED] = Run(b, known)
        runs_new[f"{NEW}draftd on B"] = Run(b, new)
    return runs | runs_new


def main() -> int:
    """Exit status 1 if an output changed, or too little was saved."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    kept = json.loads((TINY / "tokens.json").read_text())
    known, new = kept["prompts"], kept["held_out_prompts"]
    with PrivateService(http=False) as service:
        rounds = [measure(service, number, known, new) for number in range(ROUNDS)]
    rows = []
    for name, run in rounds[0].items():
        plain = rounds[0][(KNOWN if name.startswith(KNOWN) else NEW) + PLAIN]
        exact = all(each[name].outputs == plain.outputs for each in rounds)
        seconds = min(each[name].seconds for each in rounds)
        rows.append(
            (name, run.tokens, run.forwards, run.tokens / run.forwards, 1e3 * seconds / run.tokens, "exact" if exact else "CHANGED")
        )
    report(
        "transformers, greedy, one prompt at a time",
        ("what", "tokens", "forward passes", "tokens/pass", "CPU ms/token", "outputs"),
        rows,
        arguments.json,
        (
            f"{len(known)} prompts of each kind, up to {NEW_TOKENS} tokens; "
            f"transformers {version('transformers')}, torch {torch.__version__}.",
            f"Times are of the thread that decodes, the best of {ROUNDS} rounds.",
        ),
    )
    saved = rounds[0][KNOWN + SHARED].forwards <= MOST_OF_PLAIN * rounds[0][KNOWN + PLAIN].forwards
    return int(not saved or any(row[-1] != "exact" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
