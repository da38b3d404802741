"""`draftd ingest`, `export` and `import`: documents into and out of a running service."""

from collections.abc import Iterable, Iterator
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.cli.channel import TIMEOUT_S, EndpointOption, JsonOption, NamespaceOption, channel
from draftd.server.cli.failure import Failure
from draftd.server.cli.files import STANDARD, FileDocument, open_text, read_documents, write_document

_BATCH_DOCUMENTS = 256
_BATCH_TOKENS = 200_000
_INT32 = np.iinfo(np.int32)

VocabOption = Annotated[int, typer.Option("--vocab-size", help="Vocabulary size, if the namespace does not exist yet.", show_default=False)]


def ingest(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="Token ids, JSON lines or a trace file; .gz and .zst are read too; - is standard input.")
    ],
    namespace: NamespaceOption = "",
    vocab_size: VocabOption = 0,
    wait: Annotated[bool, typer.Option("--wait", help="Return only when everything can be drafted from.")] = False,
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Add whole documents. A document whose id is there already is left as it is."""
    documents = tokens = known = 0
    with channel(endpoint) as opened, open_text(path, "r") as stream, _progress() as progress:
        stub = draftd_pb2_grpc.DrafterServiceStub(opened)
        task = progress.add_task("ingest", total=None)
        for batch in _batches(read_documents(stream, path)):
            request = pb.IngestRequest(
                namespace=namespace,
                vocab_size=vocab_size,
                documents=[pb.IngestDocument(document_id=item.document_id, packed_tokens=_pack(item), complete=True) for item in batch],
            )
            for result in stub.Ingest(request, timeout=TIMEOUT_S).results:
                documents += result.kept_tokens > 0
                known += result.kept_tokens == 0
                tokens += result.kept_tokens
            progress.advance(task, len(batch))
        if wait and documents:
            last = pb.IngestDocument(document_id=batch[-1].document_id, packed_tokens=_pack(batch[-1]), complete=True)
            stub.Ingest(pb.IngestRequest(namespace=namespace, documents=[last], wait_visible=True), timeout=TIMEOUT_S)
    _report("ingested", documents, tokens, known, as_json)


def import_documents(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="JSON lines as `export` writes them; .gz and .zst are read too; - is standard input.")
    ],
    namespace: NamespaceOption = "",
    vocab_size: VocabOption = 0,
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Add the documents of an export. A document whose id is there already is skipped."""
    with channel(endpoint) as opened, open_text(path, "r") as stream, _progress() as progress:
        task = progress.add_task("import", total=None)

        def requests() -> Iterator[pb.ImportRequest]:
            first = True
            for batch in _batches(read_documents(stream, path)):
                stored = [
                    pb.StoredDocument(document_id=item.document_id, packed_tokens=_pack(item), generation=item.generation) for item in batch
                ]
                yield pb.ImportRequest(namespace=namespace, vocab_size=vocab_size if first else 0, documents=stored)
                first = False
                progress.advance(task, len(batch))
            if first:
                yield pb.ImportRequest(namespace=namespace, vocab_size=vocab_size)

        failures: list[Failure] = []
        try:
            response = draftd_pb2_grpc.CorpusServiceStub(opened).Import(_keep_failure(requests(), failures))
        finally:
            if failures:
                raise failures[0]
    _report("imported", response.documents, response.tokens, response.skipped_documents, as_json)


def export(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Where to write; .gz and .zst compress; - is standard output.")] = STANDARD,
    namespace: NamespaceOption = "",
    endpoint: EndpointOption = "",
) -> None:
    """Write the committed documents of a namespace as JSON lines of document_id, tokens and generation, oldest first."""
    documents = tokens = 0
    with channel(endpoint) as opened:
        responses = iter(draftd_pb2_grpc.CorpusServiceStub(opened).Export(pb.ExportRequest(namespace=namespace)))
        first = next(responses, None)
        with open_text(path, "w") as stream, _progress() as progress:
            task = progress.add_task("export", total=first.total_documents if first else 0)
            for response in _chain(first, responses):
                for stored in response.documents:
                    ids: list[int] = np.frombuffer(stored.packed_tokens, "<i4").tolist()
                    write_document(stream, FileDocument(stored.document_id, ids, stored.generation))
                    documents += 1
                    tokens += len(ids)
                progress.advance(task, len(response.documents))
    typer.echo(f"exported {documents:,} documents, {tokens:,} tokens", err=True)


def _chain(first: pb.ExportResponse | None, rest: Iterable[pb.ExportResponse]) -> Iterator[pb.ExportResponse]:
    if first is not None:
        yield first
        yield from rest


def _keep_failure(requests: Iterator[pb.ImportRequest], failures: list[Failure]) -> Iterator[pb.ImportRequest]:
    """gRPC reads requests in a thread of its own and would hide what went wrong there."""
    try:
        yield from requests
    except Failure as failure:
        failures.append(failure)


def _batches(documents: Iterable[FileDocument]) -> Iterator[list[FileDocument]]:
    """Documents in batches that fit a message."""
    batch: list[FileDocument] = []
    size = 0
    for document in documents:
        if batch and (len(batch) == _BATCH_DOCUMENTS or size + len(document.tokens) > _BATCH_TOKENS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.tokens)
    if batch:
        yield batch


def _pack(document: FileDocument) -> bytes:
    for token in document.tokens:
        if not _INT32.min <= token <= _INT32.max:
            raise Failure(f"document {document.document_id}: token {token} is not an int32")
    return np.asarray(document.tokens, "<i4").tobytes()


def _progress() -> Progress:
    """Progress on standard error, which disappears when done and is silent where there is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _report(verb: str, documents: int, tokens: int, known: int, as_json: bool) -> None:
    if as_json:
        typer.echo(f'{{"documents": {documents}, "tokens": {tokens}, "known_documents": {known}}}')
    else:
        typer.echo(f"{verb} {documents:,} documents, {tokens:,} tokens; {known:,} were there already")
