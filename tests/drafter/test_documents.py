"""Documents of a namespace: ingest is idempotent, wrong calls cost their caller an error and nobody anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftd.drafter.documents import Documents, IngestResult
from draftd.drafter.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.drafter.bench import ints


def _held(documents: Documents, document_id: str) -> list[int]:
    document = documents.open.get(document_id) or documents.committed[document_id]
    tokens: list[int] = document.tokens(document.released, document.length).tolist()
    return tokens


def test_append_then_commit() -> None:
    documents = Documents()
    assert documents.ingest("d", 0, ints([1, 2]), False, "") == IngestResult(2, 2, False)
    assert documents.ingest("d", 2, ints([3]), True, "") == IngestResult(1, 3, True)
    assert list(documents.committed) == ["d"]
    assert not documents.open
    assert _held(documents, "d") == [1, 2, 3]
    assert documents.tokens_held() == 3


def test_sent_again_keeps_nothing_and_changes_nothing() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2, 3]), False, "")
    before = documents.changed
    assert documents.ingest("d", 0, ints([1, 2, 3]), False, "") == IngestResult(0, 3, False)
    assert documents.ingest("d", 1, ints([2]), False, "") == IngestResult(0, 3, False)
    assert documents.changed == before
    assert _held(documents, "d") == [1, 2, 3]


def test_overlap_keeps_what_is_new() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2, 3]), False, "")
    assert documents.ingest("d", 1, ints([2, 3, 4, 5]), False, "") == IngestResult(2, 5, False)
    assert _held(documents, "d") == [1, 2, 3, 4, 5]


def test_overlap_that_differs_is_refused_and_nothing_kept() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2, 3]), False, "")
    with pytest.raises(FailedPrecondition, match="differ") as caught:
        documents.ingest("d", 1, ints([2, 9, 4]), True, "")
    assert caught.value.field == "tokens"
    assert _held(documents, "d") == [1, 2, 3]
    assert "d" in documents.open


def test_overlap_with_tokens_that_have_left_the_buffer() -> None:
    """What was placed and released is not compared any more, what is still held is."""
    documents = Documents()
    documents.ingest("d", 0, ints(list(range(10))), False, "")
    document = documents.open["d"]
    documents.place(documents.reserve(document, 0, 0, 9, 6, 1))
    assert document.released == 6
    assert documents.ingest("d", 0, ints(list(range(12))), False, "") == IngestResult(2, 12, False)
    assert documents.ingest("d", 2, ints([2, 3]), False, "") == IngestResult(0, 12, False)
    with pytest.raises(FailedPrecondition):
        documents.ingest("d", 4, ints([4, 5, 99]), False, "")
    assert _held(documents, "d") == list(range(6, 12))


def test_gap_is_refused_with_the_limit() -> None:
    documents = Documents()
    with pytest.raises(InvalidArgument, match="must be 0") as caught:
        documents.ingest("new", 1, ints([1]), False, "")
    assert caught.value.field == "offset"
    assert not documents.open
    documents.ingest("d", 0, ints([1, 2]), False, "")
    with pytest.raises(InvalidArgument, match="holds 2 tokens"):
        documents.ingest("d", 3, ints([4]), False, "")


def test_append_after_commit_is_refused() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2]), True, "")
    with pytest.raises(FailedPrecondition, match="committed with 2 tokens") as caught:
        documents.ingest("d", 2, ints([3]), False, "")
    assert caught.value.field == "document_id"
    assert _held(documents, "d") == [1, 2]


def test_commit_twice_is_the_same_as_once() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2]), False, "engine")
    assert documents.commit("d", "engine") == IngestResult(0, 2, True)
    assert documents.commit("d", "engine") == IngestResult(0, 2, True)
    assert documents.ingest("d", 0, ints([1, 2]), True, "engine") == IngestResult(0, 2, True)
    assert documents.tokens_held() == 2


def test_document_without_tokens_is_not_kept() -> None:
    documents = Documents()
    assert documents.ingest("d", 0, ints([]), True, "") == IngestResult(0, 0, True)
    assert not documents.committed
    assert not documents.pending
    assert not documents.open


def test_unknown_document() -> None:
    documents = Documents()
    with pytest.raises(NotFound):
        documents.commit("d", "")
    with pytest.raises(NotFound):
        documents.discard("d", "")


def test_other_owner_is_refused() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1]), False, "first")
    calls: list[Callable[[], object]] = [
        lambda: documents.ingest("d", 1, ints([2]), False, "second"),
        lambda: documents.commit("d", "second"),
        lambda: documents.discard("d", "second"),
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition, match="another attachment"):
            call()
    assert documents.owned_by("first") == ["d"]
    assert documents.owned_by("second") == []
    assert _held(documents, "d") == [1]


def test_discard_forgets_and_the_id_may_be_used_again() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2, 3]), False, "")
    assert documents.discard("d", "") == IngestResult(0, 0, False)
    assert documents.tokens_held() == 0
    assert documents.ingest("d", 0, ints([7]), True, "") == IngestResult(1, 1, True)
    assert _held(documents, "d") == [7]
    with pytest.raises(NotFound):
        documents.discard("d", "")
    assert _held(documents, "d") == [7], "a committed document is not discarded"


def test_evicted_document_is_forgotten_and_may_come_back() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2, 3]), True, "")
    documents.place(documents.reserve(documents.committed["d"], 0, 0, 4, 3, 1))
    assert not documents.pending
    documents.evict(documents.pieces.popleft())
    assert (documents.evicted_tokens, documents.indexed_tokens, documents.tokens_held()) == (3, 0, 0)
    assert not documents.committed
    assert documents.ingest("d", 0, ints([4]), True, "") == IngestResult(1, 1, True)


def test_partly_evicted_document_is_no_longer_complete() -> None:
    documents = Documents()
    documents.ingest("d", 0, ints([1, 2, 3, 4, 5]), True, "")
    document = documents.committed["d"]
    for offset, indexed in ((0, 2), (2, 3)):
        documents.place(documents.reserve(document, offset, 10 * offset, 6, indexed, 1))
    assert list(documents.complete()) == [document]
    documents.evict(documents.pieces.popleft())
    assert list(documents.complete()) == []
    assert "d" in documents.committed
    documents.evict(documents.pieces.popleft())
    assert not documents.committed
