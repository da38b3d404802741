"""A small corpus for the tests of the rule `calibrated`: documents laid out in the index's arrays, and drafting from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.groups import NO_GROUPS, Groups
from draftd.drafter.ops.calibrated.cpu import draft_calibrated
from draftd.drafter.ops.calibrated.cpu_mixer import EVIDENCE_FLOATS, EVIDENCE_INTS
from draftd.drafter.ops.calibrated.oracle import Document
from draftd.drafter.ops.merge.cpu import fill_buckets
from draftd.drafter.ops.sort.cpu import sort_suffixes

DEPTH = 64


@dataclass(frozen=True)
class SmallIndex:
    """The arguments `text` to `depth` of draft_calibrated."""

    arguments: tuple[object, ...]


def lay_out(documents: Sequence[Document], recent_from: int, live_from: int, vocab: int, shift: int = 0) -> SmallIndex:
    """An index with documents [0, recent_from) in main, up to live_from in recent, and the rest in live."""
    ring_text, ring_starts = _text(documents[:live_from])
    live_text, live_starts = _text(documents[live_from:])
    cut = min(recent_from, live_from)
    main = _sorted(ring_text, ring_starts[:cut])
    recent = _sorted(ring_text, ring_starts[cut:])
    live = _sorted(live_text, live_starts)
    buckets = np.zeros((vocab >> shift) + 2, np.int32)
    fill_buckets(ring_text, main, shift, buckets)
    return SmallIndex(
        (ring_text, main, len(main), buckets, shift, recent, len(recent), live_text, live, len(live), 0, len(ring_text), DEPTH)
    )


def _text(documents: Sequence[Document]) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
    parts: list[int] = []
    starts = []
    for lead, tokens in documents:
        parts += [*lead, -1]
        starts.append(np.arange(len(parts), len(parts) + len(tokens), dtype=np.int32))
        parts += [*tokens, -1]
    return np.array([*parts, *([-1] * (DEPTH + 1))], np.int32), starts


def _sorted(text: NDArray[np.int32], starts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    positions = np.concatenate([np.empty(0, np.int32), *starts])
    return sort_suffixes(text, positions, DEPTH) if len(positions) else positions


@dataclass(frozen=True)
class KernelDrafts:
    """What draft_calibrated filled."""

    tokens: NDArray[np.int32]
    survival: NDArray[np.float32]
    parents: NDArray[np.int32]
    counts: NDArray[np.int32]
    source: NDArray[np.int32]
    match_length: NDArray[np.int32]
    occurrences: NDArray[np.int32]
    ints: NDArray[np.int32]
    floats: NDArray[np.float32]


def draft(
    index: SmallIndex,
    calibration: NDArray[np.float32],
    rows: Sequence[Sequence[int]],
    *,
    k: int,
    tau: float,
    branches: int = 1,
    use_local: bool = True,
    use_corpus: bool = True,
    groups: Sequence[Sequence[Sequence[int]]] = (),
) -> KernelDrafts:
    """Drafts of the kernel for rows; `groups`: for each row, what the others of its group have generated."""
    arrays = [np.array(row, np.int32) for row in rows]
    n = len(rows)
    held, texts = Groups(), NO_GROUPS
    if groups:
        for r, others in enumerate(groups):
            for i, output in enumerate([*others[: len(others) // 2], [7] * 3, *others[len(others) // 2 :]]):
                held.start(r if i == len(others) // 2 else (r, i), "n", str(r), np.array(output, np.int32))
        texts = held.texts(range(n))
    lengths = np.array([len(row) for row in rows], np.int64)
    out = KernelDrafts(
        np.full((n, k), -1, np.int32),
        np.zeros((n, k), np.float32),
        np.full((n, k), -1, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros((n, k + 1, EVIDENCE_INTS), np.int32),
        np.zeros((n, k + 1, EVIDENCE_FLOATS), np.float32),
    )
    draft_calibrated(
        np.array([a.ctypes.data for a in arrays], np.int64), lengths, np.full(n, use_corpus), use_local, *index.arguments,
        calibration, branches, tau, int(lengths.max(initial=0)), *texts,
        out.tokens, out.survival, out.parents, out.counts, out.source, out.match_length, out.occurrences, out.ints, out.floats,
    )  # fmt: skip
    return out
