"""What the store is made of: the backlog, whatever fails meanwhile, and the bytes and checksum of a row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftd.drafter.documents import Document
from draftd.drafter.keeper import KeptNamespace
from draftd.server.store.backlog import Backlog
from draftd.server.store.codec import Codec, checksum
from tests.server.test_store import ints


def _document(number: int, length: int = 1) -> Document:
    return Document(str(number), "", 0, length=length, committed=True, committed_us=number)


def test_evicted_before_it_was_written_is_never_written() -> None:
    backlog = Backlog()
    one, other = _document(1), _document(2)
    backlog.committed(0, one)
    backlog.committed(0, other)
    backlog.evicted(0, one)
    batch = backlog.take(10, 10)
    assert (list(batch.documents), batch.evicted, backlog.never_written) == ([2], [], 1)
    backlog.evicted(0, other)
    backlog.put_back()
    batch = backlog.take(10, 10)
    assert (list(batch.documents), batch.evicted, backlog.never_written) == ([], [], 2)
    backlog.evicted(0, _document(3))
    assert backlog.take(10, 10).evicted == [3]


def test_batches_are_bounded_in_documents_and_tokens() -> None:
    backlog = Backlog()
    for number in range(1, 8):
        backlog.committed(0, _document(number, length=100 if number == 4 else 1))
    sizes = []
    while batch := backlog.take(2, 50):
        sizes.append(list(batch.documents))
        assert batch.told == max(batch.documents)
        backlog.written()
    assert sizes == [[1, 2], [3], [4], [5, 6], [7]]
    assert not backlog


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["take", "fail"])), max_size=60), st.integers(1, 3))
def test_whatever_fails_all_is_written_in_the_end_and_nothing_that_was_evicted(steps: list[Any], most: int) -> None:
    backlog, there, table = Backlog(), dict[int, Document](), set[int]()
    number = 0
    for step in steps:
        if step == "take":
            _write(table, backlog, most)
        elif step == "fail":
            backlog.take(most, 100)
            _tell(backlog, there, number := number + 1)
            backlog.put_back()
        elif step <= 3 and there:
            backlog.evicted(0, there.pop(next(iter(there))))
        else:
            _tell(backlog, there, number := number + 1)
    told = backlog.told
    for _ in range(number + 2):
        reached = _write(table, backlog, most)
    assert table == set(there)
    assert reached == told
    assert not backlog


def _tell(backlog: Backlog, there: dict[int, Document], number: int) -> None:
    there[number] = _document(number)
    backlog.committed(0, there[number])


def _write(table: set[int], backlog: Backlog, most: int) -> int:
    batch = backlog.take(most, 100)
    table |= set(batch.documents)
    table -= set(batch.evicted)
    backlog.written()
    return batch.told


def test_newest_state_of_a_namespace_is_written() -> None:
    backlog = Backlog()
    states = [KeptNamespace(1, "n", 10, "", generation, 0) for generation in range(3)]
    backlog.namespace_changed(states[0])
    backlog.take(1, 1)
    backlog.namespace_changed(states[1])
    backlog.put_back()
    assert backlog.take(1, 1).namespaces == {1: states[1]}
    backlog.namespace_dropped(1)
    backlog.put_back()
    assert backlog.take(1, 1).namespaces == {1: None}
    assert backlog.names == {}


# -- rows --------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**21 - 2), min_size=1, max_size=300))
def test_tokens_come_back_from_their_bytes(tokens: list[int]) -> None:
    codec = Codec()
    data = codec.pack(ints(tokens))
    assert codec.unpack(data, len(tokens)).tolist() == tokens
    for wrong in (len(tokens) + 1, len(tokens) - 1):
        with pytest.raises(ValueError, match="tokens"):
            codec.unpack(data, wrong)


@pytest.mark.parametrize("data", [b"", b"x", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\x04\x00\x01\x00\x00"])
def test_bytes_that_are_no_tokens(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Codec().unpack(data, 1)


def test_checksum_covers_everything() -> None:
    good = checksum(1, 2, "a", 3, 4, b"data")
    for other in ((2, 2, "a", 3, 4, b"data"), (1, 3, "a", 3, 4, b"data"), (1, 2, "b", 3, 4, b"data"), (1, 2, "a", 4, 4, b"data"),
                  (1, 2, "a", 3, 5, b"data"), (1, 2, "a", 3, 4, b"dat")):  # fmt: skip
        assert checksum(*other) != good
