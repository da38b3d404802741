"""Traces: recorded sessions of token ids, one JSON object a line, plain, gzip or zstd, from a file or standard input.

A line is `{"id": ..., "group": ..., "turns": [{"input": [ids], "output": [ids]}]}`; a turn's context is all before it plus its input.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.groups import check_group
from draftd.drafter.params import MAX_VOCAB
from draftd.server.zstd import open_zstd

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


class TraceError(Exception):
    """A trace cannot be read; the message names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: int32 [n] tokens put in, int32 [m] tokens that came out."""

    input: NDArray[np.int32]
    output: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Session:
    """A recorded session: its id, its turns, each of which begins with the whole session so far, and what sessions of one prompt share."""

    id: str
    turns: tuple[Turn, ...]
    group: str = ""

    @property
    def length(self) -> int:
        """Tokens in all."""
        return sum(len(turn.input) + len(turn.output) for turn in self.turns)


def load_trace(path: str, limit: int | None = None) -> list[Session]:
    """The first `limit` sessions of a file, all if None; `-` is standard input. Compression is seen from the content.

    Raises:
        TraceError: It cannot be opened, is damaged, or a line is not a session.
    """
    name = "standard input" if path == "-" else path
    sessions: list[Session] = []
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(_lines(stream), 1):
                if limit is not None and len(sessions) == limit:
                    break
                if line.strip():
                    sessions.append(_session(line, f"{name}:{number}"))
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        where = f"{name}, after line {number}" if number else name
        raise TraceError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if not sessions:
        raise TraceError(f"{name}: there is no session in it")
    return sessions


def vocab_size_of(sessions: list[Session]) -> int:
    """The smallest vocabulary that has all tokens."""
    return 1 + max((int(part.max()) for s in sessions for t in s.turns for part in (t.input, t.output) if len(part)), default=0)


def _open(path: str) -> BinaryIO:
    return sys.stdin.buffer if path == "-" else Path(path).open("rb")


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    buffered = io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream
    start = buffered.peek(4)[:4] if isinstance(buffered, io.BufferedReader) else b""
    if start.startswith(_GZIP):
        yield from gzip.GzipFile(fileobj=buffered)
    elif start.startswith(_ZSTD):
        yield from open_zstd(buffered)
    else:
        yield from buffered


def _session(line: bytes, where: str) -> Session:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("turns"), list):
        raise TraceError(f'{where}: a session is {{"id": ..., "turns": [{{"input": [ids], "output": [ids]}}]}}')
    turns = [_turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(record["turns"])]
    if not turns:
        raise TraceError(f"{where}: turns is empty")
    group = "" if record.get("group") is None else str(record["group"])
    try:
        check_group(group)
    except (InvalidArgument, UnicodeEncodeError) as error:
        raise TraceError(f"{where}: {error}") from None
    return Session(str(record.get("id", "")), tuple(turns), group)


def _turn(record: Any, where: str) -> Turn:
    if not isinstance(record, dict):
        raise TraceError(f"{where} is not an object")
    return Turn(_tokens(record, "input", where), _tokens(record, "output", where))


def _tokens(record: dict[str, Any], name: str, where: str) -> NDArray[np.int32]:
    given = record.get(name)
    if not isinstance(given, list):
        raise TraceError(f"{where}.{name} is not a list of token ids")
    for i, token in enumerate(given):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < MAX_VOCAB:
            raise TraceError(f"{where}.{name}[{i}] is {token!r}; it must be an integer in [0, {MAX_VOCAB})")
    return np.array(given, np.int32)
