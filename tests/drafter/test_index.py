"""The index's arrays: versions, reclamation, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftd.drafter import layout
from draftd.drafter.epochs import Epochs
from draftd.drafter.index import MAIN, Index, Version, bucket_shift
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import MappedIndex, TornRead
from tests.drafter.bench import Bench, addresses, ints


@pytest.fixture
def index(tmp_path: Path) -> Index:
    epochs = Epochs(np.zeros(layout.CONTROL_WORDS, np.int64))
    return Index(str(tmp_path / "index"), vocab_size=100, quota_tokens=4096, recent_tokens=1024, live_tokens=512, depth=16, epochs=epochs)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(vocab=64)
    yield made
    made.close()


def test_header_says_what_the_index_is(index: Index) -> None:
    assert index.header[layout.HEADER_VOCAB] == 100
    assert index.header[layout.HEADER_DEPTH] == 16
    assert index.header[layout.HEADER_BUCKET_SHIFT] == index.shift
    assert index.header[layout.HEADER_DROPPED] == 0
    assert index.header[layout.HEADER_VERSION] == index.current.number == 1


def test_published_version_is_in_its_descriptor(index: Index) -> None:
    for length in range(1, 10):
        published = index.publish(Version(copies=(length % 2, 0, 0), lengths=(length, 0, 0), ring_start=3 * length))
        assert published == index.current
        number = int(index.header[layout.HEADER_VERSION])
        assert number == published.number == length + 1
        base = layout.HEADER_DESCRIPTORS + number % layout.DESCRIPTORS * layout.DESCRIPTOR_WORDS
        words = index.header[base : base + layout.DESCRIPTOR_WORDS]
        assert words[layout.DESC_VERSION] == number
        assert words[layout.DESC_MAIN_LENGTH] == length
        assert words[layout.DESC_MAIN_BUFFER] == length % 2
        assert words[layout.DESC_RING_START] == 3 * length


def test_text_of_a_whole_evicted_ring_is_reclaimed_though_its_start_stays(index: Index) -> None:
    before = index.current.number
    index.publish(replace(index.current, evicted=index.ring))
    index.reclaim("text", 0)
    assert not index.is_whole(before)


def test_reclaiming_a_copy_ends_the_versions_that_had_it(index: Index) -> None:
    first = index.current.number
    index.reclaim("main", 1)
    assert index.is_whole(first), "a copy that no version had ends none"
    second = index.publish(replace(index.current, copies=(1, 0, 0))).number
    assert index.is_whole(first)
    index.reclaim("main", 0)
    assert not index.is_whole(first)
    assert index.is_whole(second)


def test_moving_the_rings_start_retires_the_text_before_it(index: Index) -> None:
    first = index.current.number
    index.publish(replace(index.current, ring_start=10, evicted=10))
    index.reclaim("text", 0)
    assert not index.is_whole(first)
    assert index.is_whole(first + 1)


def test_reclaimed_version_never_falls(index: Index) -> None:
    index.publish(replace(index.current, copies=(1, 1, 0)))
    index.publish(replace(index.current, copies=(1, 1, 1)))
    index.reclaim("live", 0)
    reclaimed = int(index.header[layout.HEADER_RECLAIMED])
    index.reclaim("recent", 0)
    assert index.header[layout.HEADER_RECLAIMED] == reclaimed


def test_version_whose_descriptor_may_be_overwritten_is_not_whole(index: Index) -> None:
    number = index.current.number
    for _ in range(layout.DESCRIPTORS - 2):
        index.publish(index.current)
        assert index.is_whole(number)
    index.publish(index.current)
    assert not index.is_whole(number)


def test_memory_is_taken_as_it_is_reserved(index: Index) -> None:
    empty = index.resident_bytes()
    assert empty < index.spec.byte_size
    index.reserve("main", 1, 100)
    index.main[1, :100] = 7
    assert empty < index.resident_bytes() <= index.spec.byte_size + 4096
    index.reserve("main", 1, index.main.shape[1])
    index.main[1] = 7
    once = index.resident_bytes()
    index.reserve("main", 1, index.main.shape[1])
    assert index.resident_bytes() == once
    for name, elements in (("text", len(index.text)), ("live_text", index.live_text.shape[1]), ("buckets", index.bucket_count + 1)):
        index.reserve(name, 0, elements)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 32_000, 128_256, 2**21 - 1])
@pytest.mark.parametrize("quota", [512, 65_536, 4_194_304, 2**31 - 66])
def test_buckets_cover_the_vocabulary_and_stay_small(vocab: int, quota: int) -> None:
    shift = bucket_shift(vocab, quota)
    assert (vocab >> shift) + 1 <= max(64, quota // 8)
    assert shift == 0 or (vocab >> (shift - 1)) + 1 > max(64, quota // 8), "no coarser than need be"


def test_last_token_of_the_vocabulary_has_a_bucket() -> None:
    """A row that starts with the largest token looks it up in the table."""
    for vocab in (1, 2, 64, 65, 1000, 2**21 - 1):
        bench = Bench(vocab=vocab, depth=4, quota=64, recent=16, live=8)
        for i in range(4):
            bench.ingest(str(i), [vocab - 1, 0, vocab - 1], True)
            bench.settle()
        assert bench.index.current.lengths[MAIN]
        assert (vocab - 1) >> bench.index.shift < bench.index.bucket_count
        bench.check()
        bench.assert_drafts([[vocab - 1], [vocab - 1, 0], [0, vocab - 1]], DraftParams(max_depth=4, policy="tree"))
        bench.close()


def test_overwritten_version_is_not_drafted_from(bench: Bench) -> None:
    bench.ingest("d", [1, 2, 3, 4], True)
    bench.refresh()
    rows = addresses([ints([1, 2])])
    params = DraftParams(max_depth=8, policy="tree")
    assert bench.mapped.draft(bench.epochs.control, bench.pins, *rows, params).version[0] == bench.index.current.number
    bench.index.header[layout.HEADER_RECLAIMED] = bench.index.current.number
    with pytest.raises(TornRead):
        bench.mapped.draft(bench.epochs.control, bench.pins, *rows, params)
    assert bench.pins[layout.ROWS_PIN] == 0, "the writer must not wait for a reader that has given up"


def test_descriptor_that_is_being_written_is_not_used(bench: Bench) -> None:
    bench.ingest("d", [1, 2, 3, 4], True)
    bench.refresh()
    base = layout.HEADER_DESCRIPTORS + bench.index.current.number % layout.DESCRIPTORS * layout.DESCRIPTOR_WORDS
    bench.index.header[base + layout.DESC_VERSION] += layout.DESCRIPTORS
    with pytest.raises(TornRead):
        bench.draft([[1, 2]], DraftParams(max_depth=8, policy="tree"))


def test_dropped_namespace_gives_local_drafts(bench: Bench) -> None:
    bench.ingest("d", [1, 2, 3, 4], True)
    bench.refresh()
    bench.index.close()
    drafts = bench.draft([[1, 2], [5, 6, 5]], DraftParams(max_depth=8, policy="tree"))
    assert drafts.version.tolist() == [0, 0]
    assert drafts.source.tolist() == [0, 1]
    assert bench.pins[layout.ROWS_PIN] == 0


def test_readers_map_read_only(bench: Bench) -> None:
    mapped = MappedIndex(bench.index.spec)
    with pytest.raises(ValueError, match="read-only"):
        mapped.header[0] = 1
    for array in mapped.arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1


def test_version_defaults_are_an_empty_index() -> None:
    version = Version()
    assert (version.lengths, version.ring_start) == ((0, 0, 0), 0)
