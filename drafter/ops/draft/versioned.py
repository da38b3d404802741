"""Drafting from an index that another process refreshes: pin, read the version in force, draft, check that it was still whole.

One kernel, so that nothing comes between the steps. See draftd.drafter.epochs for the writer's side.
"""

from __future__ import annotations

from typing import Any

from draftd.drafter.layout import (
    CONTROL_EPOCH,
    DESC_LIVE_BUFFER,
    DESC_LIVE_LENGTH,
    DESC_MAIN_BUFFER,
    DESC_MAIN_LENGTH,
    DESC_RECENT_BUFFER,
    DESC_RECENT_LENGTH,
    DESC_RING_START,
    DESC_VERSION,
    DESCRIPTOR_WORDS,
    DESCRIPTORS,
    HEADER_BUCKET_SHIFT,
    HEADER_DESCRIPTORS,
    HEADER_DROPPED,
    HEADER_RECLAIMED,
    HEADER_VERSION,
    ROWS_PIN,
)
from draftd.drafter.ops.draft.cpu import draft_rows
from draftd.drafter.ops.intrinsics import observe, publish
from draftd.drafter.ops.kernel import kernel

TRIES = 3


@kernel
def begin(control: Any, pins: Any, header: Any) -> tuple[int, Any]:
    """Pins, and answers the version in force with a copy of its descriptor; -1 for its number if that was overwritten meanwhile."""
    publish(pins, ROWS_PIN, observe(control, CONTROL_EPOCH))
    number = observe(header, HEADER_VERSION)
    base = HEADER_DESCRIPTORS + (number % DESCRIPTORS) * DESCRIPTOR_WORDS
    words = header[base : base + DESCRIPTOR_WORDS].copy()
    if observe(header, base + DESC_VERSION) != number or words[DESC_VERSION] != number:
        number = -1
    return number, words


@kernel
def is_whole(header: Any, number: int) -> bool:
    """Nothing of the version has been overwritten yet."""
    return observe(header, HEADER_RECLAIMED) < number and observe(header, HEADER_VERSION) - number < DESCRIPTORS - 1


@kernel
def draft_versioned(
    control: Any, pins: Any, header: Any, text: Any, main: Any, buckets: Any, recent: Any, live_text: Any, live: Any, ring: int,
    addresses: Any, row_lengths: Any, use_corpus: Any, use_local: bool,
    k: int, max_depth: int, spec_factor: float, spec_offset: float, min_token_prob: float, longest_row: int,
    out_tokens: Any, out_probs: Any, out_counts: Any, out_source: Any, out_match: Any, out_occurrences: Any,
) -> int:  # fmt: skip
    """draft_rows on the version in force.

    Args:
        control: int64 control block; pins: int64 block whose word ROWS_PIN is this reader's.
        header: int64 header of the index; text, main, ...: its arrays, both copies.

    Returns:
        The version; 0 if the namespace is gone; -1 if every try read a version that was overwritten meanwhile.
    """
    version = -1
    for _ in range(TRIES):
        number, words = begin(control, pins, header)
        if header[HEADER_DROPPED] != 0:
            publish(pins, ROWS_PIN, 0)
            return 0
        if number >= 0:
            out_tokens[:] = -1
            out_probs[:] = 0
            out_counts[:] = 0
            out_source[:] = 0
            out_match[:] = 0
            out_occurrences[:] = 0
            draft_rows(
                addresses, row_lengths, use_corpus, use_local,
                text, main[words[DESC_MAIN_BUFFER]], words[DESC_MAIN_LENGTH], buckets[words[DESC_MAIN_BUFFER]],
                header[HEADER_BUCKET_SHIFT], recent[words[DESC_RECENT_BUFFER]], words[DESC_RECENT_LENGTH],
                live_text[words[DESC_LIVE_BUFFER]], live[words[DESC_LIVE_BUFFER]], words[DESC_LIVE_LENGTH],
                words[DESC_RING_START], ring,
                k, max_depth, spec_factor, spec_offset, min_token_prob, longest_row,
                out_tokens, out_probs, out_counts, out_source, out_match, out_occurrences,
            )  # fmt: skip
            if is_whole(header, number):
                version = number
        publish(pins, ROWS_PIN, 0)
        if version >= 0:
            break
    return version
