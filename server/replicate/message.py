"""What a message in the stream says: a committed document, or how far a namespace's generation is. Its subject, headers and body.

Nothing that comes is trusted: whatever does not fit is a Refused with a reason, before any of it is used.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.layout import MAX_DOCUMENT_ID_BYTES
from draftd.drafter.params import MAX_VOCAB
from draftd.drafter.records import check_tokens
from draftd.server.names import check_fingerprint, check_name
from draftd.server.store.codec import Codec

FORMAT = "1"
MAX_GENERATION = 2**30
"""Well below what an int32 holds, so that the namespace can still be advanced."""
REASONS = ("format", "malformed", "size", "vocabulary", "tokenizer", "generation", "room")
"""Why a message is refused: a format of another version; no valid message; longer than max_length; another vocabulary size or tokenizer
than the namespace's; a generation that was given up; no room for another namespace."""

_ID = "Nats-Msg-Id"
_NODE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PLAIN = re.compile(r"[A-Za-z0-9_-]")
_DECIMAL = re.compile(r"[0-9]{1,10}")


class Refused(Exception):
    """A message that this service cannot take; `reason` is one of REASONS, the text says more and names no content."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Origin:
    """Who published a message: a node, and which run of its service."""

    node: str
    run: str


@dataclass(frozen=True, slots=True)
class Message:
    """A committed document, or a namespace's generation where `tokens` is None.

    Attributes:
        tokens: int32 [n], all in the vocabulary.
        evict_before: Generations below this were given up; only without tokens.
    """

    origin: Origin
    namespace: str
    vocab_size: int
    fingerprint: str
    generation: int
    document_id: str = ""
    tokens: NDArray[np.int32] | None = None
    evict_before: int = 0

    def content_id(self) -> str:
        """128 bits in hex, the same whoever publishes this content and whenever: BLAKE2b of namespace, id, and tokens."""
        hashed = hashlib.blake2b(digest_size=16)
        if self.tokens is None:
            hashed.update(f"generation\n{self.namespace}\n{self.generation}\n{self.evict_before}".encode())
        else:
            # An id may hold any character, so its length is part of it.
            hashed.update(f"document\n{self.namespace}\n{len(self.document_id)}\n{self.document_id}\n".encode())
            hashed.update(self.tokens.astype("<i4", copy=False).tobytes())
        return hashed.hexdigest()


@lru_cache(maxsize=4096)
def subject_of(stream: str, namespace: str) -> str:
    """The subject of a namespace: one token after the stream's name, in which what NATS gives a meaning is written as =XX."""
    return f"{stream}.{''.join(c if _PLAIN.fullmatch(c) else f'={ord(c):02X}' for c in namespace)}"


@lru_cache(maxsize=4096)
def namespace_of(stream: str, subject: str) -> str:
    """The namespace of a subject; Refused if it is none."""
    token = subject.removeprefix(f"{stream}.")
    try:
        namespace = check_name(re.sub("=([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), token), "namespace")
    except InvalidArgument:
        namespace = ""
    # The way back must lead to the same subject, so that a namespace has one.
    if not namespace or subject_of(stream, namespace) != subject:
        raise Refused("malformed", "the subject names no namespace")
    return namespace


def packed(stream: str, message: Message, codec: Codec) -> tuple[str, dict[str, str], bytes]:
    """Subject, headers and body."""
    headers = {
        _ID: message.content_id(),
        "Draftd-Format": FORMAT,
        "Draftd-Node": message.origin.node,
        "Draftd-Run": message.origin.run,
        "Draftd-Vocabulary": str(message.vocab_size),
        "Draftd-Generation": str(message.generation),
    }
    if message.fingerprint:
        headers["Draftd-Tokenizer"] = quote(message.fingerprint, safe="")
    if message.tokens is None:
        headers["Draftd-Evict-Before"] = str(message.evict_before)
        return subject_of(stream, message.namespace), headers, b""
    headers["Draftd-Document"] = quote(message.document_id, safe="")
    headers["Draftd-Tokens"] = str(len(message.tokens))
    return subject_of(stream, message.namespace), headers, codec.pack(message.tokens)


def origin_of(headers: Mapping[str, str] | None) -> Origin:
    """Who published it; Refused unless it is of this format."""
    if not headers or "Draftd-Format" not in headers:
        raise Refused("malformed", "there is no Draftd-Format header")
    if headers["Draftd-Format"] != FORMAT:
        raise Refused("format", f"its format is not {FORMAT}; another version of draftd wrote it")
    return Origin(_matching(headers, "Draftd-Node", _NODE_NAME), _matching(headers, "Draftd-Run", _RUN))


def unpacked(stream: str, subject: str, headers: Mapping[str, str] | None, body: bytes, max_tokens: int, codec: Codec) -> Message:
    """The message, checked; Refused if it is none, or has more than `max_tokens` tokens."""
    origin = origin_of(headers)
    assert headers is not None
    namespace = namespace_of(stream, subject)
    vocab_size = _number(headers, "Draftd-Vocabulary", 1, MAX_VOCAB)
    generation = _number(headers, "Draftd-Generation", 0, MAX_GENERATION)
    fingerprint = _text(headers, "Draftd-Tokenizer")
    try:
        check_fingerprint(fingerprint)
    except InvalidArgument:
        raise Refused("malformed", "Draftd-Tokenizer is too long") from None
    if "Draftd-Document" in headers:
        document_id = _text(headers, "Draftd-Document")
        if not 1 <= len(document_id.encode()) <= MAX_DOCUMENT_ID_BYTES:
            raise Refused("malformed", f"Draftd-Document has not 1 to {MAX_DOCUMENT_ID_BYTES} bytes")
        tokens = _tokens(body, _number(headers, "Draftd-Tokens", 1, 2**31 - 1), max_tokens, vocab_size, codec)
        message = Message(origin, namespace, vocab_size, fingerprint, generation, document_id, tokens)
    else:
        evict_before = _number(headers, "Draftd-Evict-Before", 0, generation)
        message = Message(origin, namespace, vocab_size, fingerprint, generation, evict_before=evict_before)
    if headers.get(_ID) != message.content_id():
        raise Refused("malformed", f"{_ID} is not that of its content")
    return message


def _tokens(body: bytes, count: int, max_tokens: int, vocab_size: int, codec: Codec) -> NDArray[np.int32]:
    if count > max_tokens:
        raise Refused("size", f"it has {count} tokens; max_length is {max_tokens}")
    try:
        tokens = codec.unpack(body, count)
        check_tokens(tokens, vocab_size)
    except ValueError:
        raise Refused("malformed", f"its body is not {count} tokens") from None
    except InvalidArgument as error:
        raise Refused("malformed", str(error)) from None
    return tokens


def _number(headers: Mapping[str, str], name: str, low: int, high: int) -> int:
    value = int(_matching(headers, name, _DECIMAL))
    if not low <= value <= high:
        raise Refused("malformed", f"{name} is not in [{low}, {high}]")
    return value


def _matching(headers: Mapping[str, str], name: str, pattern: re.Pattern[str]) -> str:
    value = headers.get(name, "")
    if not pattern.fullmatch(value):
        raise Refused("malformed", f"{name} is missing or malformed")
    return value


def _text(headers: Mapping[str, str], name: str) -> str:
    try:
        return unquote(headers.get(name, ""), errors="strict")
    except UnicodeDecodeError:
        raise Refused("malformed", f"{name} is not UTF-8") from None
