"""A whole engine with speculative decoding in one page: the model is a formula, everything about drafting is real.

Run it next to `draftd serve`; run it a second time, and the second run drafts from what the first one generated.
"""

from __future__ import annotations

import sys

from draftd.client import Drafter

VOCAB_SIZE = 4096
END = 0
ROWS = 4
MAX_LENGTH = 512


def next_token(tokens: list[int]) -> int:
    """The model: greedy decoding of one token from a context."""
    return (31 * tokens[-1] + 17 * tokens[-2] + len(tokens) // 64) % VOCAB_SIZE


def verify(context: list[int], draft: list[int]) -> list[int]:
    """What one forward pass over a context and a draft commits: the draft's tokens that the model agrees with, and one of its own."""
    committed: list[int] = []
    while True:
        token = next_token(context + committed)
        committed.append(token)
        if token == END or len(committed) > len(draft) or draft[len(committed) - 1] != token:
            return committed


def generate(drafter: Drafter, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], int]:
    """Outputs for all prompts, ROWS at a time, and how many steps they took."""
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    row_of: dict[int, int] = {}
    free_rows = list(range(ROWS))
    steps = 0
    while waiting or row_of:
        while waiting and free_rows:
            request, row = waiting.pop(0), free_rows.pop()
            drafter.start(row, prompts[request])
            row_of[request] = row
        drafts = drafter.propose(list(row_of.values()))
        steps += 1
        for i, (request, row) in enumerate(list(row_of.items())):
            committed = verify(prompts[request] + outputs[request], drafts.row(i))[: max_tokens - len(outputs[request])]
            drafter.append(row, committed)
            outputs[request] += committed
            if committed[-1] == END or len(outputs[request]) == max_tokens:
                drafter.finish(row)
                free_rows.append(row_of.pop(request))
    return outputs, steps


def main(endpoint: str | None = None) -> None:
    """Generates eight outputs and says how many steps it took."""
    prompts = [[1 + i, 7, 3 * i + 2] for i in range(8)]
    with Drafter(endpoint, engine="toy", vocab_size=VOCAB_SIZE, max_rows=ROWS, max_length=MAX_LENGTH, namespace="toy") as drafter:
        drafter.wait_attached(5)
        outputs, steps = generate(drafter, prompts, max_tokens=200)
        tokens = sum(len(output) for output in outputs)
        print(f"{tokens} tokens in {steps} steps, transport {drafter.transport}, {drafter.stats.fail_opens.sum()} fail-opens")


if __name__ == "__main__":
    main(*sys.argv[1:2])
