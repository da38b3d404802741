"""Makes the tiny Llama of this folder from gsm8k.jsonl.gz: `python samples/tiny_llama/train.py`, ten minutes on two cores.

It is a language model small enough for a repository, not a good one: it writes solutions of the right form with wrong sums.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
TRACE = HERE.parent / "gsm8k.jsonl.gz"
END, UNKNOWN, FIRST = 0, 1, 2
VOCAB_SIZE = 2000
MAX_LENGTH = 512
HELD_OUT_PROBLEMS = 20
STEPS = 900
BATCH = 20
LENGTH = 160


def read_trace() -> tuple[list[int], list[tuple[str, list[int], list[int]]]]:
    """The Llama 3 tokens that have an id of their own, the most frequent ones, and (problem, prompt, answer) in their ids."""
    with gzip.open(TRACE, "rt") as lines:
        sessions = [json.loads(line) for line in lines]
    counts = Counter(token for s in sessions for turn in s["turns"] for token in turn["input"] + turn["output"])
    llama3 = [token for token, _ in counts.most_common(VOCAB_SIZE - FIRST)]
    ids = {token: FIRST + i for i, token in enumerate(llama3)}
    turns = [(s["group"], turn["input"], turn["output"]) for s in sessions for turn in s["turns"]]
    return llama3, [(g, [ids.get(t, UNKNOWN) for t in prompt], [ids.get(t, UNKNOWN) for t in answer]) for g, prompt, answer in turns]


def train(text: list[int]) -> Any:
    """A model of a text, trained to predict each of its tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    model: Any = LlamaForCausalLM(config)
    tokens = torch.tensor(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS, pct_start=0.1)
    model.train()
    for step in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model


def main() -> None:
    """Trains on all problems but the last ones, and writes the model and the prompts of both kinds."""
    llama3, turns = read_trace()
    problems = list(dict.fromkeys(group for group, _, _ in turns))
    held_out = set(problems[-HELD_OUT_PROBLEMS:])
    text = [token for group, prompt, answer in turns if group not in held_out for token in [*prompt, *answer, END]]
    model: Any = train(text)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END)
    model.half().save_pretrained(HERE)
    prompts = {group: prompt for group, prompt, _ in turns}
    seen = [prompts[group] for group in problems[:HELD_OUT_PROBLEMS]]
    tokens = {"llama3": llama3, "prompts": seen, "held_out_prompts": [prompts[group] for group in problems[-HELD_OUT_PROBLEMS:]]}
    (HERE / "tokens.json").write_text(json.dumps(tokens, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
