"""`draftd ingest`, `export` and `import`: documents into and out of a running service."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import IO, Annotated

import grpc
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.cli.channel import TIMEOUT_S, EndpointOption, JsonOption, NamespaceOption, channel, message_of
from draftd.server.cli.failure import Failure
from draftd.server.cli.files import PARQUET, STANDARD, FileDocument, Header, open_text, read_documents, whole_file, write_document

_BATCH_DOCUMENTS = 256
_BATCH_TOKENS = 200_000
_PART_BYTES = 4 * 2**20
"""Bytes of tokens that are imported by one call."""
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
    """Add whole documents. One whose id is there already is left as it is, and must be the same or the beginning of it."""
    documents = tokens = known = 0
    message_of(pb.IngestRequest, namespace=namespace, vocab_size=vocab_size)
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
        str,
        typer.Argument(
            metavar="FILE", help="A file of `export`: Parquet, or JSON lines, of which .gz and .zst are read too; - is standard input."
        ),
    ],
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", help='Namespace; empty means the one that a Parquet file names, else "default".', show_default=False
        ),
    ] = "",
    vocab_size: VocabOption = 0,
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Add the documents of an export. A document whose id is there already is skipped, and not even sent where the ids may be read: an
    interrupted import goes on where it was when run again.

    A Parquet file says its namespace, vocabulary size and tokenizer; they are checked before anything is taken, and so are its tokens.
    """
    message_of(pb.ImportRequest, namespace=namespace, vocab_size=vocab_size)
    with channel(endpoint) as opened, _progress() as progress:
        stub = draftd_pb2_grpc.CorpusServiceStub(opened)
        done = pb.ImportResponse()
        task = progress.add_task("import", total=None)
        try:
            with _source(path, namespace, vocab_size, stub) as source:
                progress.update(task, total=source.documents)
                known = _known(stub, source.header.namespace)
                for part in _parts(_unknown(source.batches, known, done)):
                    _add(done, stub.Import(_requests(part, source.header)))
                    progress.update(task, completed=done.documents + done.skipped_documents)
        except (grpc.RpcError, Failure):
            if done.documents:
                _say(f"{done.documents:,} documents are in; run the command again to go on")
            raise
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "namespace": source.header.namespace or "default",
                    "documents": done.documents,
                    "tokens": done.tokens,
                    "known_documents": done.skipped_documents,
                    "durable": done.durable,
                }
            )
        )
    else:
        where = f" into {source.header.namespace}" if source.header.namespace != namespace else ""
        _report("imported", done.documents, done.tokens, done.skipped_documents, False, where)


@dataclass(frozen=True)
class _Source:
    """Documents to import: what they must fit, how many there are if that is known, and themselves, some at a time."""

    header: Header
    documents: int | None
    batches: Iterator[list[pb.StoredDocument]]


@contextlib.contextmanager
def _source(path: str, namespace: str, vocab_size: int, stub: draftd_pb2_grpc.CorpusServiceStub) -> Iterator[_Source]:
    """Opens a file to import; Failure if it does not fit the namespace."""
    if not path.endswith(PARQUET):
        with open_text(path, "r") as stream:
            batches = ([_stored(document) for document in batch] for batch in _batches(read_documents(stream, path)))
            yield _Source(Header(namespace, vocab_size), None, batches)
        return
    # Loaded here, since it takes a while, and other commands do without it.
    from draftd.server.cli.parquet import ParquetFile

    file = ParquetFile(path)
    said = file.header
    wanted = Header(namespace or said.namespace, vocab_size or said.vocab_size, said.fingerprint, said.generation)
    if vocab_size and said.vocab_size not in (0, vocab_size):
        raise Failure(f"{path}: its vocab_size is {said.vocab_size}, not {vocab_size}")
    there = _namespace(stub, wanted.namespace)
    if there is not None:
        if wanted.vocab_size not in (0, there.vocab_size):
            raise Failure(f"{path}: its vocab_size is {wanted.vocab_size}; namespace {there.name!r} has {there.vocab_size}")
        if said.fingerprint and there.tokenizer_fingerprint not in ("", said.fingerprint):
            raise Failure(f"{path}: its tokenizer is not that of namespace {there.name!r}")
        wanted = replace(wanted, vocab_size=there.vocab_size)
    if not wanted.vocab_size:
        raise Failure(f"{path}: says no vocab_size; give --vocab-size")
    file.check_tokens(wanted.vocab_size)
    yield _Source(wanted, file.documents, file.read("" if namespace else said.namespace))


def _namespace(stub: draftd_pb2_grpc.CorpusServiceStub, name: str) -> pb.Namespace | None:
    try:
        return stub.GetNamespace(pb.GetNamespaceRequest(namespace=name), timeout=TIMEOUT_S).namespace
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return None
        raise


