"""Proposing: rows kept by the service, tensors, streams, isolation, and what is counted from what engines commit."""

import errno
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from draftd.drafter.layout import LAYOUT_VERSION
from draftd.drafter.records import RowContext
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import REFRAIN, VOCAB, RunningService, error_of, pack, wait_until


def _detach(service: RunningService, attachment_id: str) -> int:
    return service.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id)).committed_documents


def test_a_bare_token_list_is_answered_by_a_service_that_has_seen_nothing() -> None:
    running = RunningService(http="off")
    try:
        answer = running.propose([pb.Row(tokens=[7, 8, 9, 7, 8, 9, 7, 8])]).drafts[0]
        assert (answer.source, list(answer.tokens)[:2]) == (pb.SOURCE_LOCAL, [9, 7])
    finally:
        running.close()


def test_packed_and_listed_tokens_get_the_same_draft(service: RunningService) -> None:
    rows = [pb.Row(tokens=REFRAIN[:6]), pb.Row(packed_tokens=pack(REFRAIN[:6]))]
    listed = service.drafter.Propose(pb.ProposeRequest(rows=rows)).drafts
    packed = service.drafter.Propose(pb.ProposeRequest(rows=rows, packed=True)).drafts
    assert list(listed[0].tokens) == list(listed[1].tokens) == REFRAIN[6:16]
    assert packed[0].packed_tokens == packed[1].packed_tokens == pack(REFRAIN[6:16])
    assert not packed[0].tokens
    assert not listed[0].packed_tokens
    assert list(listed[0].probabilities) == list(packed[0].probabilities) == [1.0] * 10
    assert (listed[0].source, listed[0].match_length, listed[0].occurrences) == (pb.SOURCE_CORPUS, 5, 1)


def test_drafts_are_those_of_the_core(service: RunningService) -> None:
    contexts = [REFRAIN[:6], [1, 2, 3, 1, 2], [999], REFRAIN[10:12]]
    rows = [RowContext(np.array(context, np.int32), "default", False) for context in contexts]
    expected = service.service.corpus.propose(rows, service.config.draft_params())
    answer = service.propose([pb.Row(tokens=context) for context in contexts])
    assert [list(draft.tokens) for draft in answer.drafts] == [expected.row(i) for i in range(4)]
    assert [draft.source for draft in answer.drafts] == expected.source.tolist()
    assert list(answer.versions) == [int(expected.version[0])]


def test_parameters_are_the_requests(service: RunningService) -> None:
    assert len(service.draft(REFRAIN[:6], k=3)) == 3
    assert len(service.draft(REFRAIN[:6], spec_factor=0.0, spec_offset=4.0)) == 4
    assert len(service.draft(REFRAIN[:6], max_depth=7)) < 7
    assert service.draft(REFRAIN[:6], use_corpus=False) == []
    assert service.draft([950, 951, 950, 951, 950], use_local=False) == []


def test_a_row_is_sent_in_parts_and_its_output_becomes_a_document(service: RunningService) -> None:
    engine = service.attach("in-parts", namespace="parts").attachment_id
    prompt, output = [1, 2, 3], list(range(300, 340))
    service.propose([pb.Row(document_id="p", tokens=prompt, prompt_length=3)], engine)
    for i in range(0, 30, 3):
        service.propose([pb.Row(document_id="p", offset=3 + i, tokens=output[i : i + 3])], engine)
    wait_until(lambda: service.namespace("parts").tokens == 30)
    # In flight, another caller drafts from it already; the prompt is never kept.
    wait_until(lambda: list(service.propose([pb.Row(tokens=[9, *output[:4]], namespace="parts")]).drafts[0].tokens) == output[4:12])
    assert service.namespace("parts").open_documents == 1
    result = service.harvest(engine, "p", output[30:], 33, wait_visible=True)
    assert (result.kept_tokens, result.total_tokens, result.committed) == (10, 40, True)
    (message,) = service.corpus.Export(pb.ExportRequest(namespace="parts"))
    assert message.documents[0].packed_tokens == pack(output)
    assert _detach(service, engine) == 0


def test_discarded_row_is_not_kept(service: RunningService) -> None:
    engine = service.attach("discarding", namespace="discarded").attachment_id
    service.propose([pb.Row(document_id="d", tokens=[1, 2, 3], prompt_length=1)], engine)
    result = service.harvest(engine, "d", [], 3, discard=True)
    assert (result.kept_tokens, result.total_tokens, result.committed) == (0, 0, False)
    assert not service.harvest(engine, "d", [], 3).committed
    assert (service.namespace("discarded").documents, service.namespace("discarded").open_documents) == (0, 0)
    _detach(service, engine)


