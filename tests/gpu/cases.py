"""Random and adversarial indexes for the GPU drafter: three segments over a ring, documents in overlapping pieces, and what to expect.

Expected drafts come from the oracle, or for larger cases from the CPU kernels over the same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.drafter.device import DeviceDrafter, DeviceDrafts
from draftd.drafter.device_index import DeviceIndex, DeviceShape
from draftd.drafter.device_matching import Launch
from draftd.drafter.drafts import Drafts
from draftd.drafter.index import Version
from draftd.drafter.ops.draft import oracle
from draftd.drafter.ops.draft.cpu import draft_rows
from draftd.drafter.ops.draft.oracle import Stretch
from draftd.drafter.ops.merge.cpu import fill_buckets
from draftd.drafter.ops.sort.cpu import sort_suffixes
from draftd.drafter.params import DraftParams

Ints = NDArray[np.int32]


@dataclass
class Case:
    """An index on the host, and the same as stretches, oldest first."""

    shape: DeviceShape
    ring_start: int
    text: Ints
    live_text: Ints
    suffixes: tuple[Ints, Ints, Ints]
    stretches: list[Stretch]

    def buckets(self, segment: int) -> Ints:
        """The first-token table of a segment."""
        out = np.zeros(self.shape.buckets + 1, np.int32)
        fill_buckets(self.live_text if segment == 2 else self.text, self.suffixes[segment], self.shape.shift, out)
        return out

    def on_device(self, device: str) -> DeviceIndex:
        """The index in device memory, in the second copies, published."""
        index = DeviceIndex(self.shape, device)
        index.text.copy_(torch.from_numpy(self.text))
        index.live_text[1].copy_(torch.from_numpy(self.live_text))
        for segment, array in enumerate((index.main, index.recent, index.live)):
            suffixes = self.suffixes[segment]
            array[1, : len(suffixes)].copy_(torch.from_numpy(suffixes))
            index.buckets[segment, 1].copy_(torch.from_numpy(self.buckets(segment)))
            index.sign(segment, 1, array[1, : len(suffixes)])
        a, b, c = (len(s) for s in self.suffixes)
        index.publish(Version(copies=(1, 1, 1), lengths=(a, b, c), ring_start=self.ring_start))
        return index

    def by_cpu(self, rows: list[Ints], private: list[bool], params: DraftParams) -> Drafts:
        """The drafts of the CPU kernels."""
        n = len(rows)
        out = Drafts.empty(n, params.k)
        main, recent, live = (s if len(s) else np.zeros(1, np.int32) for s in self.suffixes)
        draft_rows(
            np.array([r.ctypes.data for r in rows], np.int64), np.array([len(r) for r in rows], np.int64),
            ~np.array(private) & params.use_corpus, params.use_local,
            self.text, main, len(self.suffixes[0]), self.buckets(0), self.shape.shift, recent, len(self.suffixes[1]),
            self.live_text, live, len(self.suffixes[2]), self.ring_start, self.shape.quota_tokens,
            params.k, params.max_depth, params.spec_factor, params.spec_offset, params.min_token_prob, max(map(len, rows)),
            out.tokens, out.probabilities, out.counts, out.source, out.match_length, out.occurrences,
        )  # fmt: skip
        return out

    def by_oracle(self, rows: list[Ints], private: list[bool], params: DraftParams) -> Drafts:
        """The drafts of the oracle."""
        out = Drafts.empty(len(rows), params.k)
        for i, row in enumerate(rows):
            draft = oracle.propose(row.tolist(), [] if private[i] else self.stretches, params)
            size = len(draft.chain.tokens)
            out.tokens[i, :size] = draft.chain.tokens
            out.probabilities[i, :size] = draft.chain.probabilities
            out.counts[i], out.source[i] = size, draft.source if size else 0
            out.match_length[i], out.occurrences[i] = draft.match_length, draft.occurrences
        return out


def make_case(documents: list[list[int]], *, vocab: int, depth: int, cuts: tuple[int, int], seed: int, piece: int = 0) -> Case:
    """An index of documents, oldest first.

    Args:
        cuts: Pieces before the first number go to main, before the second to recent, the others to live.
        piece: Tokens of a piece that are indexed, 0 for whole documents; a piece holds `depth` more of its document.
    """
    rng = np.random.default_rng(seed)
    stretches = []
    for document in documents:
        step = piece or max(1, len(document))
        for at in range(0, len(document), step):
            last = at + step >= len(document)
            stretches.append(Stretch(document[at : len(document) if last else at + step + depth], min(step, len(document) - at)))
    ring = sum(len(s.tokens) + 1 for s in stretches[: cuts[1]]) + max((len(s.tokens) + 1 for s in stretches), default=0) + 8
    live = sum(len(s.tokens) + 1 for s in stretches[cuts[1] :]) + 8
    shape = DeviceShape(ring, max(1, ring), live, vocab, depth)
    text = np.full(ring + depth + 1, -1, np.int32)
    live_text = np.full(live + depth + 1, -1, np.int32)
    ring_start = int(rng.integers(0, ring))
    head, live_head = ring_start, 0
    positions: list[list[Ints]] = [[], [], []]
    for i, (tokens, indexed) in enumerate(stretches):
        segment = 0 if i < cuts[0] else (1 if i < cuts[1] else 2)
        if segment == 2:
            live_text[live_head : live_head + len(tokens)] = tokens
            positions[2].append(np.arange(live_head, live_head + indexed, dtype=np.int32))
            live_head += len(tokens) + 1
            continue
        if head + len(tokens) + 1 > ring:
            head = 0
        text[head : head + len(tokens)] = tokens
        positions[segment].append(np.arange(head, head + indexed, dtype=np.int32))
        head += len(tokens) + 1
    suffixes = []
    for segment, parts in enumerate(positions):
        joined = np.concatenate(parts) if parts else np.empty(0, np.int32)
        suffixes.append(sort_suffixes(live_text if segment == 2 else text, joined, depth))
    return Case(shape, ring_start, text, live_text, (suffixes[0], suffixes[1], suffixes[2]), stretches)


def crowded_case(total: int, kind: str, seed: int) -> tuple[Case, list[Ints]]:
    """An index where the tokens 1, 2 occur `total` times in its three segments, and rows that end with them.

    Args:
        kind: What follows them: "same" everywhere, "halves" and "thirds" as often, "distinct" tokens, or a few "frequent" ones.
    """
    rng = np.random.default_rng(seed)
    parts = {"same": 1, "halves": 2, "thirds": 3}
    documents = []
    for i in range(total):
        frequent = 10 + int(min(30, rng.zipf(1.4)))
        first = 10 + i % parts[kind] if kind in parts else (100 + i if kind == "distinct" else frequent)
        document = [3 + int(rng.integers(0, 2)), 1, 2, first]
        while len(document) < 14:
            document.append((document[-1] * 7 + len(document)) % 40 if rng.random() < 0.93 else int(rng.integers(0, 3000)))
        documents.append(document)
    order = rng.permutation(total)
    cuts = sorted(rng.integers(0, total + 1, 2).tolist())
    case = make_case([documents[i] for i in order], vocab=60_000, depth=64, cuts=(cuts[0], cuts[1]), seed=seed)
    return case, [np.array(r, np.int32) for r in ([1, 2], [9, 1, 2], [9, 3, 1, 2], [4, 1, 2], [1, 2, 10], [8, 2])]


def propose(
    index: DeviceIndex, rows: list[Ints], private: list[bool], params: DraftParams, launch: Launch | None = None, repeat: int = 1
) -> Drafts:
    """Drafts of the GPU kernels, from a buffer whose rows lie in another order and hold noise behind their lengths.

    Args:
        repeat: How often to draft; the workspace must be clean again after each.
    """
    device = index.arena.device
    n, width = len(rows), max(map(len, rows)) + 3
    buffer = np.random.default_rng(n).integers(0, 5, (n + 1, width)).astype(np.int32)
    lengths = np.zeros(n + 1, np.int64)
    namespaces = np.full(n + 1, -1, np.int32)
    where = np.arange(n, 0, -1, dtype=np.int32)
    for row, slot, alone in zip(rows, where, private, strict=True):
        buffer[slot, : len(row)] = row
        lengths[slot] = len(row)
        namespaces[slot] = -1 if alone else 0
    drafter = DeviceDrafter(index.arena, index.headers, max_batch=n, max_row_tokens=width, params=params, launch=launch)
    tokens, sizes, order, spaces = (torch.from_numpy(a).to(device) for a in (buffer, lengths, where, namespaces))
    out = DeviceDrafts.empty(n, params.k, device)
    for _ in range(repeat):
        out.tokens.fill_(-7)
        drafter.propose(tokens, sizes, order, spaces, out)
    return out.numpy()


def check_equal(got: Drafts, expected: Drafts, rows: list[Ints]) -> None:
    """Every output is the same, floats bit for bit.

    Raises:
        AssertionError: One is not; names the row.
    """
    for i, row in enumerate(rows):
        a = (got.source[i], got.match_length[i], got.occurrences[i], got.counts[i], got.tokens[i].tolist())
        b = (expected.source[i], expected.match_length[i], expected.occurrences[i], expected.counts[i], expected.tokens[i].tolist())
        assert a == b, f"row {i}, {len(row)} tokens ending in {row[-12:].tolist()}: {a} instead of {b}"
        same = got.probabilities[i].view(np.int32) == expected.probabilities[i].view(np.int32)
        assert same.all(), f"row {i}: {got.probabilities[i]} instead of {expected.probabilities[i]}"


def check_hostile_buffer(device: str) -> None:
    """What a buffer holds is not trusted: rows, lengths, namespaces and tokens that cannot be are answered, and harm no other row.

    Raises:
        AssertionError: One is answered wrongly.
    """
    case = make_case([[1, 2, 3, 4, 5] * 4, [3, 4, 0, 3, 4, 0]], vocab=6, depth=8, cuts=(1, 2), seed=0)
    index = case.on_device(device)
    good, width = [0, 1, 2, 3], 12
    buffer = np.zeros((5, width), np.int32)
    buffer[:, :4] = good
    buffer[1] = [*good * 2, 1, 2, 3, 4]
    buffer[2, 2:4] = [2**31 - 1, -(2**31)]
    buffer[3, 1:4] = [6, -1, 3]
    lengths = np.array([4, 2**40, 4, 4, -5], np.int64)
    namespaces = np.array([0, 0, 0, 0, 0], np.int32)
    rows = np.array([0, 1, 2, 3, 4, -1, 5, 2**31 - 1, 0], np.int64)
    params = DraftParams(k=4, max_depth=8, spec_factor=2, policy="tree")
    drafter = DeviceDrafter(index.arena, index.headers, max_batch=len(rows), max_row_tokens=width, params=params)
    tokens, sizes, order, spaces = (torch.from_numpy(a).to(device) for a in (buffer, lengths, rows, namespaces))
    out = DeviceDrafts.empty(len(rows), params.k, device)
    drafter.propose(tokens, sizes, order, spaces, out)
    got = out.numpy()
    texts = [buffer[0, :4], buffer[1], buffer[2, :4], buffer[3, :4]]
    check_equal(got.first(4), case.by_cpu([np.ascontiguousarray(t) for t in texts], [False] * 4, params), texts)
    assert got.counts[4:8].tolist() == [0, 0, 0, 0]
    assert got.tokens[8].tolist() == got.tokens[0].tolist() != [-1] * 4
    for wrong in (1, 2**31 - 1, -7):
        spaces.fill_(wrong)
        drafter.propose(tokens, sizes, order, spaces, out)
        assert 2 not in out.numpy().source
