"""A version of a mapped index, copied to the host, and the CPU kernels' drafts from it: what a GPU draft of that version must be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.drafter import device_layout as dl
from draftd.drafter.drafts import Drafts
from draftd.drafter.ops.draft.cpu import draft_rows
from draftd.drafter.params import DraftParams

DEPTH = 64
"""Guard tokens behind a text: what services sort to by default."""


class DeviceImage(NamedTuple):
    """A version on the host: text and suffixes by segment, the first-token table of `main`."""

    number: int
    ring_start: int
    ring: int
    shift: int
    text: NDArray[np.int32]
    live_text: NDArray[np.int32]
    buckets: NDArray[np.int32]
    suffixes: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


def copy_version(words: torch.Tensor, headers: torch.Tensor, header: int, number: int) -> DeviceImage | None:
    """Copies a version of the index with this header; None if it is not the one in force, or was overwritten meanwhile.

    Args:
        words, headers: As DeviceDrafter's arena and headers.
    """
    about = headers[header].cpu().numpy()
    start = dl.DEVICE_DESCRIPTORS_START + (number % dl.DEVICE_DESCRIPTORS) * dl.DEVICE_DESCRIPTOR_WORDS
    words_of = about[start : start + dl.DEVICE_DESCRIPTOR_WORDS].tolist()
    if about[dl.DEVICE_VERSION] != number or words_of[dl.DD_VERSION] != number:
        return None
    ring, rule = words_of[dl.DD_RING], words_of[dl.DD_BUCKET_RULE]

    def host(offset: int, length: int) -> NDArray[np.int32]:
        copied: NDArray[np.int32] = words[offset : offset + length].cpu().numpy()
        return copied

    records = [words_of[dl.DD_SEGMENTS + s * dl.DD_SEGMENT_WORDS :][: dl.DD_SEGMENT_WORDS] for s in range(dl.SEGMENTS)]
    suffixes = [host(record[dl.DS_SUFFIXES], record[dl.DS_LENGTH]) for record in records]
    live_length = int(suffixes[2].max(initial=0)) + DEPTH + 1
    image = DeviceImage(
        number, words_of[dl.DD_RING_START], ring, rule & ((1 << dl.BUCKET_SHIFT_BITS) - 1),
        host(records[0][dl.DS_TEXT], ring + DEPTH + 1), host(records[2][dl.DS_TEXT], live_length),
        host(records[0][dl.DS_BUCKETS], (rule >> dl.BUCKET_SHIFT_BITS) + 1), (suffixes[0], suffixes[1], suffixes[2]),
    )  # fmt: skip
    after = headers[header].cpu().numpy()
    whole = after[dl.DEVICE_RECLAIMED] < number and 0 <= after[dl.DEVICE_VERSION] - number < dl.DEVICE_DESCRIPTORS - 1
    return image if whole else None


def drafts_of(image: DeviceImage, rows: list[NDArray[np.int32]], params: DraftParams) -> Drafts:
    """The CPU kernels' drafts for rows, each int32 [n] and C-contiguous."""
    drafts = Drafts.empty(len(rows), params.k)
    main, recent, live = image.suffixes
    lengths = np.array([len(row) for row in rows], np.int64)
    draft_rows(
        np.array([row.ctypes.data for row in rows], np.int64), lengths, np.full(len(rows), params.use_corpus), params.use_local,
        image.text, main, len(main), image.buckets, image.shift, recent, len(recent), image.live_text, live, len(live),
        image.ring_start, image.ring,
        params.k, params.max_depth, params.spec_factor, params.spec_offset, params.min_token_prob, int(lengths.max(initial=0)),
        drafts.tokens, drafts.probabilities, drafts.counts, drafts.source, drafts.match_length, drafts.occurrences,
    )  # fmt: skip
    return drafts


def compile_drafts(params: DraftParams) -> None:
    """Compiles what drafts_of runs, which takes half a minute the first time on a machine."""
    text, none = np.full(DEPTH + 2, -1, np.int32), np.empty(0, np.int32)
    drafts_of(DeviceImage(1, 0, 1, 0, text, text, np.zeros(2, np.int32), (none, none, none)), [np.zeros(2, np.int32)], params)


def differing(drafts: Drafts, expected: Drafts, rows: NDArray[np.bool_]) -> int:
    """How many of the chosen rows differ in anything but the version."""
    same = (drafts.tokens == expected.tokens).all(1) & (drafts.probabilities == expected.probabilities).all(1)
    for name in ("counts", "source", "match_length", "occurrences"):
        same &= getattr(drafts, name) == getattr(expected, name)
    return int((rows & ~same).sum())
