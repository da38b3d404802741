"""What travels between services: a message says what it was made of, and whatever is not one is refused with a reason and nothing else."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from draftd.server.replicate.message import MAX_GENERATION, REASONS, Message, Origin, Refused, namespace_of, packed, subject_of, unpacked
from draftd.server.store.codec import Codec

ORIGIN = Origin("node-1", "run")
CODEC = Codec()
NAMES = st.text("abcXYZ019._:/-", min_size=1, max_size=128)
TOKENS = st.lists(st.integers(0, 999), min_size=1, max_size=60).map(lambda values: np.array(values, np.int32))
IDS = st.text(min_size=1, max_size=30).filter(lambda text: not any(0xD800 <= ord(c) <= 0xDFFF for c in text))


def _message(tokens: list[int] | None = None, **fields: object) -> Message:
    given: dict[str, object] = {"namespace": "a/b.c", "vocab_size": 1000, "fingerprint": "", "generation": 3, "document_id": "d"} | fields
    return Message(ORIGIN, tokens=np.array(tokens or [1, 2, 3], np.int32), **given)  # type: ignore[arg-type]


def _refused(subject: str, headers: dict[str, str] | None, body: bytes, max_tokens: int = 100) -> str:
    with pytest.raises(Refused) as refused:
        unpacked("S", subject, headers, body, max_tokens, CODEC)
    assert refused.value.reason in REASONS
    return refused.value.reason


@given(NAMES, NAMES)
def test_namespace_has_one_subject_of_one_token(name: str, other: str) -> None:
    subject = subject_of("S", name)
    assert namespace_of("S", subject) == name
    assert subject.count(".") == 1
    assert not set(subject) & set(" *>\r\n\t")
    assert (subject_of("S", other) == subject) == (other == name)


@pytest.mark.parametrize("subject", ["S.", "S", "T.a", "S.a.b", "S.=2e", "S.=2", "S.=41", "S.=00", "S.*", "S." + "a" * 129, "S.é", ""])
def test_subject_that_no_service_writes_is_refused(subject: str) -> None:
    with pytest.raises(Refused):
        namespace_of("S", subject)


@given(NAMES, IDS, TOKENS, st.text(max_size=20).filter(lambda t: t.isprintable()), st.integers(0, MAX_GENERATION))
def test_document_comes_out_as_it_went_in(namespace: str, document_id: str, tokens: np.ndarray, fingerprint: str, generation: int) -> None:
    message = Message(ORIGIN, namespace, 1000, fingerprint, generation, document_id, tokens)
    subject, headers, body = packed("S", message, CODEC)
    assert all(value.isascii() and value.isprintable() and value == value.strip() for value in headers.values())
    back = unpacked("S", subject, headers, body, 60, CODEC)
    assert back.tokens is not None
    assert np.array_equal(back.tokens, tokens)
    for name in ("origin", "namespace", "vocab_size", "fingerprint", "generation", "document_id"):
        assert getattr(back, name) == getattr(message, name)


def test_generation_comes_out_as_it_went_in() -> None:
    message = Message(ORIGIN, "n", 1000, "", 7, evict_before=5)
    subject, headers, body = packed("S", message, CODEC)
    assert unpacked("S", subject, headers, body, 1, CODEC) == message


def test_content_id_is_that_of_the_content_alone() -> None:
    one = _message([1, 2, 3]).content_id()
    other_node = Message(Origin("node-2", "other"), "a/b.c", 1000, "tokenizer", 9, "d", np.array([1, 2, 3], np.int32))
    assert other_node.content_id() == one
    differing = [_message([1, 2, 4]), _message(namespace="a/b.d"), _message(document_id="e"), _message(document_id="d\n1\n2")]
    assert len({one, *(message.content_id() for message in differing)}) == 5


@pytest.mark.parametrize(
    ("header", "value", "reason"),
    [
        ("Draftd-Format", None, "malformed"),
        ("Draftd-Format", "2", "format"),
        ("Draftd-Node", "", "malformed"),
        ("Draftd-Run", "a b", "malformed"),
        ("Draftd-Vocabulary", "0", "malformed"),
        ("Draftd-Vocabulary", "2", "malformed"),
        ("Draftd-Vocabulary", "99999999999999999999", "malformed"),
        ("Draftd-Vocabulary", "\u0661\u0662", "malformed"),
        ("Draftd-Generation", "-1", "malformed"),
        ("Draftd-Generation", str(MAX_GENERATION + 1), "malformed"),
        ("Draftd-Tokenizer", "x" * 300, "malformed"),
        ("Draftd-Tokenizer", "%ff", "malformed"),
        ("Draftd-Document", "", "malformed"),
        ("Draftd-Document", "x" * 129, "malformed"),
        ("Draftd-Document", "%ff", "malformed"),
        ("Draftd-Document", "other", "malformed"),
        ("Draftd-Document", None, "malformed"),
        ("Draftd-Tokens", "2", "malformed"),
        ("Draftd-Tokens", "101", "size"),
        ("Draftd-Tokens", None, "malformed"),
        ("Nats-Msg-Id", "0" * 32, "malformed"),
        ("Nats-Msg-Id", None, "malformed"),
    ],
)
def test_wrong_header_is_refused(header: str, value: str | None, reason: str) -> None:
    subject, headers, body = packed("S", _message(), CODEC)
    if value is None:
        del headers[header]
    else:
        headers[header] = value
    assert _refused(subject, headers, body) == reason


def test_body_of_another_size_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(2**28))
    assert len(bomb) < 2**17
    subject, headers, _ = packed("S", _message(), CODEC)
    assert _refused(subject, headers, bomb) == "malformed"
    liar = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(12))
    assert _refused(subject, headers, liar) == "malformed"


@given(
    st.binary(max_size=80), st.dictionaries(st.sampled_from(["Draftd-Format", "Draftd-Node", "Draftd-Tokens", "X"]), st.text(max_size=9))
)
@example(b"", {})
def test_whatever_else_comes_is_refused(body: bytes, headers: dict[str, str]) -> None:
    _refused("S.n", headers, body)
    _refused("S.n", None, body)


@given(st.data())
def test_damaged_body_is_refused(data: st.DataObject) -> None:
    subject, headers, body = packed("S", _message(list(range(50))), CODEC)
    at = data.draw(st.integers(0, len(body) - 1))
    damaged = body[:at] + bytes([body[at] ^ data.draw(st.integers(1, 255))]) + body[at + 1 :]
    with contextlib.suppress(Refused):
        # A bit of the frame may say nothing of the content.
        message = unpacked("S", subject, headers, damaged, 100, CODEC)
        assert message.content_id() == _message(list(range(50))).content_id()
