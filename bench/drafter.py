"""Draft latency on a GPU by batch size, for corpora of 4M and 64M tokens and for long contexts, beside other drafters on the same work.

Needs torch, triton and a CUDA GPU. Every figure is a median over graphs of 16 drafts, each for other rows, so launch gaps are in it; a peer
that cannot be captured is timed call by call. bench/refresh_gpu.py measures refreshes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from bench import peers, workload
from bench.machine import parser, report
from bench.peers import suffix_gpu
from draftd.drafter.device import DeviceDrafter, DeviceDrafts
from draftd.drafter.device_calibrated import COMPLETE_LEVELS, MOST_SEARCHES, DeviceCalibrated, DeviceLessons
from draftd.drafter.device_index import DeviceIndex, DeviceShape
from draftd.drafter.device_matching import Launch
from draftd.drafter.index import Version
from draftd.drafter.ops.merge.gpu import fill_buckets
from draftd.drafter.ops.sort.gpu import sort_text
from draftd.drafter.params import DraftParams

BATCHES = (1, 8, 32, 128, 256, 512)
DEPTH = 64
DRAFTS = 16
FREQUENT = 200
"""So many tokens are the same in every text of a varied corpus."""
DEVICE_ROWS = 4096
CONTEXTS = 512
PARAMS_K = 16
MATCH_DEPTH = 24
SEARCHES = ((MOST_SEARCHES, COMPLETE_LEVELS), (2, 1), (1, 0))
"""How often drafts by the rule `calibrated` may search, and of how many levels they must have all occurrences."""


def corpus_text(tokens: int, kind: str) -> torch.Tensor:
    """int32 [>= tokens] on the device: copies of the sample answers, each followed by a separator.

    Args:
        kind: "alike": the later copies have a tenth of their tokens replaced, so that a suffix occurs once a copy; "varied": from the
            fourth on, each copy has tokens of its own for all but the most frequent ones, as text on other subjects would.
    """
    documents = workload.make(1, 1).documents
    base = torch.from_numpy(np.concatenate([np.append(d, np.int32(-1)) for d in documents]).astype(np.int32)).cuda()
    copies = [base]
    generator = torch.Generator("cuda").manual_seed(0)
    counts = torch.bincount(base[base >= 0], minlength=workload.VOCABULARY)
    rare = counts < counts.sort(descending=True).values[FREQUENT]
    for i in range(tokens // base.shape[0]):
        text = base
        if kind == "varied" and i >= 3:
            names = torch.arange(workload.VOCABULARY, device="cuda", dtype=torch.int32)
            names[rare] = names[rare][torch.randperm(int(rare.sum()), generator=generator, device="cuda")]
            text = torch.where(base >= 0, names[base.clamp(min=0)], base)
        replaced = (torch.rand(base.shape, generator=generator, device="cuda") < workload.REPLACED_SHARE) & (base >= 0)
        other = torch.randint(workload.VOCABULARY, base.shape, generator=generator, device="cuda", dtype=torch.int32)
        copies.append(torch.where(replaced, other, text))
    return torch.cat(copies)


def device_index(tokens: int, kind: str = "alike", recent: int = 131_072, live: int = 16_384) -> DeviceIndex:
    """An index of at least `tokens` tokens of corpus_text."""
    text = corpus_text(tokens + recent + live, kind)
    cuts = [0]
    for size in (text.shape[0] - recent - live, text.shape[0] - live):
        # A segment ends where a document does.
        cuts.append(size + int((text[size:] < 0).nonzero()[0, 0]) + 1)
    cuts.append(text.shape[0])
    ring = cuts[2]
    index = DeviceIndex(DeviceShape(ring, 2 * recent, 8 * live, workload.VOCABULARY, DEPTH), "cuda")
    index.text[: cuts[2]] = text[: cuts[2]]
    index.live_text[0, : cuts[3] - cuts[2]] = text[cuts[2] :]
    lengths = []
    for segment, array in enumerate((index.main, index.recent, index.live)):
        own = index.live_text[0] if segment == 2 else index.text
        start = 0 if segment == 2 else cuts[segment]
        suffixes = sort_text(own[start:], cuts[segment + 1] - cuts[segment], DEPTH) + start
        array[0, : suffixes.shape[0]] = suffixes
        fill_buckets(own, suffixes, index.shape.shift, index.buckets[segment, 0])
        index.sign(segment, 0, array[0, : suffixes.shape[0]])
        lengths.append(int(suffixes.shape[0]))
    index.publish(Version(lengths=(lengths[0], lengths[1], lengths[2])))
    return index


def token_buffer(contexts: list[NDArray[np.int32]], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contexts as an engine holds them: tokens int32 [n, width], lengths int64 [n], namespaces int32 [n]."""
    tokens = np.zeros((len(contexts), width), np.int32)
    for slot, context in enumerate(contexts):
        tokens[slot, : len(context)] = context
    lengths = torch.tensor([len(c) for c in contexts], device="cuda")
    return torch.from_numpy(tokens).cuda(), lengths, torch.zeros(len(contexts), dtype=torch.int32, device="cuda")


