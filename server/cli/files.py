"""Files of documents: reading what people have, writing what `export` gives; gzip and zstd by suffix, `-` for standard streams."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from draftd.server.cli.failure import Failure
from draftd.server.zstd import open_zstd

STANDARD = "-"
PARQUET = ".parquet"


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its documents; vocab_size 0 and an empty fingerprint where it does not say."""

    namespace: str = ""
    vocab_size: int = 0
    fingerprint: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class FileDocument:
    """One document of a file: its id, its tokens, and its generation if the file says."""

    document_id: str
    tokens: list[int]
    generation: int = 0


@contextlib.contextmanager
def open_text(path: str, mode: str) -> Iterator[IO[str]]:
    """A text stream to read ("r") or write ("w"); Failure if it cannot be opened or is damaged. See whole_file for what is written."""
    if path == STANDARD:
        yield sys.stdin if mode == "r" else sys.stdout
        return
    try:
        with whole_file(path) if mode == "w" else contextlib.nullcontext(Path(path)) as file, _open(file, path, mode) as stream:
            yield stream
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, zstandard.ZstdError) as error:
        raise Failure(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _open(file: Path, name: str, mode: str) -> IO[str]:
    if name.endswith(".gz"):
        return cast(IO[str], gzip.open(file, mode + "t", encoding="utf-8"))
    if name.endswith(".zst") and mode == "r":
        return io.TextIOWrapper(open_zstd(file.open("rb")), encoding="utf-8")
    if name.endswith(".zst"):
        return cast(IO[str], zstandard.open(file, "wt", encoding="utf-8"))
    return file.open(mode, encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[Path]:
    """Where to write a file that gets its name only when all of it is on the disk; what is no regular file is written as it is.

    Raises:
        Failure: It cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    partial = target.with_name(target.name + ".partial")
    try:
        partial.touch()
        try:
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror or error}") from None


def read_documents(stream: IO[str], name: str) -> Iterator[FileDocument]:
    """Documents of a stream, one or more a line.

    A line is a JSON object with `document_id` and `tokens`, a trace session with `id` and `turns` (each turn's output is a document), a
    JSON list of token ids, or token ids separated by commas or blanks. Lines without an id are named after the file, the line and what
    is in it: the same file again adds nothing, and another one of that name does.
    """
    for number, line in enumerate(stream, 1):
        if text := line.strip():
            try:
                yield from _documents(text, f"{Path(name).name}:{number}")
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                raise Failure(f"{name}:{number}: neither token ids, at least one, nor a JSON document nor a trace session") from None


def _documents(text: str, place: str) -> Iterator[FileDocument]:
    if text[0] not in "{[":
        yield _unnamed([int(part) for part in text.replace(",", " ").split()], place)
        return
    value: Any = json.loads(text)
    if isinstance(value, list):
        yield _unnamed(value, place)
    elif "turns" in value:
        for i, turn in enumerate(value["turns"]):
            if turn["output"]:
                yield _document(f"{value['id']}/{i}", turn["output"])
    else:
        yield _document(str(value["document_id"]), value["tokens"], value.get("generation", 0))


def _unnamed(tokens: list[Any], place: str) -> FileDocument:
    digest = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
    return _document(f"{place}:{digest}", tokens)


def _document(document_id: str, tokens: Any, generation: Any = 0) -> FileDocument:
    """A document that fits a message; ValueError if it does not."""
    document_id.encode()
    if type(generation) is not int or not -(2**63) <= generation < 2**63:
        raise ValueError(generation)
    # Numbers that are no integers would become others.
    if type(tokens) is not list or not tokens or any(type(token) is not int for token in tokens):
        raise ValueError(tokens)
    return FileDocument(document_id, tokens, generation)


def write_document(stream: io.TextIOBase | IO[str], document: FileDocument) -> None:
    """Writes one JSON line."""
    fields = {"document_id": document.document_id, "tokens": document.tokens, "generation": document.generation}
    stream.write(json.dumps(fields, separators=(",", ":")) + "\n")
