"""One vLLM replica as a process of its own, for bench.vllm_replicas: commands come as JSON lines on stdin, answers go to a pipe.

Everything runs in this process, so that killing it kills all of the replica.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections import deque
from typing import Any

_MIXED_TOKENS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens of steps with a prefill in them that have a graph: up to the most that a step has."""
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


def start(settings: dict[str, Any]) -> Any:
    """vLLM as the table is made with: Model Runner V2, asynchronous scheduling, full graphs of every batch that is measured.

    Steps with a prefill in them have graphs too, broken at attention, as in a vLLM that compiles: else they would decide the figures of a
    model as small as this.
    """
    from vllm import LLM

    k, most = settings["k"], max(settings["batches"])
    batches = sorted({1, 2, 4, *range(8, most + 1, 8), *settings["batches"]})
    per_request = k + 1 if settings["method"] == "ngram_gpu" else 1
    speculative: dict[str, Any] | None = None
    if settings["method"] == "ngram_gpu":
        speculative = {"method": "ngram_gpu", "num_speculative_tokens": k, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        if settings["adaptive"]:
            speculative["enable_adaptive_verification"] = True
    return LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=most,
        max_num_batched_tokens=_MIXED_TOKENS[-1],
        gpu_memory_utilization=0.15,
        kv_cache_memory_bytes=4 << 30,
        enable_prefix_caching=False,
        attention_backend="TRITON_ATTN",
        compilation_config={
            "mode": 0,
            "cudagraph_mode": settings["cudagraph_mode"],
            "cudagraph_capture_sizes": sorted({batch * per_request for batch in batches} | set(_MIXED_TOKENS)),
        },
        speculative_config=speculative,
        disable_log_stats=False,
        seed=0,
    )


def serve(llm: Any, command: dict[str, Any], numbers: Any) -> dict[str, Any]:
    """Answers prompts, `batch` of them at any time.

    Returns:
        Seconds, the median of a step's milliseconds, the tokens of each prompt and of its output, the gap of the two likeliest tokens at
        each where that was asked for, and how much vLLM's counters have grown.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra = dict(command["extra_args"]) or None
    params = SamplingParams(
        temperature=0.0, max_tokens=command["max_tokens"], detokenize=False, extra_args=extra, logprobs=2 if command["gaps"] else None,
        # As vLLM's own `generate` has it: outputs are not copied each step.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    prompts = [_tokens(tokenizer, text) for text in command["prompts"]]
    waiting = deque(enumerate(prompts))
    outputs: list[list[int]] = [[] for _ in waiting]
    gaps: list[list[float]] = [[] for _ in waiting]
    places: dict[str, int] = {}
    steps_ms: list[float] = []
    before = counters(llm)
    began = time.perf_counter()
    while waiting or places:
        while waiting and len(places) < command["batch"]:
            place, tokens = waiting.popleft()
            name = f"{next(numbers)}"
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
            places[name] = place
        step_began = time.perf_counter()
        finished = engine.step()
        steps_ms.append(1000 * (time.perf_counter() - step_began))
        for output in finished:
            if output.finished:
                place = places.pop(output.request_id)
                outputs[place] = list(output.outputs[0].token_ids)
                if command["gaps"]:
                    gaps[place] = [_gap(step) for step in output.outputs[0].logprobs]
    seconds = time.perf_counter() - began
    grown = {name: value - before[name] for name, value in counters(llm).items()}
    step_ms = statistics.median(steps_ms)
    return {"seconds": seconds, "step_ms": step_ms, "prompts": prompts, "outputs": outputs, "gaps": gaps, "counters": grown}


def counters(llm: Any) -> dict[str, int]:
    """vLLM's own counters of speculation; zeros without it."""
    found = dict.fromkeys(COUNTERS, 0)
    for metric in llm.get_metrics():
        if metric.name in found:
            found[metric.name] += int(metric.value)
    return found


def verify_ms(llm: Any, settings: dict[str, Any]) -> dict[int, float]:
    """Milliseconds that vLLM takes a step's forward pass to last, by its tokens; adaptive verification trims drafts by that."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    _, costs = runner.adaptive_verification.cost_tables
    sizes = sorted({size for batch in settings["batches"] for size in (batch, batch * (1 + settings["k"]))})
    return {size: float(costs[size]) for size in sizes}


def _tokens(tokenizer: Any, text: str) -> list[int]:
    written = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer(written, add_special_tokens=False)["input_ids"]
    return tokens


def _gap(step: dict[int, Any]) -> float:
    likeliest = sorted((entry.logprob for entry in step.values()), reverse=True)
    return float(likeliest[0] - likeliest[1])


def main() -> None:
    """Serves commands until stdin ends."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(settings["answers_fd"], "w", buffering=1)
    began = time.monotonic()
    llm = start(settings)
    config = llm.llm_engine.vllm_config
    about = {
        "start_s": time.monotonic() - began,
        "v2": bool(config.use_v2_model_runner),
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "pid": os.getpid(),
        "verify_ms": verify_ms(llm, settings) if settings["adaptive"] else {},
    }
    print(json.dumps(about), file=answers)
    numbers = itertools.count()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(serve(llm, command, numbers)), file=answers)


if __name__ == "__main__":
    main()
