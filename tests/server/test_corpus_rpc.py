"""The Corpus service: namespaces, generations, explanations, export and import."""

import pytest

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import REFRAIN, VOCAB, RunningService, error_of, pack, wait_until


def _fill(service: RunningService, namespace: str, documents: int, length: int = 20) -> None:
    batch = [
        pb.IngestDocument(document_id=f"doc-{i}", packed_tokens=pack([(i * 7 + j) % VOCAB for j in range(length)]), complete=True)
        for i in range(documents)
    ]
    for start in range(0, documents, 16):
        service.drafter.Ingest(
            pb.IngestRequest(namespace=namespace, vocab_size=VOCAB, documents=batch[start : start + 16], wait_visible=True)
        )


def test_namespaces_are_listed_by_name_with_their_state(service: RunningService) -> None:
    _fill(service, "listed/b", 3)
    _fill(service, "listed/a", 2)
    engine = service.attach("lister", namespace="listed/a", tokenizer_fingerprint="abc").attachment_id
    names = [namespace.name for namespace in service.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces]
    assert names == sorted(names)
    state = service.namespace("listed/a")
    assert (state.vocab_size, state.documents, state.tokens, state.open_documents, state.attachments) == (VOCAB, 2, 40, 0, 1)
    assert state.tokenizer_fingerprint == "abc"
    assert state.segments.main + state.segments.recent + state.segments.live >= 40
    assert state.version > 0
    assert state.bytes > 0
    code, message = error_of(lambda: service.attach("other-tokenizer", namespace="listed/a", tokenizer_fingerprint="xyz"))
    assert (code, "tokenizer_fingerprint" in message) == ("FAILED_PRECONDITION", True)
    service.drafter.Detach(pb.DetachRequest(attachment_id=engine))


def test_namespace_in_use_is_dropped_by_force_only(service: RunningService) -> None:
    _fill(service, "dropped", 3)
    engine = service.attach("user", namespace="dropped").attachment_id
    code, message = error_of(lambda: service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="dropped")))
    assert (code, "1 attachments" in message, "force" in message) == ("FAILED_PRECONDITION", True, True)
    answer = service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="dropped", force=True))
    assert (answer.documents, answer.tokens) == (3, 60)
    assert error_of(lambda: service.namespace("dropped"))[0] == "NOT_FOUND"
    service.drafter.Detach(pb.DetachRequest(attachment_id=engine))
    code, message = error_of(lambda: service.corpus.DropNamespace(pb.DropNamespaceRequest()))
    assert (code, message) == ("INVALID_ARGUMENT", "namespace must be given")


def test_new_generation_evicts_what_is_not_kept(service: RunningService) -> None:
    _fill(service, "generations", 160, length=250)
    wait_until(lambda: service.namespace("generations").segments.live < 10_000)
    keep = pb.AdvanceGenerationRequest(namespace="generations", keep_generations=2)
    first = service.corpus.AdvanceGeneration(keep)
    assert (first.generation, first.evicted_tokens) == (1, 0)
    second = service.corpus.AdvanceGeneration(keep)
    assert second.generation == 2
    assert 30_000 <= second.evicted_tokens <= 40_000
    wait_until(lambda: service.namespace("generations").tokens <= 40_000 - second.evicted_tokens)
    assert service.namespace("generations").evicted_tokens >= second.evicted_tokens
    code, message = error_of(
        lambda: service.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="generations", keep_generations=-1))
    )
    assert (code, "keep_generations is -1; it must be in [0, " in message) == ("INVALID_ARGUMENT", True)


def test_explanation_shows_matches_and_the_draft_they_give(service: RunningService) -> None:
    answer = service.corpus.Explain(pb.ExplainRequest(packed_tokens=pack(REFRAIN[:6]), limit=1))
    lengths = [match.length for match in answer.matches]
    assert lengths == sorted(lengths, reverse=True)
    longest = answer.matches[0]
    assert (longest.source, longest.length, longest.occurrences) == (pb.SOURCE_CORPUS, 5, 1)
    assert [(item.token, item.count) for item in longest.next_tokens] == [(REFRAIN[6], 1)]
    assert [(item.document_id, item.position) for item in longest.documents] == [("refrain", 1)]
    assert list(answer.draft.tokens) == list(longest.draft) == service.draft(REFRAIN[:6])
    for limit in (-1, 1001):
        code, message = error_of(lambda limit=limit: service.corpus.Explain(pb.ExplainRequest(tokens=[1], limit=limit)))
        assert (code, message) == ("INVALID_ARGUMENT", f"limit is {limit}; it must be in [0, 1000]")
    code, message = error_of(lambda: service.corpus.Explain(pb.ExplainRequest()))
    assert (code, message.startswith("tokens: 0 tokens")) == ("INVALID_ARGUMENT", True)


