"""Draft latency on a GPU by batch size, for corpora of 4M and 64M tokens and for long contexts, and refresh times.

Needs torch, triton and a CUDA GPU. Every figure is a median over graphs of 16 drafts, each for other rows, so launch gaps are in it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from bench import workload
from bench.machine import parser, report
from draftd.drafter.device import DeviceDrafter, DeviceDrafts, Launch
from draftd.drafter.device_index import DeviceIndex, DeviceShape, DeviceVersion
from draftd.drafter.ops.merge.gpu import fill_buckets, merge
from draftd.drafter.ops.sort.gpu import sort_text
from draftd.drafter.params import DraftParams

BATCHES = (1, 8, 32, 128, 256, 512)
DEPTH = 64
FRESH = 65_536
DRAFTS = 16


def device_index(tokens: int, recent: int = 131_072, live: int = 16_384) -> DeviceIndex:
    """An index of at least `tokens` tokens: copies of the sample answers, the later ones with a tenth of their tokens replaced."""
    documents = workload.make(1, 1).documents
    base = torch.from_numpy(np.concatenate([np.append(d, np.int32(-1)) for d in documents]).astype(np.int32)).cuda()
    copies = [base]
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range((tokens + recent + live) // base.shape[0]):
        replaced = (torch.rand(base.shape, generator=generator, device="cuda") < workload.REPLACED_SHARE) & (base >= 0)
        other = torch.randint(workload.VOCABULARY, base.shape, generator=generator, device="cuda", dtype=torch.int32)
        copies.append(torch.where(replaced, other, base))
    text = torch.cat(copies)
    cuts = [0]
    for size in (text.shape[0] - recent - live, text.shape[0] - live):
        # A segment ends where a document does.
        cuts.append(size + int((text[size:] < 0).nonzero()[0, 0]) + 1)
    cuts.append(text.shape[0])
    ring = cuts[2] + 2 * FRESH
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
        lengths.append(int(suffixes.shape[0]))
    index.publish(DeviceVersion(lengths=(lengths[0], lengths[1], lengths[2])))
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
    params = DraftParams(k=16, max_depth=24, spec_factor=factor)
    drafter = DeviceDrafter(index.arena, index.headers, max_batch=batch, max_row_tokens=tokens.shape[1], params=params, launch=launch)
    out = DeviceDrafts.empty(batch, params.k, "cuda")
    generator = torch.Generator("cuda").manual_seed(batch)
    rows = [torch.randperm(tokens.shape[0], generator=generator, device="cuda")[:batch].to(torch.int32) for _ in range(DRAFTS)]
    return graph_us(lambda i: drafter.propose(tokens, lengths, rows[i], namespaces, out))


def event_ms(call: Callable[[], object], repeats: int = 7) -> float:
    """Milliseconds between events around a call, the median."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times[2:]))


def merge_ms(index: DeviceIndex, fresh: int = FRESH) -> tuple[float, float]:
    """Milliseconds to sort `fresh` new tokens, and to merge them into `main`, buckets included."""
    ring, length = index.shape.quota_tokens, index.current.lengths[0]
    start = ring - 2 * fresh
    generator = torch.Generator("cuda").manual_seed(1)
    source = torch.randint(0, start - fresh, (1,), generator=generator, device="cuda")
    index.text[start : start + fresh] = index.text[int(source) : int(source) + fresh]
    index.text[start + fresh] = -1
    sort = event_ms(lambda: sort_text(index.text[start:], fresh, DEPTH))
    new = sort_text(index.text[start:], fresh, DEPTH) + start
    main, out = index.main[0, :length], index.main[1]

    def run() -> None:
        merge(index.text, main, new, out, depth=DEPTH, buckets=index.buckets[0, 0], shift=index.shape.shift)
        fill_buckets(index.text, out[: length + new.shape[0]], index.shape.shift, index.buckets[0, 1])

    return sort, event_ms(run)


def main() -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--corpus", type=int, nargs="*", default=[4_000_000, 64_000_000], help="tokens of each corpus")
    arguments = options.parse_args()
    contexts = workload.make(1, 512).contexts
    buffer = token_buffer(contexts, 4096)
    rows: list[list[object]] = []
    notes = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; times in microseconds a step; k=16, depth 24"]
    for size in arguments.corpus:
        index = device_index(size)
        for factor in (1.0, 4.0):
            figures = [draft_us(index, buffer, b, factor) for b in BATCHES]
            rows.append([f"{size // 1_000_000}M tokens, spec factor {factor:.0f}", *figures])
        sort, merged = merge_ms(index)
        notes.append(
            f"{size // 1_000_000}M: {index.byte_size / size:.1f} bytes a token; 64k new tokens: sort {sort:.2f} ms, merge {merged:.2f} ms"
        )
        if size <= 16_000_000:
            length = index.shape.quota_tokens - 2 * FRESH
            notes.append(f"bulk build of {length:,} tokens: {event_ms(lambda i=index, n=length: sort_text(i.text, n, DEPTH), 3):.2f} ms")  # type: ignore[misc]
            long = [np.resize(np.concatenate(contexts), 131_072 - 7 * i).astype(np.int32) for i in range(64)]
            notes.append(f"contexts of 131,072 tokens, batch 64: {draft_us(index, token_buffer(long, 131_072), 64, 4.0):.1f} us")
            live = index.live_text[0].clone()
            live[4096:] = -1
            notes.append(f"live, 4k tokens: {event_ms(lambda t=live: sort_text(t, 4096, DEPTH)):.2f} ms")  # type: ignore[misc]
        del index
        torch.cuda.empty_cache()
    report("GPU drafter", ["corpus", *(f"batch {b}" for b in BATCHES)], rows, arguments.json, notes)


if __name__ == "__main__":
    main()
