"""A row block from the service's side: whatever the engine writes wrongly or in the middle of a read costs that row alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from draftd.drafter import layout, rowpoll
from draftd.drafter.rows import RowBlock
from tests.drafter.bench import ints
from tests.drafter.engine import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine.beside_a_corpus()
    yield made
    made.corpus.close()


def test_slot_that_is_being_filled_is_left_alone(engine: Engine) -> None:
    engine.start(0, "d", [], [10, 11])
    engine.rows.slots[0, layout.SLOT_GENERATION] -= 1
    engine.corpus.refresh()
    assert engine.drafted([10]) == []
    engine.rows.slots[0, layout.SLOT_GENERATION] += 1
    engine.corpus.refresh()
    assert engine.drafted([10]) == [11]


def test_slot_reused_while_it_is_read_is_not_taken(engine: Engine) -> None:
    """Fault to guard against: tokens of the new request under the old one's id."""
    block = engine.corpus.rows._blocks["engine"]
    engine.start(0, "old", [], [10, 11])
    taken: list[tuple[str, list[int]]] = []

    class Racing:
        """Reads of the tokens, during which the engine starts another request in the slot."""

        def __init__(self, tokens: NDArray[np.int32]) -> None:
            self._tokens = tokens
            self.armed = True

        def __getitem__(self, key: tuple[int, slice]) -> NDArray[np.int32]:
            if self.armed:
                self.armed = False
                engine.start(0, "new", [], [50, 51])
            return self._tokens[key]

    real = block.rows.tokens
    block.rows.tokens = Racing(real)  # type: ignore[assignment]
    note = lambda namespace, document_id, offset, lead, tokens, take, owner, arrived: taken.append((document_id, tokens.tolist()))  # noqa: E731
    assert block.poll(note) == []
    block.rows.tokens = real
    assert taken == []
    assert len(block.poll(note)) == 1
    assert taken == [("new", [50, 51])]


def test_what_was_seen_of_an_old_request_is_not_shown_for_a_new_one(engine: Engine) -> None:
    block = engine.corpus.rows._blocks["engine"]
    engine.start(0, "old", [], [10, 11])
    engine.rows.finish(0)
    seen = block.poll(engine.corpus._ingest_polled)
    engine.start(0, "new", [], [50])
    block.mark_visible(seen)
    assert engine.rows.visible_length(0) == 0
    assert not engine.rows.is_drained(0)


def _garbage(rows: RowBlock, what: str) -> None:
    words = rows.slots[0]
    match what:
        case "namespace":
            words[layout.SLOT_NAMESPACE] = 2
        case "huge namespace":
            words[layout.SLOT_NAMESPACE] = 2**62
        case "length above the row":
            words[layout.SLOT_LENGTH] = 65
        case "huge length":
            words[layout.SLOT_LENGTH] = 2**62
        case "negative length":
            words[layout.SLOT_LENGTH] = -5
        case "prompt above length":
            words[layout.SLOT_PROMPT_LENGTH] = 60
        case "negative prompt":
            words[layout.SLOT_PROMPT_LENGTH] = -1
        case "token out of vocabulary":
            rows.tokens[0, 2] = 100
        case "negative token":
            rows.tokens[0, 2] = -1
        case "id not UTF-8":
            rows.document_ids[0, :2] = (0xC3, 0x28)
            words[layout.SLOT_ID_LENGTH] = 2
        case "id without length":
            words[layout.SLOT_ID_LENGTH] = 0
        case "id of negative length":
            words[layout.SLOT_ID_LENGTH] = -3
        case "id too long":
            words[layout.SLOT_ID_LENGTH] = 2**40
        case "unknown state":
            words[layout.SLOT_STATE] = 77


