"""arctic-inference's suffix tree on the same work, as a program of its own: its environment need not hold draftd.

arctic.py replay TRACE K DEPTH FACTOR PROBABILITY CONCURRENCY | speculate WORKLOAD K DEPTH FACTOR PROBABILITY | memory WORKLOAD DEPTH
Prints one JSON object.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

MANY_REQUESTS = 1_000_000
"""More than are ever cached here, so that nothing is evicted."""


class Turn:
    """A turn in flight: `done` tokens of `reference` are committed."""

    def __init__(self, cache: Any, uid: int, session: dict[str, Any], index: int, before: list[int]) -> None:
        self.cache, self.uid, self.session, self.index = cache, uid, session, index
        self.context = before + session["turns"][index]["input"]
        self.reference: list[int] = session["turns"][index]["output"]
        self.done = 0
        cache.start_request(uid, np.asarray(self.context, np.int32))

    def speculate(self, depth: int, **limits: float) -> list[int]:
        tail = (self.context[-depth:] + self.reference[: self.done])[-depth:]
        return list(self.cache.speculate(self.uid, np.asarray(tail, np.int32), **limits).token_ids)

    def verify(self, draft: list[int]) -> int:
        """Commits what of the draft is right and one token more; answers how many tokens that was."""
        rest = self.reference[self.done :]
        accepted = 0
        while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
            accepted += 1
        self.cache.add_active_response(self.uid, np.asarray(rest[: accepted + 1], np.int32))
        self.done += accepted + 1
        return accepted + 1


def replay(trace: str, k: int, depth: int, factor: float, probability: float, concurrency: int) -> dict[str, float]:
    """tokens/step and drafted/step; every draft of a step is made before anything of the step is committed."""
    with gzip.open(trace) as lines:
        waiting = [json.loads(line) for line in lines][::-1]
    cache = SuffixDecodingCache(depth, MANY_REQUESTS)
    active: list[Turn] = []
    uid = steps = tokens = drafted = 0
    while waiting or active:
        while waiting and len(active) < concurrency:
            uid += 1
            active.append(Turn(cache, uid, waiting.pop(), 0, []))
        drafts = [t.speculate(depth, max_spec_tokens=k, max_spec_factor=factor, min_token_prob=probability) for t in active]
        following = []
        for turn, draft in zip(active, drafts, strict=True):
            tokens += turn.verify(draft)
            drafted += len(draft)
            steps += 1
            if turn.done < len(turn.reference):
                following.append(turn)
                continue
            cache.stop_request(turn.uid)
            if turn.index + 1 < len(turn.session["turns"]):
                uid += 1
                following.append(Turn(cache, uid, turn.session, turn.index + 1, turn.context + turn.reference))
        active = following
    return {"tokens_per_step": tokens / steps, "drafted_per_step": drafted / steps, "steps": steps}


def _arrays(workload: Any, name: str) -> list[Any]:
    return np.split(workload[f"{name}_tokens"], np.cumsum(workload[f"{name}_lengths"])[:-1])


def _filled(documents: list[Any], depth: int) -> Any:
    cache = SuffixDecodingCache(depth, MANY_REQUESTS)
    for uid, document in enumerate(documents):
        cache.start_request(uid, np.zeros(1, np.int32))
        cache.add_active_response(uid, document)
        cache.stop_request(uid)
    return cache


def speculate(path: str, k: int, depth: int, factor: float, probability: float) -> dict[str, float]:
    """Time of `speculate` a request in the fastest and the median pass over all contexts, in microseconds; tokens drafted a request."""
    workload = np.load(path)
    cache = _filled(_arrays(workload, "documents"), depth)
    contexts = _arrays(workload, "contexts")
    tails = [c[-depth:] for c in contexts]
    first = len(workload["documents_lengths"])
    for uid, context in enumerate(contexts, first):
        cache.start_request(uid, context)
    passes, drafted = [], 0
    for _ in range(26):
        drafted = 0
        start = time.perf_counter()
        for uid, tail in enumerate(tails, first):
            draft = cache.speculate(uid, tail, max_spec_tokens=k, max_spec_factor=factor, min_token_prob=probability)
            drafted += len(draft.token_ids)
        passes.append(1e6 * (time.perf_counter() - start) / len(contexts))
    return {"us": min(passes), "us_median": float(np.median(passes)), "drafted": drafted / len(contexts)}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory(path: str, depth: int) -> dict[str, float]:
    """Growth of resident memory a token of corpus, in bytes."""
    documents = _arrays(np.load(path), "documents")
    before = _resident_bytes()
    cache = _filled(documents, depth)
    grown = _resident_bytes() - before
    del cache
    return {"bytes_per_token": grown / sum(len(d) for d in documents)}


def main(arguments: list[str]) -> None:
    command, path, *numbers = arguments
    run: dict[str, Any] = {"replay": replay, "speculate": speculate, "memory": memory}
    integer = {0, 1, 4} if command != "memory" else {0}
    print(json.dumps(run[command](path, *(int(n) if i in integer else float(n) for i, n in enumerate(numbers)))))


if __name__ == "__main__":
    main(sys.argv[1:])
