"""What it costs on a GPU to keep an index fresh: sorting new suffixes, merging them in, sorting a whole text, and `live`.

Needs torch, triton and a CUDA GPU. The peer, suffix-gpu, is measured where it can be imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench import workload
from bench.machine import parser, report
from draftd.drafter.device_index import DeviceShape
from draftd.drafter.ops.merge.gpu import fill_buckets, merge
from draftd.drafter.ops.sort.gpu import sort_positions, sort_text

DEPTH = 64
FRESH = 65_536
VOCABULARY = workload.VOCABULARY
KINDS = ("alike", "varied")
"""Corpora: copies of the sample answers with a tenth of their tokens replaced; copies of which each document has its own vocabulary."""
Row = list[object]


class Corpus:
    """Text on the GPU: int32 [tokens + FRESH + DEPTH + 1], a corpus, then as much that is fresh, both ended by a separator."""

    def __init__(self, tokens: int, kind: str) -> None:
        documents = workload.make(1, 1).documents
        base = torch.from_numpy(np.concatenate([np.append(d, np.int32(-1)) for d in documents]).astype(np.int32)).cuda()
        owner = torch.from_numpy(np.repeat(np.arange(len(documents)), [len(d) + 1 for d in documents])).cuda()
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(high: int, size: tuple[int, ...]) -> torch.Tensor:
            return torch.randint(high, size, generator=generator, device="cuda", dtype=torch.int32)

        def copy() -> torch.Tensor:
            if kind == "alike":
                replaced = torch.rand(base.shape, generator=generator, device="cuda") < workload.REPLACED_SHARE
                other = draw(VOCABULARY, base.shape)
            else:
                # A permutation of the vocabulary: 1002 has all prime factors of 128,256, so these factors have none of them.
                replaced = torch.ones_like(base, dtype=torch.bool)
                factor, start = (draw(high, (len(documents),))[owner].long() for high in (128, VOCABULARY))
                other = ((base * (1 + 1002 * factor) + start) % VOCABULARY).to(torch.int32)
            return torch.where(replaced & (base >= 0), other, base)

        self.tokens = tokens
        self.text = torch.cat([copy() for _ in range(-(-(tokens + FRESH) // base.shape[0]))])[: tokens + FRESH]
        self.text = torch.cat([self.text, self.text.new_full((DEPTH + 1,), -1)])
        self.text[tokens - 1] = -1
        self.count = int((self.text[:tokens] >= 0).sum())
        self.fresh = (self.text[tokens:-DEPTH] >= 0).nonzero().squeeze(1).to(torch.int32) + tokens


def event_ms(call: Callable[[], object], repeats: int = 9) -> float:
    """Milliseconds of GPU time between events around a call; the median."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times[2:]))