@pytest.mark.parametrize(
    "what",
    ["namespace", "huge namespace", "length above the row", "huge length", "negative length", "prompt above length", "negative prompt",
     "token out of vocabulary", "negative token", "id not UTF-8", "id without length", "id of negative length", "id too long"],
)  # fmt: skip
def test_garbage_costs_its_row_only(engine: Engine, what: str) -> None:
    engine.start(0, "bad", [1], [10, 11, 12])
    engine.start(1, "good", [1], [20, 21, 22])
    _garbage(engine.rows, what)
    engine.corpus.refresh()
    assert engine.errors == 1
    assert engine.drafted([20]) == [21, 22]
    assert engine.drafted([10]) == []
    engine.rows.append(1, ints([23]))
    engine.rows.finish(0)
    engine.rows.finish(1)
    engine.corpus.refresh()
    assert engine.errors == 1, "a row that was refused is refused once"
    assert engine.rows.is_drained(0), "the engine can use the slot again"
    assert engine.held() == {"good": [20, 21, 22, 23]}
    engine.start(0, "again", [1], [30, 31])
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.held()["again"] == [30, 31]


def test_unknown_state_ends_the_row_without_a_document(engine: Engine) -> None:
    engine.start(0, "bad", [1], [10, 11, 12])
    engine.start(1, "good", [1], [20, 21, 22])
    _garbage(engine.rows, "unknown state")
    engine.rows.finish(1)
    engine.corpus.refresh()
    assert list(engine.held()) == ["good"]
    assert engine.rows.is_drained(0)
    assert engine.corpus.refresh_errors == 0


def test_garbage_in_every_word_of_the_slot_table(engine: Engine) -> None:
    """Whatever the block holds, a refresh ends and other engines' documents stay."""
    rng = np.random.default_rng(0)
    engine.corpus.ingest("one", "other", 0, ints([90, 91, 92]), True)
    for _ in range(300):
        values = rng.choice([-(2**63), -1, 0, 1, 2, 3, 4, 63, 64, 65, 128, 2**31, 2**63 - 1], engine.rows.slots.shape)
        engine.rows.slots[...] = values
        engine.rows.tokens[...] = rng.integers(-(2**31), 2**31, engine.rows.tokens.shape)
        engine.rows.document_ids[...] = rng.integers(0, 256, engine.rows.document_ids.shape)
        engine.corpus.refresh()
    assert engine.corpus.refresh_errors == 0
    assert engine.drafted([90, 91]) == [92]
    assert engine.held()["other"] == [90, 91, 92]


def test_row_that_shrinks_is_refused(engine: Engine) -> None:
    engine.start(0, "d", [], [10, 11, 12])
    engine.corpus.refresh()
    engine.rows.slots[0, layout.SLOT_LENGTH] = 1
    engine.corpus.refresh()
    assert engine.errors == 1


def test_request_that_comes_back_with_other_tokens_is_refused(engine: Engine) -> None:
    engine.start(0, "d", [1], [10, 11, 12])
    engine.corpus.refresh()
    engine.start(1, "d", [1], [10, 99])
    engine.corpus.refresh()
    assert engine.errors == 1
    assert engine.drafted([10]) == [11, 12]


def test_detach_takes_what_is_left_and_commits_it(engine: Engine) -> None:
    engine.start(0, "seen", [], [10, 11])
    engine.corpus.refresh()
    engine.rows.append(0, ints([12]))
    engine.start(1, "unseen", [], [20])
    engine.start(2, "secret", [], [30], private=True)
    assert engine.corpus.rows.detach("engine") == 2
    assert engine.held() == {"seen": [10, 11, 12], "unseen": [20]}


def test_engines_do_not_touch_each_others_open_documents(engine: Engine) -> None:
    other = RowBlock.open(engine.corpus.rows.attach("other", 2, 64, ["one"]))
    engine.start(0, "d", [], [10, 11])
    engine.corpus.refresh()
    other.start(0, "d", ints([10, 11, 12]), 0, 0, False)
    engine.corpus.refresh()
    assert engine.corpus.rows.errors("other") == 1
    assert engine.errors == 0
    other.finish(0, discard=True)
    engine.rows.finish(0)
    engine.corpus.refresh()
    assert engine.held() == {"d": [10, 11]}


def test_states_that_end_a_row() -> None:
    assert [t.value for t in rowpoll.Take] == ["append", "commit", "discard"]
