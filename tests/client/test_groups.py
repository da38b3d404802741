"""Requests of a group draft from one another's outputs; nobody else does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftd.client import Drafter
from draftd.drafter.drafts import SOURCE_GROUP, Drafts
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import DraftParams
from draftd.server.replay.service import PrivateService

Attach = Callable[..., Drafter]
GROUPED = ("mapped", "inline")
VISIBLE_S = 20
PARAMS = DraftParams(tau=0.02, use_corpus=False)
"""Whatever is drafted comes from own tokens and from the group."""


def begin(drafter: Drafter, outputs: dict[int, list[int]], group: str | None = "g", **fields: object) -> None:
    """Starts requests, tells the service of them, and commits an output of each row."""
    for row in outputs:
        drafter.start(row, [900 + row], group=group or "", **fields)  # type: ignore[arg-type]
    drafter.propose(list(outputs))
    for row, output in outputs.items():
        drafter.append(row, output)


@pytest.mark.parametrize("transport", GROUPED)
def test_a_request_drafts_from_the_others_of_its_group(attach: Attach, transport: str) -> None:
    drafter = attach(transport, params=PARAMS)
    begin(drafter, {0: [10, 11, 12, 13, 14, 15], 1: [9, 10, 11, 12]})
    drafts = drafter.propose([1, 0])
    assert drafts.row(0)[:3] == [13, 14, 15]
    assert drafts.source.tolist() == [SOURCE_GROUP, 0]
    assert (drafts.match_length[0], drafts.occurrences[0]) == (3, 1)
    drafter.append(1, [13, 14, 77])
    drafter.finish(1)
    assert drafter.stats.accepted[SOURCE_GROUP].sum() == 2


@pytest.mark.parametrize("transport", GROUPED)
def test_they_draft_from_what_has_ended_too_unless_it_was_discarded(attach: Attach, transport: str) -> None:
    drafter = attach(transport, params=PARAMS)
    begin(drafter, {0: [10, 11, 12, 13], 1: [20, 21, 22, 23], 2: [30, 31, 32, 33, 34, 35], 3: [7]})
    drafter.finish(0)
    drafter.finish(1, discard=True)
    drafter.finish(2, length=5)
    assert drafter.wait_visible(VISIBLE_S)
    drafter.append(3, [10, 11, 12])
    assert drafter.propose([3]).row(0)[:1] == [13]
    drafter.append(3, [20, 21, 22])
    assert drafter.propose([3]).source[0] != SOURCE_GROUP
    drafter.append(3, [30, 31, 32])
    # What came after its end was taken back; inline, what was kept goes to the service as a document.
    assert drafter.propose([3]).row(0)[:2] == ([33] if transport == "mapped" else [])


def assert_same(first: Drafts, second: Drafts) -> None:
    for field in ("tokens", "probabilities", "counts", "source", "match_length", "occurrences"):
        np.testing.assert_array_equal(getattr(first, field), getattr(second, field), err_msg=field)


def test_drafts_are_the_same_mapped_and_inline(attach: Attach) -> None:
    rng = np.random.default_rng(5)
    motifs = [rng.integers(0, 60, 9) for _ in range(5)]
    outputs = {row: np.concatenate([motifs[i] for i in rng.integers(0, 5, 6)]).tolist()[: 40 + 2 * row] for row in range(6)}
    drafts = {}
    for transport in GROUPED:
        drafter = attach(transport, params=PARAMS)
        begin(drafter, outputs)
        drafter.finish(4)
        drafter.finish(2)
        assert drafter.wait_visible(VISIBLE_S)
        drafts[transport] = drafter.propose([5, 0, 1, 3])
    assert SOURCE_GROUP in drafts["mapped"].source
    assert drafts["mapped"].counts.sum() > 8
    assert_same(drafts["mapped"], drafts["inline"])


@pytest.mark.parametrize("transport", GROUPED)
@pytest.mark.parametrize("other", ["label", "namespace", "engine", "none", "private", "its own"])
def test_nobody_else_gets_anything(attach: Attach, namespace: str, transport: str, other: str) -> None:
    drafter = attach(transport, params=PARAMS, extra_namespaces=[f"{namespace}/b"])
    begin(drafter, {0: [10, 11, 12, 13]})
    asking = attach(transport, params=PARAMS) if other == "engine" else drafter
    row = 1
    if other == "its own":
        row = 0
        drafter.append(0, [50])
        asking.append(row, [10, 11, 12])
    else:
        fields = {"namespace": f"{namespace}/b"} if other == "namespace" else {"private": True} if other == "private" else {}
        label = {"label": "h", "none": None}.get(other, "g")
        begin(asking, {1: [9, 10, 11, 12]}, label, **fields)
    drafts = asking.propose([row])
    assert (drafts.source[0], drafts.row(0)[:1]) == ((1, [13]) if other == "its own" else (0, []))


@pytest.mark.parametrize("transport", GROUPED)
def test_private_requests_give_nothing(attach: Attach, transport: str) -> None:
    drafter = attach(transport, params=PARAMS)
    begin(drafter, {0: [10, 11, 12, 13]}, private=True)
    begin(drafter, {1: [9, 10, 11, 12]})
    assert drafter.propose([1]).counts[0] == 0


def test_a_group_gives_the_corpus_no_more_than_its_documents(attach: Attach) -> None:
    drafter, other = attach("mapped", params=PARAMS), attach("mapped")
    begin(drafter, {0: [10, 11, 12, 13], 1: [10, 11, 12, 13]})
    drafter.propose([0, 1])
    assert drafter.wait_visible(VISIBLE_S)
    other.start(0, [10, 11, 12])
    drafts = other.propose([0])
    assert (drafts.source[0], drafts.occurrences[0]) == (2, 2)


@pytest.mark.parametrize("transport", GROUPED)
def test_a_preempted_request_stays_in_its_group(attach: Attach, transport: str) -> None:
    drafter = attach(transport, params=PARAMS)
    drafter.start(0, [900], "preempted", group="g")
    begin(drafter, {1: [30, 31, 32, 33]})
    drafter.propose([0])
    drafter.append(0, [10, 11, 12, 13])
    drafter.propose([0])
    drafter.preempt(0)
    drafter.append(1, [10, 11, 12])
    assert drafter.propose([1]).row(0)[:1] == [13]
    drafter.start(2, [900, 10, 11, 12, 13, 40, 30, 31, 32], "preempted", prompt_length=1)
    assert drafter.propose([2]).row(0)[:1] == [33]


@pytest.mark.parametrize(("transport", "policy"), [("handle", "calibrated"), ("mapped", "tree"), ("inline", "tree")])
def test_where_groups_have_no_effect_they_do_no_harm(attach: Attach, transport: str, policy: str) -> None:
    drafter = attach(transport, params=DraftParams(use_corpus=False, policy=policy))  # type: ignore[arg-type]
    begin(drafter, {0: [10, 11, 12, 13], 1: [9, 10, 11, 12]})
    assert drafter.propose([0, 1]).counts.tolist() == [0, 0]
    assert drafter.stats.fail_opens.sum() == 0


def test_rows_appended_to_together_share_as_those_one_by_one(attach: Attach) -> None:
    drafter = attach("mapped", params=PARAMS)
    rows = np.arange(8)
    for row in rows.tolist():
        drafter.start(row, [900], group="g" if row < 4 else "")
    tokens = np.tile(np.arange(10, 16, dtype=np.int32), (8, 1))
    drafter.append_rows(rows, tokens, np.array([6, 3, 3, 3, 3, 3, 3, 3]))
    drafts = drafter.propose(rows)
    assert drafts.row(1)[:1] == [13]
    assert drafts.counts[4:].tolist() == [0] * 4


def test_a_new_service_is_told_of_the_groups_in_flight(
    own_service: PrivateService, attach: Attach, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    drafters = [attach(transport, params=PARAMS, endpoint=own_service.endpoint) for transport in GROUPED]
    for drafter in drafters:
        begin(drafter, {0: [10, 11, 12, 13], 1: [9, 10, 11, 12]})
    own_service.kill()
    own_service.spawn()
    own_service.wait_ready()
    for drafter in drafters:
        eventually(lambda drafter=drafter: drafter.attachments == 2 and drafter.attached)  # type: ignore[misc]
        assert drafter.propose([0, 1]).row(1)[:1] == [13]


@pytest.mark.parametrize("group", ["x" * 129, "é" * 65])
def test_a_label_that_is_too_long_is_refused(attach: Attach, group: str) -> None:
    drafter = attach("mapped", params=PARAMS, strict=True)
    with pytest.raises(InvalidArgument, match=r"group has 1\d\d bytes; it must have 1 to 128") as error:
        drafter.start(0, [1], group=group)
    assert error.value.field == "group"
    drafter.start(0, [1], group="x" * 128)