def test_discard_of_a_document_that_came_by_ingest_does_not_commit_it(service: RunningService) -> None:
    engine = service.attach("discarding-ingested", namespace="discarded-ingested").attachment_id
    service.ingest("i", [5, 6, 7], engine)
    assert not service.harvest(engine, "i", [], 3, discard=True).committed
    assert (service.namespace("discarded-ingested").documents, service.namespace("discarded-ingested").open_documents) == (0, 0)
    _detach(service, engine)


def test_private_row_drafts_from_itself_and_is_not_kept(service: RunningService) -> None:
    engine = service.attach("private", namespace="secrets").attachment_id
    row = pb.Row(document_id="s", tokens=[1, *range(400, 420)], prompt_length=1, private=True)
    service.propose([row], engine)
    result = service.harvest(engine, "s", [420], 21, wait_visible=True)
    assert (result.kept_tokens, result.committed) == (0, False)
    assert service.namespace("secrets").tokens == 0
    assert list(service.propose([pb.Row(tokens=REFRAIN[:6], private=True)]).drafts[0].tokens) == []
    _detach(service, engine)


def test_namespaces_are_isolated(service: RunningService) -> None:
    service.ingest("d", list(range(500, 540)), namespace="island", vocab_size=VOCAB, complete=True, wait_visible=True)
    row = pb.Row(tokens=[1, *range(500, 506)])
    assert not service.propose([row]).drafts[0].tokens
    row.namespace = "island"
    assert service.propose([row]).drafts[0].tokens


def test_rows_of_a_dropped_namespace_draft_from_themselves(service: RunningService) -> None:
    engine = service.attach("dropped", namespace="doomed").attachment_id
    service.propose([pb.Row(document_id="d", tokens=[1, 5, 6, 5, 6], prompt_length=1)], engine)
    service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="doomed", force=True))
    answer = service.propose([pb.Row(document_id="d", offset=5, tokens=[5, 6])], engine).drafts[0]
    assert (answer.source, list(answer.tokens)[:2]) == (pb.SOURCE_LOCAL, [5, 6])
    # Made anew, the namespace does not get the rest of a document whose start it never saw.
    service.ingest("other", [1], namespace="doomed", vocab_size=VOCAB)
    service.propose([pb.Row(document_id="d", offset=7, tokens=[5])], engine)
    assert not service.harvest(engine, "d", [6], 8).committed
    assert service.namespace("doomed").tokens == 1
    _detach(service, engine)


def test_two_engines_with_the_same_document_are_told_apart(service: RunningService) -> None:
    first, second = service.attach("first").attachment_id, service.attach("second").attachment_id
    row = pb.Row(document_id="shared-id", tokens=[1, 2, 3], prompt_length=1)
    service.propose([row], first)
    with pytest.raises(grpc.RpcError, match="opened by another attachment"):
        service.propose([row], second)
    assert service.harvest(first, "shared-id", [4], 3).total_tokens == 3
    _detach(service, first)
    _detach(service, second)


def test_detach_commits_open_documents(service: RunningService) -> None:
    engine = service.attach("leaving", namespace="left").attachment_id
    service.propose([pb.Row(document_id="row", tokens=[1, 2, 3], prompt_length=1)], engine)
    service.ingest("ingested", [4, 5], engine)
    assert _detach(service, engine) == 2
    assert (service.namespace("left").documents, service.namespace("left").open_documents) == (2, 0)


def test_rows_of_a_group_draft_from_one_another_and_that_is_counted(service: RunningService) -> None:
    """Rows of a batch see what the others of it bring; `group` is read when a row begins."""
    engine = service.attach("grouped", namespace="grouped").attachment_id
    alone = {"use_corpus": False, "policy": pb.POLICY_CALIBRATED, "tau": 0.02}
    rows = [
        pb.Row(document_id="a", tokens=[1, 50, 51, 52, 53], prompt_length=1, group="g"),
        pb.Row(document_id="b", tokens=[1, 50, 51], prompt_length=1, group="g"),
        pb.Row(document_id="c", tokens=[1, 50, 51], prompt_length=1, group="h"),
        pb.Row(tokens=[1, 50, 51], group="g"),
    ]
    drafts = service.propose(rows, engine, **alone).drafts
    assert [list(draft.tokens)[:2] for draft in drafts] == [[], [52, 53], [], []]
    assert drafts[1].source == pb.SOURCE_GROUP
    service.harvest(engine, "a", [54], 5)
    draft = service.propose([pb.Row(document_id="b", offset=3, tokens=[52, 53], group="h")], engine, **alone).drafts[0]
    assert list(draft.tokens) == [54]
    where = '{namespace="grouped",source="group"}'
    wait_until(lambda: service.metric(f"draftd_num_drafts_total{where}") == 1)
    assert service.metric(f"draftd_acceptance_length_sum{where}") == 2
    _detach(service, engine)


