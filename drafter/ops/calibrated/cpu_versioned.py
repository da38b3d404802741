"""The rule `calibrated` on an index that another process refreshes, by the version and with the calibration in force."""

from __future__ import annotations

from typing import Any

from draftd.drafter.layout import (
    DESC_LIVE_BUFFER,
    DESC_LIVE_LENGTH,
    DESC_MAIN_BUFFER,
    DESC_MAIN_LENGTH,
    DESC_RECENT_BUFFER,
    DESC_RECENT_LENGTH,
    DESC_RING_START,
    HEADER_BUCKET_SHIFT,
    HEADER_CALIBRATION,
    HEADER_DEPTH,
    HEADER_DROPPED,
    ROWS_PIN,
)
from draftd.drafter.ops.calibrated.cpu import draft_calibrated
from draftd.drafter.ops.draft.versioned import TRIES, begin, is_whole
from draftd.drafter.ops.intrinsics import observe, publish
from draftd.drafter.ops.kernel import kernel


@kernel
def draft_calibrated_versioned(
    control: Any, pins: Any, header: Any, text: Any, main: Any, buckets: Any, recent: Any, live_text: Any, live: Any, ring: int,
    calibration: Any, addresses: Any, row_lengths: Any, use_corpus: Any, use_local: bool, branches: int, tau: float, longest_row: int,
    members: Any, places: Any,
    out_tokens: Any, out_survival: Any, out_parents: Any, out_counts: Any, out_source: Any, out_match: Any, out_occurrences: Any,
    out_ints: Any, out_floats: Any,
) -> int:  # fmt: skip
    """draft_calibrated on the version in force.

    Args:
        control: int64 control block; pins: int64 block whose word ROWS_PIN is this reader's.
        header: int64 header of the index; text, main, ...: its arrays, both copies; calibration: float32 [2, CALIBRATION_WORDS].

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
            out_survival[:] = 0
            out_parents[:] = -1
            out_counts[:] = 0
            out_source[:] = 0
            out_match[:] = 0
            out_occurrences[:] = 0
            draft_calibrated(
                addresses, row_lengths, use_corpus, use_local,
                text, main[words[DESC_MAIN_BUFFER]], words[DESC_MAIN_LENGTH], buckets[words[DESC_MAIN_BUFFER]],
                header[HEADER_BUCKET_SHIFT], recent[words[DESC_RECENT_BUFFER]], words[DESC_RECENT_LENGTH],
                live_text[words[DESC_LIVE_BUFFER]], live[words[DESC_LIVE_BUFFER]], words[DESC_LIVE_LENGTH],
                words[DESC_RING_START], ring, header[HEADER_DEPTH],
                calibration[observe(header, HEADER_CALIBRATION) & 1], branches, tau, longest_row, members, places,
                out_tokens, out_survival, out_parents, out_counts, out_source, out_match, out_occurrences, out_ints, out_floats,
            )  # fmt: skip
            if is_whole(header, number):
                version = number
        publish(pins, ROWS_PIN, 0)
        if version >= 0:
            break
    return version
