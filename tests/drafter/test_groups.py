"""What requests of a group have generated: kept for the others, and only for them, in bounded memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.groups import MAX_GROUP_BYTES, MOST_ENDED, MOST_IDLE, NO_GROUPS, Groups, GroupTexts, check_group
from draftd.drafter.policy import GROUP_TOKENS


def ints(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def outputs(texts: GroupTexts, i: int) -> list[list[int]]:
    """What row i drafts from beside its own, as a kernel reads it."""
    first, last, own = texts.places[i].tolist()
    found = []
    for at in range(first, last):
        address, length = texts.members[at].tolist()
        if at != own and length:
            found.append(list((ctypes.c_int32 * length).from_address(address)))
    return found


def last_tokens(parts: list[list[int]]) -> list[list[int]]:
    """The last GROUP_TOKENS tokens of some outputs."""
    left, kept = GROUP_TOKENS, []
    for part in reversed(parts):
        kept.append(part[max(0, len(part) - left) :])
        left -= len(kept[-1])
    return [part for part in reversed(kept) if part]


def test_each_draws_from_the_others() -> None:
    groups = Groups()
    groups.start("a", "n", "g", ints(1, 2))
    groups.start("b", "n", "g", ints())
    groups.append("b", ints(3))
    groups.append("a", ints(4))
    groups.start("c", "n", "g", ints(5))
    groups.finish("b", discard=False)
    texts = groups.texts(["a", "other", "c"])
    assert outputs(texts, 0) == [[3], [5]]
    assert texts.places[1].tolist() == [0, 0, -1]
    assert outputs(texts, 2) == [[1, 2, 4], [3]]


def test_labels_and_namespaces_are_apart() -> None:
    groups = Groups()
    for key, namespace, label in (("a", "n", "g"), ("b", "n", "h"), ("c", "m", "g")):
        groups.start(key, namespace, label, ints(1, 2, 3))
    texts = groups.texts(["a", "b", "c"])
    assert [outputs(texts, i) for i in range(3)] == [[], [], []]


def test_without_a_group_there_is_nothing() -> None:
    groups = Groups()
    assert groups.texts(["a"]) is NO_GROUPS
    groups.append("a", ints(1))
    groups.finish("a", discard=False)
    assert len(groups) == 0
    groups.start("b", "n", "g", ints(1))
    assert groups.texts(["a"]) is NO_GROUPS


def test_what_is_discarded_is_forgotten() -> None:
    groups = Groups()
    groups.start("a", "n", "g", ints(1, 2))
    groups.start("b", "n", "g", ints(3))
    groups.finish("a", discard=True)
    assert outputs(groups.texts(["b"]), 0) == []
    groups.finish("b", discard=True)
    assert len(groups) == 0


def test_one_that_is_told_anew_is_there_once() -> None:
    groups = Groups()
    groups.start("a", "n", "g", ints(1))
    groups.start("b", "n", "g", ints(2))
    groups.start("a", "n", "g", ints(1, 3))
    assert outputs(groups.texts(["b"]), 0) == [[1, 3]]


def test_idle_groups_are_forgotten_the_oldest_first() -> None:
    groups = Groups()
    for i in range(MOST_IDLE + 10):
        groups.start(i, "n", f"g{i}", ints(i))
        groups.finish(i, discard=False)
        if i == MOST_IDLE - 1:
            groups.start("user", "n", "g0", ints(9))
    assert len(groups) == MOST_IDLE + 1
    assert outputs(groups.texts(["user"]), 0) == [[0]], "one that is in use is not forgotten"
    groups.start("late", "n", "g1", ints())
    assert outputs(groups.texts(["late"]), 0) == []
    groups.start("last", "n", f"g{MOST_IDLE + 9}", ints())
    assert outputs(groups.texts(["last"]), 0) == [[MOST_IDLE + 9]]


def test_many_short_ones_that_have_ended_are_not_all_kept() -> None:
    groups = Groups()
    groups.start("user", "n", "g", ints())
    for i in range(2 * MOST_ENDED):
        groups.start(i, "n", "g", ints(i))
        groups.finish(i, discard=False)
    assert outputs(groups.texts(["user"]), 0) == [[i] for i in range(MOST_ENDED, 2 * MOST_ENDED)]


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), longest=st.sampled_from([3, 400, 3000, 9000]))
def test_the_last_tokens_of_all_others_whatever_comes_in_between(seed: int, longest: int) -> None:
    """What is forgotten is what no request reaches."""
    rng = np.random.default_rng(seed)
    groups = Groups()
    told: dict[int, tuple[int, list[int]]] = {}
    flying: list[int] = []
    for step in range(60):
        what = rng.random()
        tokens = rng.integers(0, 1 << 20, int(rng.integers(0, longest))).tolist()
        if what < 0.3 or not flying:
            group = int(rng.integers(2))
            told[step] = (group, tokens)
            groups.start(step, "n", str(group), np.array(tokens, np.int32))
            flying.append(step)
        elif what < 0.75:
            key = flying[int(rng.integers(len(flying)))]
            told[key][1].extend(tokens)
            groups.append(key, np.array(tokens, np.int32))
        else:
            key = flying.pop(int(rng.integers(len(flying))))
            discard = bool(rng.random() < 0.3)
            groups.finish(key, discard)
            if discard:
                del told[key]
        texts = groups.texts(flying)
        for i, key in enumerate(flying):
            others = [text for other, (group, text) in told.items() if group == told[key][0] and other != key]
            assert last_tokens(outputs(texts, i)) == last_tokens(others)
        for of in groups._groups.values():
            room = {True: 0, False: 0}
            for member in of.members:
                room[member.in_flight] += len(member._tokens)
            assert room[True] <= (2 * GROUP_TOKENS + 256) * of.in_flight
            assert room[False] <= 2 * GROUP_TOKENS


def test_labels_have_a_limit() -> None:
    check_group("")
    check_group("é" * (MAX_GROUP_BYTES // 2))
    with pytest.raises(InvalidArgument, match="group has 129 bytes; it must have 1 to 128") as error:
        check_group("x" * 129)
    assert error.value.field == "group"