def test_acceptance_is_measured_from_what_comes_next(service: RunningService) -> None:
    engine = service.attach("measured", namespace="measured").attachment_id
    service.ingest("refrain", REFRAIN, engine, complete=True, wait_visible=True)
    rows = [pb.Row(document_id=name, tokens=[1, *REFRAIN[:5]], prompt_length=6) for name in ("a", "b")]
    assert [list(draft.tokens) for draft in service.propose(rows, engine).drafts] == [REFRAIN[5:13]] * 2
    # a takes 3 of the 8 drafted tokens and one of its own; b takes none.
    next_rows = [
        pb.Row(document_id="a", offset=6, tokens=[*REFRAIN[5:8], 900]),
        pb.Row(document_id="b", offset=6, tokens=[901]),
    ]
    service.propose(next_rows, engine, use_corpus=False, use_local=False)
    where = 'namespace="measured"'
    wait_until(lambda: service.metric(f'draftd_num_drafts_total{{{where},source="corpus"}}') == 2)
    names = ("draftd_num_draft_tokens_total", "draftd_num_accepted_tokens_total")
    drafted, accepted = (
        [service.metric(f'{name}{{{where},position="{position}",source="corpus"}}') for position in range(9)] for name in names
    )
    assert drafted == [2] * 8 + [0]
    assert accepted == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert service.metric('draftd_acceptance_length_bucket{le="0.0",namespace="measured",source="corpus"}') == 1
    assert service.metric('draftd_acceptance_length_sum{namespace="measured",source="corpus"}') == 3
    _detach(service, engine)


class HandleEngine:
    """An engine of 4 rows whose tensors are files below the service's shared-memory directory."""

    def __init__(self, service: RunningService, name: str) -> None:
        self.service = service
        directory = service.shm_root / f"engine-{name}"
        directory.mkdir()
        self.arrays = {
            "tokens": self._array(directory / "tokens", np.int32, (4, 256)),
            "lengths": self._array(directory / "lengths", np.int32, (4,)),
            "draft_tokens": self._array(directory / "draft_tokens", np.int32, (4, 8)),
            "draft_probabilities": self._array(directory / "draft_probabilities", np.float32, (4, 8)),
            "draft_info": self._array(directory / "draft_info", np.int32, (4, 4)),
        }
        kinds = {"int32": pb.DATA_TYPE_INT32, "float32": pb.DATA_TYPE_FLOAT32}
        tensors: dict[str, Any] = {
            field: pb.Tensor(handle=str(directory / field), offset=64, data_type=kinds[array.dtype.name], shape=array.shape)
            for field, array in self.arrays.items()
        }
        self.id = service.attach(name, transport=pb.TRANSPORT_HANDLE, tensors=pb.EngineTensors(**tensors)).attachment_id

    @staticmethod
    def _array(path: Path, dtype: type, shape: tuple[int, ...]) -> "np.memmap[tuple[int, ...], np.dtype[np.generic]]":
        return np.memmap(path, dtype, "w+", offset=64, shape=shape)

    def put(self, row: int, tokens: list[int]) -> None:
        """Writes a row's tokens and its length."""
        self.arrays["tokens"][row, : len(tokens)] = tokens
        self.arrays["lengths"][row] = len(tokens)


