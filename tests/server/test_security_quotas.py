"""What one principal may hold of what the service has few of, and that raising a generation is an admin's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import VOCAB, RunningService, Stubs, draftd, error_of, pack, wait_until
from tests.server.test_security_rpc import Guarded, token_file

BOTH = ["read", "write"]
PRINCIPALS: dict[str, dict[str, Any]] = {
    "small": {"rights": BOTH, "namespaces": ["s/*"], "max_attachments": 2, "max_namespaces": 3},
    "sibling": {"rights": BOTH, "namespaces": ["s/*"], "max_namespaces": 3},
    "usual": {"rights": BOTH, "namespaces": ["u/*"]},
    "free": {"rights": BOTH, "namespaces": ["*"], "max_attachments": 0, "max_namespaces": 0},
    "chief": {"rights": [*BOTH, "admin"], "namespaces": ["s/*", "g/*"]},
    "writer": {"rights": ["write"], "namespaces": ["g/*"]},
}


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Guarded]:
    """A service with PRINCIPALS, where who says nothing has a quota of one."""
    running = Guarded(tmp_path, PRINCIPALS, quota_attachments=1, quota_namespaces=1)
    yield running
    running.close()


def _detach(stubs: Stubs, attachment_id: str) -> None:
    stubs.drafter.Detach(pb.DetachRequest(attachment_id=attachment_id))


def _import(namespace: str, *generations: int) -> Iterator[pb.ImportRequest]:
    documents = [
        pb.StoredDocument(document_id=f"d{i}-{generation}", packed_tokens=pack([1, 2]), generation=generation)
        for i, generation in enumerate(generations)
    ]
    yield pb.ImportRequest(namespace=namespace, vocab_size=VOCAB, documents=documents)


def test_attachments_are_counted_for_each_principal(limited: Guarded) -> None:
    small, usual, free = limited.as_("small"), limited.as_("usual"), limited.as_("free")
    first = small.attach("e1", namespace="s/a").attachment_id
    small.attach("e2", namespace="s/a")
    code, message = error_of(lambda: small.attach("e3", namespace="s/a"))
    assert (code, message) == ("RESOURCE_EXHAUSTED", "engine: 'small' has 2 attachments; its limit is max_attachments=2")
    usual.attach("e1", namespace="u/a")
    assert "max_attachments=1" in error_of(lambda: usual.attach("e2", namespace="u/a"))[1]
    for i in range(4):
        free.attach(f"e{i}", namespace="u/a")
    _detach(small, first)
    small.attach("e3", namespace="s/a")


def test_namespaces_are_counted_by_what_the_patterns_fit_whoever_made_them(limited: Guarded) -> None:
    small, sibling = limited.as_("small"), limited.as_("sibling")
    attachment = small.attach("e", namespace="s/a", extra_namespaces=["s/b"]).attachment_id
    sibling.ingest("d", [1], namespace="s/c", vocab_size=VOCAB)
    said = "namespace 's/d' would be one more than max_namespaces=3, the limit of 'small'; 3 that its patterns fit exist"
    for call in (
        lambda: small.ingest("d", [1], namespace="s/d", vocab_size=VOCAB),
        lambda: small.attach("e2", namespace="s/a", extra_namespaces=["s/d"]),
        lambda: small.drafter.Heartbeat(pb.HeartbeatRequest(attachment_id=attachment, extra_namespaces=["s/d"])),
        lambda: small.corpus.Import(_import("s/d", 0)),
    ):
        assert error_of(call) == ("RESOURCE_EXHAUSTED", said)
    assert not limited.service.corpus.has_namespace("s/d")
    # Those that exist are used as before, those of others do not count, and what is dropped makes room.
    small.ingest("d", [1], namespace="s/c")
    limited.as_("free").ingest("d", [1], namespace="elsewhere", vocab_size=VOCAB)
    limited.as_("chief").corpus.DropNamespace(pb.DropNamespaceRequest(namespace="s/c"))
    small.ingest("d", [1], namespace="s/d", vocab_size=VOCAB)


def test_namespaces_that_are_asleep_count(tmp_path: Path) -> None:
    running = Guarded(tmp_path, PRINCIPALS, data_dir=tmp_path / "data", idle_namespace_s=0.05, quota_namespaces=1)
    try:
        usual = running.as_("usual")
        usual.ingest("d", [1, 2], namespace="u/a", vocab_size=VOCAB, complete=True, wait_durable=True)
        # To list namespaces is no use of them, as to ask for one is.
        wait_until(lambda: [n.asleep for n in running.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces] == [True])
        assert "max_namespaces=1" in error_of(lambda: usual.ingest("d", [1], namespace="u/b", vocab_size=VOCAB))[1]
        usual.ingest("d2", [1, 2], namespace="u/a", vocab_size=VOCAB)
    finally:
        running.close()


def test_without_tokens_all_callers_of_tcp_share_the_quotas() -> None:
    running = RunningService(listen="127.0.0.1:0", insecure=True, quota_attachments=1)
    try:
        remote = Stubs(f"127.0.0.1:{running.service.listen_port}")
        remote.attach("a")
        assert "'anonymous' has 1 attachments" in error_of(lambda: remote.attach("b"))[1]
        # Callers of the socket are the service's own user.
        running.attach("a")
        running.attach("b")
        remote.channel.close()
    finally:
        running.close()


def test_raising_a_generation_by_import_needs_admin(limited: Guarded) -> None:
    chief, writer = limited.as_("chief"), limited.as_("writer")
    chief.ingest("old", [1, 2, 3], namespace="g/x", vocab_size=VOCAB, complete=True)
    code, message = error_of(lambda: writer.corpus.Import(_import("g/x", 0, 7)))
    assert (code, message) == (
        "PERMISSION_DENIED",
        "documents[1].generation is 7, namespace 'g/x' is at 0: to raise it, the token of 'writer' lacks the right 'admin'",
    )
    state = chief.namespace("g/x")
    assert (state.generation, state.documents) == (0, 1), "nothing of the message is taken"
    assert writer.corpus.Import(_import("g/x", 0)).documents == 1
    assert chief.corpus.Import(_import("g/x", 7)).documents == 1
    assert chief.namespace("g/x").generation == 7
    assert writer.corpus.Import(_import("g/x", 6, 7)).documents == 2


def test_a_token_is_made_with_its_quotas(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    made = draftd("token", "t", "-r", "read", "-n", "a/*", "--max-attachments", "4", "--max-namespaces", "2", "--append", str(file))
    assert made.returncode == 0, made.stderr
    assert "max_attachments = 4\nmax_namespaces = 2\n" in file.read_text()
    assert draftd("token", "t", "-r", "read", "-n", "").returncode == 2
    refused = draftd("token", "t", "-r", "read", "-n", "a/*", "--max-attachments", "-1")
    assert (refused.returncode, "max_attachments" in refused.stderr) == (2, True)
    assert token_file(tmp_path, PRINCIPALS).exists()