def _known(stub: draftd_pb2_grpc.CorpusServiceStub, namespace: str) -> set[str]:
    """Ids of the committed documents of a namespace; none where there is no such namespace, or the caller may not read it."""
    try:
        answers = stub.Export(pb.ExportRequest(namespace=namespace, ids_only=True))
        return {document.document_id for answer in answers for document in answer.documents}
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED):
            return set()
        raise


def _unknown(batches: Iterator[list[pb.StoredDocument]], known: set[str], done: pb.ImportResponse) -> Iterator[list[pb.StoredDocument]]:
    """What is left of batches without known documents, which are counted as skipped."""
    for batch in batches:
        new = [document for document in batch if document.document_id not in known]
        done.skipped_documents += len(batch) - len(new)
        yield new


def _parts(batches: Iterator[list[pb.StoredDocument]]) -> Iterator[list[list[pb.StoredDocument]]]:
    """Batches for one call each: what a call has answered for need not be sent again. At least one part, though it be empty."""
    part: list[list[pb.StoredDocument]] = []
    size = 0
    for batch in batches:
        for message in _messages(batch):
            part.append(message)
            size += sum(len(document.packed_tokens) for document in message)
            if size >= _PART_BYTES:
                yield part
                part, size = [], 0
    if part or not size:
        yield part


def _messages(batch: list[pb.StoredDocument]) -> Iterator[list[pb.StoredDocument]]:
    """A batch in pieces that fit a message."""
    message: list[pb.StoredDocument] = []
    size = 0
    for document in batch:
        if message and (len(message) == _BATCH_DOCUMENTS or size + len(document.packed_tokens) > 4 * _BATCH_TOKENS):
            yield message
            message, size = [], 0
        message.append(document)
        size += len(document.packed_tokens)
    if message:
        yield message


def _requests(part: list[list[pb.StoredDocument]], header: Header) -> Iterator[pb.ImportRequest]:
    first = {"namespace": header.namespace, "vocab_size": header.vocab_size, "tokenizer_fingerprint": header.fingerprint}
    for documents in part or [[]]:
        yield pb.ImportRequest(documents=documents, **first)  # type: ignore[arg-type]
        first = {}


def _add(done: pb.ImportResponse, part: pb.ImportResponse) -> None:
    done.documents += part.documents
    done.tokens += part.tokens
    done.skipped_documents += part.skipped_documents
    done.durable = part.durable


def export(
    path: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Where to write: .parquet, or JSON lines, which .gz and .zst compress; - is standard output."),
    ] = STANDARD,
    namespace: NamespaceOption = "",
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Write the committed documents of a namespace, oldest first. The file has its name only when it is complete.

    JSON lines have document_id, tokens and generation; Parquet also when a document was committed, and what its reader must fit.
    """
    documents = tokens = 0
    with channel(endpoint) as opened:
        responses = iter(draftd_pb2_grpc.CorpusServiceStub(opened).Export(message_of(pb.ExportRequest, namespace=namespace)))
        first = next(responses)
        header = Header(namespace or "default", first.vocab_size, first.tokenizer_fingerprint, first.generation)
        with _sink(path, header) as write, _progress() as progress:
            task = progress.add_task("export", total=first.total_documents)
            for response in chain([first], responses):
                write(response.documents)
                documents += len(response.documents)
                tokens += sum(len(document.packed_tokens) // 4 for document in response.documents)
                progress.advance(task, len(response.documents))
    if as_json:
        said = {"namespace": header.namespace, "documents": documents, "tokens": tokens, "generation": header.generation}
        typer.echo(json.dumps(said), err=path == STANDARD)
    else:
        _say(f"exported {documents:,} documents, {tokens:,} tokens")


@contextlib.contextmanager
def _sink(path: str, header: Header) -> Iterator[Callable[[Sequence[pb.StoredDocument]], None]]:
    """What documents are written to."""
    if not path.endswith(PARQUET):
        with open_text(path, "w") as stream:
            yield lambda documents: _write_lines(stream, documents)
        return
    from draftd.server.cli.parquet import ParquetWriter

    with whole_file(path) as file, ParquetWriter(file, header) as writer:
        yield writer.write


def _write_lines(stream: IO[str], documents: Sequence[pb.StoredDocument]) -> None:
    for stored in documents:
        ids: list[int] = np.frombuffer(stored.packed_tokens, "<i4").tolist()
        write_document(stream, FileDocument(stored.document_id, ids, stored.generation))


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


def _stored(document: FileDocument) -> pb.StoredDocument:
    return pb.StoredDocument(document_id=document.document_id, packed_tokens=_pack(document), generation=document.generation)


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


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _report(verb: str, documents: int, tokens: int, known: int, as_json: bool, where: str = "") -> None:
    if as_json:
        typer.echo(json.dumps({"documents": documents, "tokens": tokens, "known_documents": known}))
    else:
        typer.echo(f"{verb} {documents:,} documents, {tokens:,} tokens{where}; {known:,} were there already")