def test_handle_engine_gets_the_drafts_of_an_inline_one_in_its_tensors(service: RunningService) -> None:
    engine = HandleEngine(service, "handle")
    contexts = {3: REFRAIN[:6], 1: [1, 2, 3, 1, 2, 3, 1]}
    for row, tokens in contexts.items():
        engine.put(row, tokens)
    expected = service.propose([pb.Row(tokens=tokens) for tokens in contexts.values()], k=8).drafts
    rows = [pb.Row(row_index=row, document_id=f"handle-{row}", prompt_length=2) for row in contexts]
    answer = service.propose(rows, engine.id)
    assert not answer.drafts
    for i, draft in enumerate(expected):
        n = len(draft.tokens)
        assert engine.arrays["draft_tokens"][i].tolist() == list(draft.tokens) + [-1] * (8 - n)
        assert np.allclose(engine.arrays["draft_probabilities"][i], list(draft.probabilities) + [0] * (8 - n))
        assert engine.arrays["draft_info"][i].tolist() == [n, draft.source, draft.match_length, draft.occurrences]
    engine.put(3, REFRAIN[:9])
    service.propose([pb.Row(row_index=3, document_id="handle-3", offset=6)], engine.id)
    assert engine.arrays["draft_tokens"][0].tolist() == REFRAIN[9:17]
    engine.put(3, REFRAIN[:10])
    result = service.drafter.Harvest(
        pb.HarvestRequest(attachment_id=engine.id, rows=[pb.HarvestRow(document_id="handle-3", row_index=3)])
    ).results[0]
    assert (result.kept_tokens, result.total_tokens, result.committed) == (1, 8, True)
    assert _detach(service, engine.id) == 1


def test_stream_answers_in_order(service: RunningService) -> None:
    engine = service.attach("streaming").attachment_id
    starts = [3, 7, 1, 9, 20]
    requests = (
        pb.ProposeStreamRequest(
            sequence=100 + start,
            request=pb.ProposeRequest(attachment_id=engine, rows=[pb.Row(tokens=REFRAIN[start : start + 6])], packed=True),
        )
        for start in starts
    )
    answers = list(service.drafter.ProposeStream(requests))
    assert [answer.sequence for answer in answers] == [100 + start for start in starts]
    assert [answer.response.drafts[0].packed_tokens for answer in answers] == [pack(REFRAIN[s + 6 : s + 14]) for s in starts]
    # The end of a stream does not end the attachment.
    assert service.propose([pb.Row(tokens=[1])], engine).drafts
    _detach(service, engine)


def test_a_mapped_attachment_keeps_its_rows_in_its_block(service: RunningService) -> None:
    engine = service.attach("mapped-rows", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION).attachment_id
    with pytest.raises(grpc.RpcError, match="keeps its rows in its row block"):
        service.propose([pb.Row(document_id="d", tokens=[1])], engine)
    assert list(service.propose([pb.Row(tokens=REFRAIN[:6])], engine).drafts[0].tokens) == REFRAIN[6:14]
    _detach(service, engine)


def test_namespace_made_anew_with_another_vocabulary_is_not_searched_with_old_tokens(service: RunningService) -> None:
    inline = service.attach("vocabulary-inline", namespace="renamed").attachment_id
    mapped = service.attach(
        "vocabulary-mapped", namespace="renamed", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION
    ).attachment_id
    service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="renamed", force=True))
    service.ingest("small", [1, 2, 3, 4, 5] * 4, namespace="renamed", vocab_size=6, complete=True, wait_visible=True)
    for row in (pb.Row(tokens=[9, 1, 2]), pb.Row(document_id="old", tokens=[999, 1, 2], prompt_length=1)):
        assert not service.propose([row], inline).drafts[0].tokens
    assert not service.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=mapped)).indexes
    assert service.propose([pb.Row(tokens=[4, 1, 2], namespace="renamed")]).drafts[0].tokens
    request = pb.ProposeRequest(rows=[pb.Row(tokens=[6], namespace="renamed")], vocab_size=VOCAB)
    with pytest.raises(grpc.RpcError, match="must be in \\[0, 6\\)"):
        service.drafter.Propose(request)
    _detach(service, inline)
    _detach(service, mapped)


def test_waiting_too_long_for_visibility_keeps_what_was_sent(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(service.service.corpus, "wait_visible", lambda ticket, timeout_s: False)
        code, message = error_of(lambda: service.ingest("waited", [1, 2], namespace="waiting", vocab_size=VOCAB, wait_visible=True))
    assert (code, "what was sent is kept" in message) == ("DEADLINE_EXCEEDED", True)
    assert service.ingest("waited", [1, 2], namespace="waiting").total_tokens == 2


def test_host_without_memory_is_told_apart_from_a_defect(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "secret path")

    with monkeypatch.context() as patch:
        patch.setattr(service.service.corpus.rows, "attach", full)
        code, message = error_of(lambda: service.attach("no-room", transport=pb.TRANSPORT_MAPPED, layout_version=LAYOUT_VERSION))
    assert (code, "secret" in message) == ("RESOURCE_EXHAUSTED", False)
    _detach(service, service.attach("no-room").attachment_id)
