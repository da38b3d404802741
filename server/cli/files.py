"""Files of documents: reading what people have, writing what `export` gives; gzip and zstd by suffix, `-` for standard streams."""

import contextlib
import gzip
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from draftd.server.cli.failure import Failure

STANDARD = "-"


@dataclass(frozen=True, slots=True)
class FileDocument:
    """One document of a file: its id, its tokens, and its generation if the file says."""

    document_id: str
    tokens: list[int]
    generation: int = 0


@contextlib.contextmanager
def open_text(path: str, mode: str) -> Iterator[IO[str]]:
    """A text stream to read ("r") or write ("w"); Failure if it cannot be opened or is damaged."""
    if path == STANDARD:
        yield sys.stdin if mode == "r" else sys.stdout
        return
    try:
        with _open(path, mode) as stream:
            yield stream
    except (OSError, EOFError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise Failure(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _open(path: str, mode: str) -> IO[str]:
    if path.endswith(".gz"):
        return cast(IO[str], gzip.open(path, mode + "t", encoding="utf-8"))
    if path.endswith(".zst"):
        return cast(IO[str], zstandard.open(path, mode + "t", encoding="utf-8"))
    return Path(path).open(mode, encoding="utf-8")


def read_documents(stream: IO[str], name: str) -> Iterator[FileDocument]:
    """Documents of a stream, one or more a line.

    A line is a JSON object with `document_id` and `tokens`, a trace session with `id` and `turns` (each turn's output is a document), a
    JSON list of token ids, or token ids separated by commas or blanks. Lines without an id are named after the file and the line.
    """
    for number, line in enumerate(stream, 1):
        if text := line.strip():
            try:
                yield from _documents(text, f"{Path(name).name}:{number}")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise Failure(f"{name}:{number}: neither token ids nor a JSON document nor a trace session") from None


def _documents(text: str, default_id: str) -> Iterator[FileDocument]:
    if text[0] not in "{[":
        yield FileDocument(default_id, [int(part) for part in text.replace(",", " ").split()])
        return
    value: Any = json.loads(text)
    if isinstance(value, list):
        yield FileDocument(default_id, [int(token) for token in value])
    elif "turns" in value:
        for i, turn in enumerate(value["turns"]):
            if turn["output"]:
                yield FileDocument(f"{value['id']}/{i}", [int(token) for token in turn["output"]])
    else:
        yield FileDocument(str(value["document_id"]), [int(token) for token in value["tokens"]], int(value.get("generation", 0)))


def write_document(stream: io.TextIOBase | IO[str], document: FileDocument) -> None:
    """Writes one JSON line."""
    fields = {"document_id": document.document_id, "tokens": document.tokens, "generation": document.generation}
    stream.write(json.dumps(fields, separators=(",", ":")) + "\n")