def test_export_and_import_carry_a_namespace_over(service: RunningService) -> None:
    _fill(service, "exported", 40, length=100)
    messages = list(service.corpus.Export(pb.ExportRequest(namespace="exported")))
    assert (messages[0].total_documents, messages[0].vocab_size) == (40, VOCAB)
    documents = [document for message in messages for document in message.documents]
    assert [document.document_id for document in documents] == [f"doc-{i}" for i in range(40)]
    halves = [
        pb.ImportRequest(namespace="imported", vocab_size=VOCAB, documents=documents[:20]),
        pb.ImportRequest(documents=documents[20:]),
    ]
    answer = service.corpus.Import(iter(halves))
    assert (answer.documents, answer.tokens, answer.skipped_documents) == (40, 4000, 0)
    again = service.corpus.Import(iter(halves))
    assert (again.documents, again.tokens, again.skipped_documents) == (0, 0, 40)
    copied = [document for message in service.corpus.Export(pb.ExportRequest(namespace="imported")) for document in message.documents]
    assert [(d.document_id, d.packed_tokens) for d in copied] == [(d.document_id, d.packed_tokens) for d in documents]


def test_export_of_more_than_a_message_comes_in_several(service: RunningService) -> None:
    batch = [pb.IngestDocument(document_id=f"big-{i}", packed_tokens=pack([i] * 4000), complete=True) for i in range(2)]
    for i in range(100):
        for document in batch:
            document.document_id = f"big-{i}-{document.packed_tokens[0]}"
        service.drafter.Ingest(pb.IngestRequest(namespace="big", vocab_size=VOCAB, documents=batch))
    # The quota of 65,536 tokens keeps the newest; what has not been placed yet may still be above it.
    messages = list(service.corpus.Export(pb.ExportRequest(namespace="big")))
    sizes = [sum(len(document.packed_tokens) for document in message.documents) for message in messages]
    assert max(sizes) <= 2**20
    assert sum(sizes) >= 16_000


def test_export_of_an_empty_namespace(service: RunningService) -> None:
    engine = service.attach("empty", namespace="empty").attachment_id
    (message,) = service.corpus.Export(pb.ExportRequest(namespace="empty"))
    assert (message.total_documents, message.vocab_size, len(message.documents)) == (0, VOCAB, 0)
    service.drafter.Detach(pb.DetachRequest(attachment_id=engine))


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (pb.StoredDocument(packed_tokens=pack([1])), "document_id"),
        (pb.StoredDocument(document_id="x" * 129, packed_tokens=pack([1])), "document_id"),
        (pb.StoredDocument(document_id="x"), "packed_tokens"),
        (pb.StoredDocument(document_id="x", packed_tokens=b"123"), "packed_tokens"),
        (pb.StoredDocument(document_id="x", packed_tokens=pack([1] * 4097)), "packed_tokens"),
        (pb.StoredDocument(document_id="x", packed_tokens=pack([VOCAB])), "tokens[0]"),
    ],
)
def test_import_of_a_bad_document(service: RunningService, document: pb.StoredDocument, field: str) -> None:
    request = pb.ImportRequest(namespace="bad-import", vocab_size=VOCAB, documents=[document])
    code, message = error_of(lambda: service.corpus.Import(iter([request])))
    assert (code, f"documents[0].{field}" in message) == ("INVALID_ARGUMENT", True)


def test_import_into_a_namespace_of_another_vocabulary(service: RunningService) -> None:
    code, message = error_of(lambda: service.corpus.Import(iter([pb.ImportRequest(vocab_size=VOCAB - 1)])))
    assert (code, "vocab_size" in message) == ("FAILED_PRECONDITION", True)
    code, message = error_of(lambda: service.corpus.Import(iter([pb.ImportRequest(namespace="no-vocabulary")])))
    assert (code, "vocab_size is 0" in message) == ("INVALID_ARGUMENT", True)
