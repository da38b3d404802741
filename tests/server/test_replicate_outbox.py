"""What waits to be sent is named, not copied, and leaves the outbox exactly once; and what replication is told by its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.documents import Document
from draftd.drafter.keeper import Keepers, KeptNamespace
from draftd.server.config import ServerConfig
from draftd.server.replicate.mark import Mark
from draftd.server.replicate.opening import replication_settings
from draftd.server.replicate.outbox import Outbox
from draftd.server.replicate.settings import ReplicationSettings, node_name, servers_of
from draftd.server.security.files import FileRefused

SETTINGS = ReplicationSettings(("nats://a:1",), "S", "n")


def _document(number: int) -> Document:
    return Document(str(number), "", 0, length=1, committed=True, committed_us=number)


def _namespace(key: int, generation: int = 0, evict_before: int = 0, name: str = "n") -> KeptNamespace:
    return KeptNamespace(key, name, 9, "", generation, evict_before)


def _outbox() -> Outbox:
    return Outbox(lambda name: name != "unwanted")


@given(st.lists(st.sampled_from(["commit", "evict", "take", "sent", "back"]), max_size=40), st.integers(1, 3))
def test_every_document_is_sent_or_evicted_in_the_end(steps: list[str], most: int) -> None:
    outbox, sent, evicted, number = _outbox(), list[int](), set[int](), 0
    taken: list[int] = []
    for step in [*steps, *["back"], *(["take", "sent"] * 60)]:
        if step == "commit":
            number += 1
            outbox.committed(0, _document(number))
        elif step == "evict" and number:
            if number not in [*sent, *taken]:
                evicted.add(number)
            outbox.evicted(0, _document(number))
        elif step == "take" and not taken:
            taken = list(outbox.take(most).documents)
            assert taken == sorted(taken)
        elif step == "sent":
            sent += taken
            outbox.sent()
            taken = []
        elif step == "back":
            outbox.put_back()
            taken = []
        assert len(outbox) == number - len(sent) - len(evicted)
    assert sent == sorted(sent)
    assert sorted([*sent, *evicted]) == list(range(1, number + 1))
    assert outbox.never_sent == len(evicted)
    assert not outbox
    assert (outbox.age_s(), outbox.oldest_us()) == (0.0, None)


def test_what_was_received_is_not_sent_back() -> None:
    outbox = _outbox()
    with outbox.receiving():
        outbox.committed(0, _document(1))
        outbox.namespace_changed(_namespace(0, 3, 1))
    assert not outbox
    outbox.namespace_changed(_namespace(0, 3, 1))
    assert not outbox
    outbox.committed(0, _document(2))
    outbox.namespace_changed(_namespace(0, 4, 1))
    batch = outbox.take(9)
    assert (list(batch.documents), list(batch.generations)) == ([2], [0])


def test_generation_is_told_when_it_rises_and_never_of_what_is_gone() -> None:
    outbox = _outbox()
    outbox.namespace_changed(_namespace(1))
    assert not outbox
    outbox.namespace_changed(_namespace(1, 1))
    outbox.namespace_changed(_namespace(1, 2))
    outbox.namespace_changed(_namespace(2, 2))
    outbox.namespace_dropped(2)
    assert list(outbox.take(9).generations.values()) == [_namespace(1, 2)]
    outbox.namespace_changed(_namespace(1, 3))
    outbox.put_back()
    assert list(outbox.take(9).generations.values()) == [_namespace(1, 3)]


def test_namespace_that_is_not_replicated_is_left_out() -> None:
    outbox = _outbox()
    outbox.namespace_changed(_namespace(1, name="unwanted"))
    outbox.namespace_changed(_namespace(1, 5, name="unwanted"))
    outbox.committed(1, _document(1))
    assert not outbox


def test_several_keepers_are_told_the_same() -> None:
    told: list[tuple[str, str]] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, call: str) -> Any:
            return lambda *_: told.append((self._name, call))

    keepers = Keepers(Listener("a"), Listener("b"))
    keepers.namespace_changed(_namespace(1))
    keepers.namespace_dropped(1)
    keepers.committed(1, _document(1))
    keepers.evicted(1, _document(1))
    calls = ["namespace_changed", "namespace_dropped", "committed", "evicted"]
    assert told == [(name, call) for call in calls for name in "ab"]


@pytest.mark.parametrize(
    "urls",
    ["http://a:1", "nats://a", "a:1", "nats://a:99999", "nats://:1", "nats://a:1,tls://b:1", "nats://a b:1", "nats://a:1/x", "nats://a:x"],
)
def test_wrong_servers_are_refused(urls: str) -> None:
    with pytest.raises(ValueError, match="replicate"):
        ServerConfig(replicate=urls)


def test_secret_in_a_url_is_refused_and_not_said() -> None:
    with pytest.raises(ValueError, match="replicate_credentials"):
        servers_of("nats://user:hunter2@a:1")
    with pytest.raises(ValueError, match="replicate") as refused:
        servers_of("nats://hunter2@a:1")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicate_stream": "a.b"},
        {"replicate_stream": ""},
        {"node_name": "a b"},
        {"replicate_tls_ca": "ca.pem"},
        {"replicate": "tls://a:1", "replicate_tls_cert": "c.pem"},
        {"replicate_credentials": "file"},
        {"replicate_max_bytes": 1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))[:9]):
        ServerConfig(**wrong)


def test_settings_of_replication() -> None:
    assert replication_settings(ServerConfig()) is None
    settings = replication_settings(
        ServerConfig(replicate="nats://a:1, nats://[::1]:2", replicate_namespaces="team-*, exact", node_name="n")
    )
    assert settings is not None
    assert (settings.servers, settings.node, settings.stream) == (("nats://a:1", "nats://[::1]:2"), "n", "DRAFTD")
    assert [settings.wants(name) for name in ("team-a", "exact", "exactly", "other")] == [True, True, False, False]
    assert SETTINGS.wants("any")
    assert (settings.exact_namespaces(), SETTINGS.exact_namespaces()) == ([], [])


def test_host_name_becomes_a_name_that_nats_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-7.rack.example.com")
    assert node_name("") == "gpu-7-rack-example-com"
    assert node_name("given.name") == "given-name"
    assert len({node_name("x" * 200 + end) for end in "ab"}) == 2
    assert len(node_name("x" * 200)) == 64


@pytest.mark.parametrize(
    "text", ["", "user = 'a'", "token = 5", "token = ''", "user = 'a'\npassword = 'b'\ntoken = 'c'", "not toml", "x = 'hunter2'"]
)
def test_wrong_credentials_are_refused_without_being_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "nats.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(FileRefused) as refused:
        ReplicationSettings(("nats://a:1",), "S", "n", credentials=file).secrets()
    assert "hunter2" not in str(refused.value)


def test_credentials_that_others_can_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "nats.toml"
    file.write_text("token = 't'")
    file.chmod(0o644)
    with pytest.raises(FileRefused, match="mode is 0644"):
        ReplicationSettings(("nats://a:1",), "S", "n", credentials=file).secrets()


def test_mark_is_that_of_one_stream_and_node(tmp_path: Path) -> None:
    mark = Mark(tmp_path, SETTINGS)
    assert mark.read() is None
    mark.write(50_000_000)
    assert mark.read() == 49_000_000
    mark.write(50_500_000)
    assert mark.read() == 49_000_000
    for other in (ReplicationSettings(("nats://a:1",), "S", "m"), ReplicationSettings(("nats://a:1",), "T", "n")):
        assert Mark(tmp_path, other).read() is None
    for text in ("", "[]", "{}", "5", json.dumps({"published_us": "x"})):
        (tmp_path / "replication.json").write_text(text)
        assert mark.read() is None