def graph_ms(call: Callable[[], object]) -> float:
    """The same for a replay of a CUDA graph of the call: without the time that the host takes to launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    return event_ms(graph.replay)


def row(what: str, call: Callable[[], object], must: float | None = None) -> Row:
    """One line of the table."""
    return [what, event_ms(call), graph_ms(call), must]


def refreshes(tokens: int, kind: str, must: float | None) -> Iterator[Row]:
    """FRESH new tokens into a corpus."""
    corpus = Corpus(tokens, kind)
    text = corpus.text
    main = sort_text(text, tokens, DEPTH, corpus.count)
    shift = DeviceShape(tokens, FRESH, FRESH, VOCABULARY, DEPTH).shift
    old_buckets, buckets = torch.zeros((2, ((VOCABULARY - 1) >> shift) + 2), dtype=torch.int32, device="cuda")
    fill_buckets(text, main, shift, old_buckets)
    new = sort_positions(text, corpus.fresh, DEPTH, VOCABULARY)
    out = torch.empty(main.shape[0] + new.shape[0], dtype=torch.int32, device="cuda")
    given = {"depth": DEPTH, "buckets": old_buckets, "shift": shift}
    evicted = int((main < FRESH).sum())

    def refresh() -> None:
        merge(text, main, sort_positions(text, corpus.fresh, DEPTH, VOCABULARY), out, **given)
        fill_buckets(text, out, shift, buckets)

    def evict() -> None:
        merge(text, main, new, out, evict_length=FRESH, ring=text.shape[0], **given)
        fill_buckets(text, out[: out.shape[0] - evicted], shift, buckets)

    name = f"{tokens >> 20}M {kind}"
    yield row(f"64k new into {name}", refresh, must)
    yield row(f"  sort into {name}", lambda: sort_positions(text, corpus.fresh, DEPTH, VOCABULARY))
    yield row(f"  merge into {name}", lambda: merge(text, main, new, out, **given))
    yield row(f"  merge into {name}, 64k evicted, buckets", evict)
    yield row(f"  buckets of {name}", lambda: fill_buckets(text, out, shift, buckets))


def builds(tokens: int, kind: str, must: float | None) -> Iterator[Row]:
    """Sorting a whole corpus."""
    corpus = Corpus(tokens, kind)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sort_text(corpus.text, tokens, DEPTH, corpus.count)
    peak = (torch.cuda.max_memory_allocated() - before) / tokens
    yield [
        f"bulk build of {tokens >> 20}M {kind} ({peak:.0f} bytes a token meanwhile)",
        event_ms(lambda: sort_text(corpus.text, tokens, DEPTH, corpus.count), 5), None, must,
    ]  # fmt: skip
    if importlib.util.find_spec("suffix_gpu") and tokens <= 1 << 24:
        build = importlib.import_module("suffix_gpu.suffix_array").build_suffix_array
        yield ["  suffix-gpu", event_ms(lambda: build(corpus.text[:tokens]), 3), None, None]


def live(tokens: int, kind: str, must: float | None) -> Row:
    """Sorting the text of `live`, with its table."""
    corpus = Corpus(FRESH, kind)
    text = corpus.text[: tokens + DEPTH + 1].clone()
    text[tokens:] = -1
    positions = (text >= 0).nonzero().squeeze(1).to(torch.int32)
    buckets = torch.zeros(VOCABULARY + 1, dtype=torch.int32, device="cuda")

    def refresh() -> None:
        fill_buckets(text, sort_positions(text, positions, DEPTH, VOCABULARY), 0, buckets)

    return row(f"live, {tokens:,} {kind}", refresh, must)


def loops() -> Row:
    """Sorting new text that is nothing but one token: what equal suffixes cost at most."""
    text = torch.zeros(FRESH + DEPTH + 1, dtype=torch.int32, device="cuda")
    text[999:FRESH:1000] = -1
    text[FRESH:] = -1
    positions = (text >= 0).nonzero().squeeze(1).to(torch.int32)
    return row("sort of 64k, documents of one token a thousand times", lambda: sort_positions(text, positions, DEPTH, VOCABULARY))


def memory(quota: int) -> float:
    """Bytes a token of text and index, with the service's sizes of `recent` and `live`."""
    return 4 * DeviceShape(quota, 262_144, 131_072, VOCABULARY, DEPTH).elements / quota


def copy_terabytes() -> float:
    """Terabytes a second that a large copy in device memory reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 8 * (1 << 28) / event_ms(lambda: target.copy_(source)) / 1e9


def main() -> None:
    """Prints the table."""
    arguments = parser(__doc__).parse_args()
    rows: list[Row] = []
    for kind in KINDS:
        for tokens, must in ((1 << 22, 1.0), (1 << 24, None), (1 << 26, 6.0)):
            rows += refreshes(tokens, kind, must)
        for tokens, must in ((1 << 22, None), (1 << 24, 20.0), (1 << 26, None)):
            rows += builds(tokens, kind, must)
        rows += [live(1024, kind, None), live(4096, kind, 0.3), live(16_384, kind, None)]
    rows.append(loops())
    notes = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds; copies move {copy_terabytes():.2f} TB/s; depth {DEPTH}",
        "graph: the same as a CUDA graph, without the host's part",
        *(f"memory, corpus and index of {q >> 20}M: {memory(q):.1f} bytes a token (must: 24)" for q in (1 << 22, 1 << 26)),
    ]
    report("Refreshing an index on a GPU", ["what", "ms", "graph", "must"], rows, arguments.json, notes)
    missed = [str(what) for what, ms, _, must in rows if isinstance(must, float) and isinstance(ms, float) and ms > must]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