def graph_us(call: Callable[[int], None], calls: int = DRAFTS, repeats: int = 25) -> float:
    """Microseconds of GPU time that one of `calls` calls in a captured graph takes; the median of `repeats` replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        times = []
        for _ in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end))
    return 1000 * float(np.median(times[3:])) / calls


def draft_us(
    index: DeviceIndex, buffer: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: int, factor: float, launch: Launch | None = None
) -> float:
    """Microseconds that a draft for `batch` rows takes."""
    tokens, lengths, namespaces = buffer
    params = DraftParams(k=PARAMS_K, max_depth=MATCH_DEPTH, spec_factor=factor, policy="tree")
    drafter = DeviceDrafter(index.arena, index.headers, max_batch=batch, max_row_tokens=tokens.shape[1], params=params, launch=launch)
    out = DeviceDrafts.empty(batch, params.k, "cuda")
    rows = row_choices(buffer, batch)
    return graph_us(lambda i: drafter.propose(tokens, lengths, rows[i], namespaces, out))


@triton.jit  # type: ignore[untyped-decorator]
def chase(links: torch.Tensor, start: int, out: torch.Tensor, STEPS: tl.constexpr) -> None:
    """One thread follows links: each load waits for the one before."""
    at = start
    for _ in range(STEPS):
        at = tl.load(links + at)
    tl.store(out, at)


def load_latency_ns(byte_size: int, steps: int = 2048) -> float:
    """Nanoseconds that a load takes that waits for another, over that much memory, in a random order.

    Up to 256 calls, each for other lines, are 64 MiB of lines: more than a cache keeps from one replay to the next.
    """
    lines = byte_size // 128
    order = torch.randperm(lines, device="cuda", dtype=torch.int32) * 32
    links = torch.zeros(byte_size // 4, dtype=torch.int32, device="cuda")
    links[order.long()] = order.roll(-1)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    starts = order[::steps][:256].tolist()
    return 1000 * graph_us(lambda i: chase[(1,)](links, starts[i], out, STEPS=steps, num_warps=1), calls=len(starts), repeats=3) / steps


def calibrated_us(
    index: DeviceIndex, buffer: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: int, searches: int, complete_levels: int
) -> tuple[float, float]:
    """Microseconds of a draft by the rule `calibrated` for `batch` rows, what it learns from included, and tokens drafted a row."""
    tokens, lengths, namespaces = buffer
    params = DraftParams(k=PARAMS_K)
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=batch, max_row_tokens=tokens.shape[1], params=params,
        searches=searches, complete_levels=complete_levels,
    )  # fmt: skip
    out, lessons = DeviceDrafts.empty(batch, params.k, "cuda"), DeviceLessons.empty(batch, params.k, "cuda")
    rows = row_choices(buffer, batch)
    drafted = 0.0
    for choice in rows:
        drafter.propose(tokens, lengths, choice, namespaces, out, lessons)
        drafted += float(out.counts.float().mean()) / len(rows)
    return graph_us(lambda i: drafter.propose(tokens, lengths, rows[i], namespaces, out, lessons)), drafted


def row_choices(buffer: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: int) -> list[torch.Tensor]:
    """For each draft of a graph, other rows of the buffer: int32 [batch]."""
    generator = torch.Generator("cuda").manual_seed(batch)
    return [torch.randperm(buffer[0].shape[0], generator=generator, device="cuda")[:batch].to(torch.int32) for _ in range(DRAFTS)]


def call_us(call: Callable[[int], None]) -> float:
    """Microseconds between events around DRAFTS calls, one of them; the median of a few."""
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(DRAFTS):
            call(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 * float(np.median(times[2:])) / DRAFTS


def peer_rows(tokens: int, buffer: tuple[torch.Tensor, torch.Tensor, torch.Tensor], factor: float) -> Iterator[list[object]]:
    """SuffixGPU and arctic-inference on the same corpus and contexts."""
    text = corpus_text(tokens, "alike")
    if suffix_gpu.is_there():
        ends = (text < 0).nonzero().squeeze(1).tolist()
        documents = [text[start:end] for start, end in zip([0, *(e + 1 for e in ends)], ends, strict=False) if end > start]
        peer = suffix_gpu.Peer(documents, PARAMS_K, MATCH_DEPTH, factor, 0.1)
        figures: list[object] = []
        captured = True
        for batch in BATCHES:
            call = peer.call(buffer[0], buffer[1], row_choices(buffer, batch))
            try:
                figures.append(graph_us(call) if captured else call_us(call))
            except RuntimeError:
                # It cannot be captured: its calls are timed instead.
                captured = False
                torch.cuda.synchronize()
                figures.append(call_us(call))
        yield [f"suffix-gpu, {tokens // 1_000_000}M{'' if captured else ', not captured'}", *figures]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.npz"
        work = workload.make(tokens, CONTEXTS)
        work.save(path)
        answer = peers.arctic("speculate", path, PARAMS_K, MATCH_DEPTH, factor, 0.1)
    if answer is not None:
        # One request after the other, on one CPU thread.
        yield [f"arctic-inference (CPU), {tokens // 1_000_000}M", *(answer["us_median"] * batch for batch in BATCHES)]


def main() -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--corpus", type=int, nargs="*", default=[4_000_000, 64_000_000], help="tokens of each corpus")
    arguments = options.parse_args()
    contexts = workload.make(1, CONTEXTS).contexts
    buffer = token_buffer(contexts, DEVICE_ROWS)
    rows: list[list[object]] = []
    notes = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; times in microseconds a step; k={PARAMS_K}, depth {MATCH_DEPTH}"]
    for size in arguments.corpus:
        for kind in ("alike", "varied"):
            index = device_index(size, kind)
            for factor in (1.0, 4.0):
                figures = [draft_us(index, buffer, b, factor) for b in BATCHES]
                rows.append([f"{size // 1_000_000}M tokens, {kind}, spec factor {factor:.0f}", *figures])
            for searches, levels in SEARCHES:
                measured = [calibrated_us(index, buffer, b, searches, levels) for b in BATCHES]
                name = f"{size // 1_000_000}M tokens, {kind}, calibrated, {searches} searches, {levels} levels"
                rows.append([name, *(us for us, _ in measured)])
                notes.append(f"{name}: {measured[-1][1]:.1f} tokens drafted a row of {BATCHES[-1]}")
            notes.append(f"{size // 1_000_000}M {kind}: {index.byte_size / size:.1f} bytes a token")
            if size <= 16_000_000 and kind == "alike":
                long = [np.resize(np.concatenate(contexts), 131_072 - 7 * i).astype(np.int32) for i in range(64)]
                figure = draft_us(index, token_buffer(long, 131_072), 64, 1.0)
                notes.append(f"contexts of 131,072 tokens, batch 64, spec factor 1: {figure:.1f} us")
            del index
            torch.cuda.empty_cache()
    latencies = " / ".join(f"{load_latency_ns(size << 20):.0f}" for size in (1, 16, 1024))
    notes.append(f"a load that waits for another, over 1 / 16 / 1,024 MiB: {latencies} ns")
    rows += peer_rows(arguments.corpus[0], buffer, 1.0)
    report("GPU drafter", ["corpus", *(f"batch {b}" for b in BATCHES)], rows, arguments.json, notes)


if __name__ == "__main__":
    main()
