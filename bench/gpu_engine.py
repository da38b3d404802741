"""An engine process on a GPU: it replays traces through a DeviceSession, row by row as a greedy model would, and checks drafts.

Every step's drafts are compared with the CPU kernels' on a copy of the version that they name, where that version lasts as long as
copying it takes. Prints what it counted as one line of JSON; run by bench/sharing.py and tests/gpu.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.device_image import compile_drafts, copy_version, differing, drafts_of
from draftd.client.device import DeviceSession
from draftd.drafter.device_layout import TORN
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import FAIL_OPEN_REASONS
from draftd.server.replay.trace import load_trace

WIDTH = 4096


class Rows:
    """The engine's buffer, and which request each row is at: its tokens, how many of them it holds, and its id."""

    def __init__(self, count: int, requests: Iterator[tuple[str, NDArray[np.int32], int]]) -> None:
        self.tokens = torch.zeros((count, WIDTH), dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(count, dtype=torch.int32, device="cuda")
        self.order = torch.arange(count, dtype=torch.int32, device="cuda")
        self.truth: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * count
        self.held = np.zeros(count, np.int64)
        self._requests = requests

    def fill(self, row: int) -> tuple[str, NDArray[np.int32]]:
        """Puts the next request into a row; its id and prompt."""
        name, tokens, prompt = next(self._requests)
        self.truth[row], self.held[row] = tokens, prompt
        self.tokens[row, : len(tokens)] = torch.from_numpy(tokens)
        self.lengths[row] = prompt
        return name, tokens[:prompt]

    def commit(self, row: int, drafted: NDArray[np.int32]) -> bool:
        """Takes what of a draft is right and one token more; whether the request goes on."""
        truth, at = self.truth[row], int(self.held[row])
        expected = truth[at : at + len(drafted)]
        right = int(np.cumprod(drafted[: len(expected)] == expected).sum())
        self.held[row] = min(len(truth), at + right + 1)
        return bool(self.held[row] < len(truth))


def requests(paths: list[str], first: int, stride: int, engine: str) -> Iterator[tuple[str, NDArray[np.int32], int]]:
    """Endless requests (id, tokens, length of the prompt): every `stride`-th turn of the traces from `first` on, again and again."""
    turns = []
    for path in paths:
        for session in load_trace(path):
            context: list[int] = []
            for turn in session.turns:
                before = [*context, *turn.input.tolist()]
                context = [*before, *turn.output.tolist()]
                if len(context) <= WIDTH and before and len(turn.output):
                    turns.append((np.array(context, np.int32), len(before)))
    for number, (tokens, prompt) in enumerate(cycle(turns[first::stride])):
        yield f"{engine}-{number}", tokens, prompt


def replay(session: DeviceSession, rows: Rows, seconds: float, check: bool, header: str, quiet: bool) -> dict[str, Any]:
    """Decodes for so long; what was counted."""
    count = len(rows.truth)
    names = ("steps", "row_steps", "tokens", "drafted", "checked", "not_whole", "differ", "torn")
    counted = dict.fromkeys(names, 0)
    gap = longest_gap = 0.0
    for row in range(count):
        name, prompt = rows.fill(row)
        session.start(row, prompt, name)
    end = time.monotonic() + seconds
    last_attached = time.monotonic()
    while time.monotonic() < end:
        if session.attached:
            last_attached = time.monotonic()
        gap = time.monotonic() - last_attached
        longest_gap = max(longest_gap, gap)
        out = session.propose(rows.order)
        if not quiet:
            session.collect(rows.order, out)
        drafts = out.numpy()
        counted["torn"] += int((drafts.version == TORN).sum())
        versions = np.unique(drafts.version[drafts.version > 0])
        if check and len(versions) == 1:
            memory = session.memory
            with session.reading():
                image = copy_version(memory.words, memory.headers, session.headers.get(header, 0), int(versions[0]))
            if image is None:
                counted["not_whole"] += count
            else:
                held = [rows.truth[r][: rows.held[r]] for r in range(count)]
                of_version = drafts.version == image.number
                counted["checked"] += int(of_version.sum())
                counted["differ"] += differing(drafts, drafts_of(image, held, session.params), of_version)
        ended = []
        for row in range(count):
            before = int(rows.held[row])
            goes_on = rows.commit(row, drafts.tokens[row, : drafts.counts[row]])
            counted["tokens"] += int(rows.held[row]) - before
            if not goes_on:
                ended.append(row)
        counted["drafted"] += int(drafts.counts.sum())
        counted["steps"] += 1
        counted["row_steps"] += count
        rows.lengths.copy_(torch.from_numpy(rows.held.astype(np.int32)))
        if ended and not quiet:
            # The last tokens are carried with a launch that drafts for nothing.
            session.collect(rows.order, session.propose(rows.order))
            torch.cuda.current_stream().synchronize()
            time.sleep(0.01)
        for row in ended:
            session.finish(row, len(rows.truth[row]))
            name, prompt = rows.fill(row)
            session.start(row, prompt, name)
    torch.cuda.synchronize()
    return {**counted, "attachments": session.attachments, "longest_gap_s": longest_gap, "overruns": session.overruns}


def main() -> None:
    """Replays, and prints what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--engine", default="gpu-engine")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="tell the service of no tokens")
    parser.add_argument("--unattached", action="store_true", help="do not wait for the service")
    options = parser.parse_args()
    rows = Rows(options.rows, requests(options.traces, options.first, options.stride, options.engine))
    params = DraftParams(k=16, max_depth=24, spec_factor=2, policy="tree")
    if not options.no_check:
        compile_drafts(params)
    with DeviceSession(
        options.endpoint, engine=options.engine, vocab_size=128_256, tokens=rows.tokens, lengths=rows.lengths, max_batch=options.rows,
        params=params,
    ) as session:  # fmt: skip
        if not options.unattached and not session.wait_attached(60):
            raise SystemExit(f"not attached: {session.trouble}")
        print("attached", file=sys.stderr, flush=True)
        counted = replay(session, rows, options.seconds, not options.no_check, "default", options.quiet)
        print(json.dumps({**counted, "fail_opens": dict(zip(FAIL_OPEN_REASONS, session.stats.fail_opens.tolist(), strict=True))}))


if __name__ == "__main__":
    main()
