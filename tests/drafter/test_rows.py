"""A row block from the engine's side: what it writes becomes visible, a document, or nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draftd.drafter import layout
from tests.drafter.bench import ints
from tests.drafter.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine.beside_a_corpus()
    yield made
    made.corpus.close()


def test_output_becomes_visible_and_then_a_document(engine: Engine) -> None:
    engine.start(0, "d", [1, 2, 3], [10, 11])
    engine.corpus.refresh()
    assert engine.rows.visible_length(0) == 5
    assert engine.drafted([10]) == [11]
    engine.rows.append(0, ints([12, 13]))
    assert engine.rows.length(0) == 7
    assert engine.rows.visible_length(0) == 5
    engine.corpus.refresh()
    assert engine.rows.visible_length(0) == 7
    assert engine.drafted([10, 11, 12]) == [13]
    assert not engine.rows.is_drained(0)
    engine.rows.append(0, ints([14]))
    engine.rows.finish(0)
    assert engine.held() == {}
    engine.corpus.refresh()
    assert engine.rows.is_drained(0)
    assert engine.held() == {"d": [10, 11, 12, 13, 14]}
    assert engine.errors == 0


def test_prompt_is_not_kept(engine: Engine) -> None:
    engine.start(0, "d", [1, 2, 3], [10, 11])
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.drafted([1, 2]) == []
    assert engine.held() == {"d": [10, 11]}


def test_discarded_request_leaves_nothing(engine: Engine) -> None:
    engine.start(0, "d", [], [10, 11, 12])
    engine.corpus.refresh()
    assert engine.drafted([10])
    engine.rows.finish(0, discard=True)
    engine.corpus.refresh()
    assert engine.rows.is_drained(0)
    assert engine.drafted([10]) == []
    assert engine.held() == {}
    assert engine.corpus.namespace("one").open_documents == 0
    assert engine.errors == 0


def test_request_discarded_before_it_was_ever_polled(engine: Engine) -> None:
    engine.start(0, "d", [], [10, 11, 12])
    engine.rows.finish(0, discard=True)
    engine.corpus.refresh()
    assert engine.rows.is_drained(0)
    assert engine.corpus.namespace("one").open_documents == 0
    assert engine.errors == 0


def test_slot_is_used_again(engine: Engine) -> None:
    for i in range(10):
        engine.start(1, f"d{i}", [0] * i, [10 + i, 20 + i])
        if i % 2:
            engine.corpus.refresh()
        engine.rows.finish(1)
        engine.corpus.refresh()
        assert engine.rows.is_drained(1)
    assert engine.held() == {f"d{i}": [10 + i, 20 + i] for i in range(10)}


def test_private_row_is_never_read(engine: Engine) -> None:
    engine.start(0, "secret", [], [10, 11, 12], private=True)
    assert engine.rows.is_private(0)
    engine.corpus.refresh()
    engine.rows.append(0, ints([13]))
    engine.corpus.refresh()
    assert engine.drafted([10]) == []
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.rows.is_drained(0)
    assert engine.held() == engine.held("two") == {}
    assert engine.corpus.namespace("one").tokens == 0
    assert engine.errors == 0


def test_rows_go_to_their_namespace(engine: Engine) -> None:
    engine.start(0, "d", [], [10, 11], namespace=0)
    engine.start(1, "d", [], [20, 21], namespace=1)
    engine.rows.finish(0)
    engine.rows.finish(1)
    engine.corpus.refresh()
    assert engine.held("one") == {"d": [10, 11]}
    assert engine.held("two") == {"d": [20, 21]}


def test_namespace_added_later(engine: Engine) -> None:
    engine.corpus.ensure_namespace("three", 100)
    engine.corpus.rows.set_namespaces("engine", ["one", "two", "three"])
    engine.start(0, "d", [], [10, 11], namespace=2)
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.held("three") == {"d": [10, 11]}


def test_preempted_request_comes_back_under_its_id(engine: Engine) -> None:
    """It starts anew in another slot, with what it had generated; nothing is kept twice."""
    engine.start(0, "d", [1, 2], [10, 11, 12])
    engine.corpus.refresh()
    engine.start(1, "d", [1, 2], [10, 11, 12])
    engine.rows.append(1, ints([13]))
    engine.corpus.refresh()
    engine.rows.append(1, ints([14]))
    engine.rows.finish(1)
    engine.corpus.refresh()
    assert engine.errors == 0
    assert engine.held() == {"d": [10, 11, 12, 13, 14]}
    assert engine.corpus.namespace("one").tokens == 5


def test_requests_are_taken_in_the_order_in_which_they_started(engine: Engine) -> None:
    """Discarded in a higher slot and started again in a lower one between two polls: the discard must not meet the new request."""
    engine.start(1, "d", [1], [10, 11])
    engine.rows.finish(1, discard=True)
    engine.start(0, "d", [1], [20, 21])
    engine.corpus.refresh()
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.held() == {"d": [20, 21]}
    assert engine.errors == 0


def test_request_that_comes_back_with_less_is_not_cut(engine: Engine) -> None:
    engine.start(0, "d", [1], [10, 11, 12])
    engine.corpus.refresh()
    engine.start(0, "d", [1], [10])
    engine.corpus.refresh()
    engine.rows.append(0, ints([11, 12, 13]))
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.errors == 0
    assert engine.held() == {"d": [10, 11, 12, 13]}


def test_finished_twice_and_appended_after_finish(engine: Engine) -> None:
    engine.start(0, "d", [], [10, 11])
    engine.rows.finish(0)
    engine.corpus.refresh()
    engine.rows.finish(0)
    engine.rows.append(0, ints([12]))
    engine.corpus.refresh()
    assert engine.held() == {"d": [10, 11]}
    assert engine.corpus.namespace("one").tokens == 2


def test_row_longer_than_the_block_is_refused_on_the_engines_side(engine: Engine) -> None:
    with pytest.raises(ValueError, match="row of 65 tokens is longer than 64"):
        engine.start(0, "d", [0] * 65)
    engine.start(0, "d", [0] * 60)
    with pytest.raises(ValueError, match="row of 65 tokens is longer than 64"):
        engine.rows.append(0, ints([1] * 5))
    assert engine.rows.length(0) == 60
    engine.rows.append(0, ints([1] * 4))


@pytest.mark.parametrize(("document_id", "size"), [("", 0), ("x" * 129, 129), ("ä" * 65, 130)])
def test_id_of_wrong_length_is_refused_on_the_engines_side(engine: Engine, document_id: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"document_id has {size} bytes"):
        engine.start(0, document_id, [1])
    assert engine.rows.slots[0, layout.SLOT_STATE] == layout.STATE_FREE


def test_longest_id(engine: Engine) -> None:
    engine.start(0, "ä" * 64, [], [10])
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert list(engine.held()) == ["ä" * 64]


def test_counters_are_shared(engine: Engine) -> None:
    engine.rows.stats.count_proposal(3, 12)
    assert engine.corpus.rows.stats("engine").rows[0] == 3
    engine.rows.beat()
    assert engine.corpus.rows._blocks["engine"].rows.header[layout.ROWS_HEARTBEAT_NS] > 0
