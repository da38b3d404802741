"""Where arrays lie in blocks."""

from __future__ import annotations

import pytest

from draftd.drafter import layout
from draftd.drafter.layout import BlockSpec, control_block_spec, index_block_spec, row_block_spec
from draftd.drafter.policy import CALIBRATION_WORDS
from draftd.drafter.stats import STATS_WORDS

SPECS = [
    control_block_spec("control"),
    index_block_spec("index", quota_tokens=1001, recent_tokens=77, live_tokens=33, depth=9, buckets=65),
    index_block_spec("index", quota_tokens=2**31 - 66, recent_tokens=2**30, live_tokens=2**30, depth=64, buckets=2**21 - 1),
    row_block_spec("rows", 3, 1001),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.handle}-{s.byte_size}")
def test_arrays_are_aligned_lie_apart_and_in_their_block(spec: BlockSpec) -> None:
    end = 0
    for array in spec.arrays:
        assert array.offset % 64 == 0
        assert array.offset >= end
        end = array.offset + array.byte_size
    assert end <= spec.byte_size
    assert spec.layout_version == layout.LAYOUT_VERSION


def test_what_changes_is_there_twice_and_text_has_its_guard() -> None:
    shapes = {a.name: a.shape for a in SPECS[1].arrays}
    assert shapes == {
        "header": (layout.HEADER_WORDS,),
        "text": (1001 + 9 + 1,),
        "main": (2, 1001),
        "buckets": (2, 66),
        "recent": (2, 77),
        "live_text": (2, 33 + 9 + 1),
        "live": (2, 33),
        "calibration": (2, CALIBRATION_WORDS),
    }


def test_row_block_has_two_slots_a_row() -> None:
    shapes = {a.name: a.shape for a in SPECS[3].arrays}
    assert shapes == {
        "header": (layout.ROWS_HEADER_WORDS,),
        "slots": (6, layout.SLOT_WORDS),
        "document_ids": (6, layout.MAX_DOCUMENT_ID_BYTES),
        "stats": (STATS_WORDS,),
        "learning": (layout.LEARNING_NAMESPACES, layout.LEARNING_WORDS),
        "tokens": (6, 1001),
        "learned": (layout.LEARNING_NAMESPACES, 2, CALIBRATION_WORDS),
    }


def test_words_do_not_collide() -> None:
    for prefix, size in (("CONTROL_", "CONTROL_WORDS"), ("DESC_", "DESCRIPTOR_WORDS"), ("SLOT_", "SLOT_WORDS")):
        words = [value for name, value in vars(layout).items() if name.startswith(prefix) and name != size]
        assert len(set(words)) == len(words)
        assert max(words) < getattr(layout, size)
    header = [v for n, v in vars(layout).items() if n.startswith("HEADER_") and n not in ("HEADER_WORDS", "HEADER_DESCRIPTORS")]
    assert len(set(header)) == len(header)
    assert max(header) < layout.HEADER_DESCRIPTORS
    assert layout.HEADER_DESCRIPTORS + layout.DESCRIPTORS * layout.DESCRIPTOR_WORDS <= layout.HEADER_WORDS


def test_what_different_sides_write_is_on_different_cache_lines() -> None:
    assert abs(layout.CONTROL_EPOCH - layout.CONTROL_HEARTBEAT_NS) >= 8
    assert abs(layout.HEADER_VERSION - layout.HEADER_RECLAIMED) >= 8
    assert abs(layout.ROWS_PIN - layout.ROWS_HEARTBEAT_NS) >= 8
    assert layout.SLOT_WORDS % 8 == 0
