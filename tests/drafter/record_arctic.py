"""Records what arctic-inference 0.3.0 drafts in the replays of arctic_replay.py, for test_arctic.py.

Run it where arctic-inference is installed; draftd need not be: python tests/drafter/record_arctic.py
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.drafter.arctic_replay import DEPTH, FIXTURE, SETTINGS, ArcticDraft, K, Request, Setting, replay


def record(setting: Setting) -> list[ArcticDraft]:
    """Arctic's drafts, in the order of the replay."""
    cache = SuffixDecodingCache(DEPTH, 1_000_000)
    drafts: list[ArcticDraft] = []

    def draft(requests: list[Request]) -> list[ArcticDraft]:
        answers = []
        for request in requests:
            tail = np.asarray((request.context[-DEPTH:] + request.output)[-DEPTH:], np.int32)
            limits = {"max_spec_factor": setting.factor, "min_token_prob": setting.probability}
            got = cache.speculate(request.number, tail, max_spec_tokens=K, **limits)
            answers.append(ArcticDraft(list(got.token_ids), round(float(got.score), 6), int(got.match_len)))
        drafts.extend(answers)
        return answers

    def commit(request: Request, tokens: list[int], ended: bool) -> None:
        cache.add_active_response(request.number, np.asarray(tokens, np.int32))
        if ended:
            cache.stop_request(request.number)

    replay(setting, draft, lambda request: cache.start_request(request.number, np.asarray(request.context, np.int32)), commit)
    return drafts


def main() -> None:
    """Writes the fixture."""
    entries = [{"setting": setting, "drafts": record(setting)} for setting in SETTINGS]
    FIXTURE.parent.mkdir(exist_ok=True)
    with FIXTURE.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(json.dumps(entries, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
