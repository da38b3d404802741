"""`draftd export` and `import` with Parquet: round trips, what is checked before anything is taken, and what an interruption leaves."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.cli import documents as documents_module
from draftd.server.cli import parquet
from draftd.server.cli.files import Header
from tests.server.harness import DRAFTD, VOCAB, Result, RunningService, clean_environment, draftd, error_of, pack, wait_until
from tests.server.test_security_rpc import Guarded

TEXTS = {f"d{i}": [(7 * i + j) % VOCAB for j in range(1 + i % 9)] for i in range(50)}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with a store and a namespace `full` of 50 documents, in generations 0 and 1, of the tokenizer `tok`."""
    made = RunningService(data_dir=tmp_path_factory.mktemp("store") / "data", max_length=4096, namespace_quotas="killed=4194304")
    made.attach("engine", namespace="full", tokenizer_fingerprint="tok", max_length=16)
    for i, (document_id, tokens) in enumerate(TEXTS.items()):
        if i == 30:
            made.corpus.AdvanceGeneration(pb.AdvanceGenerationRequest(namespace="full", keep_generations=9))
        made.ingest(document_id, tokens, complete=True, namespace="full")
    yield made
    made.close()


def _run(running: RunningService, *arguments: str) -> Result:
    result = draftd(*arguments, "--endpoint", f"unix:{running.config.socket_path()}")
    # The service logs in the same process.
    said = [line for line in result.stderr.splitlines() if "draftd.audit" not in line]
    return Result(result.returncode, result.stdout, "\n".join(said))


def _ok(running: RunningService, *arguments: str) -> str:
    """The standard output of a command that must succeed."""
    result = _run(running, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _refused(running: RunningService, *arguments: str) -> str:
    """The one line of a command that must fail."""
    result = _run(running, *arguments)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1), result.stderr
    return result.stderr


def _documents(running: RunningService, namespace: str) -> dict[str, tuple[bytes, int]]:
    return {
        document.document_id: (document.packed_tokens, document.generation)
        for message in running.corpus.Export(pb.ExportRequest(namespace=namespace))
        for document in message.documents
    }


@pytest.fixture
def file(running: RunningService, tmp_path: Path) -> Path:
    """An export of `full`."""
    path = tmp_path / "full.parquet"
    said = json.loads(_ok(running, "export", str(path), "-n", "full", "--json"))
    assert said == {"namespace": "full", "documents": 50, "tokens": sum(map(len, TEXTS.values())), "generation": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["full.parquet"]
    return path


def _table(**columns: Any) -> pa.Table:
    return pa.table({"document_id": ["a", "b"], "tokens": [[1, 2], [3]], **columns})


# -- round trips -------------------------------------------------------------------------------------------------------------


def test_people_can_open_an_export(file: Path) -> None:
    table = pq.read_table(file)
    assert table.schema.names == ["namespace", "document_id", "generation", "committed_at", "tokens"]
    assert table.schema.field("committed_at").type == pa.timestamp("us", "UTC")
    assert dict(zip(table["document_id"].to_pylist(), table["tokens"].to_pylist(), strict=True)) == TEXTS
    assert table["generation"].to_pylist() == [0] * 30 + [1] * 20
    assert set(table["namespace"].to_pylist()) == {"full"}
    times = table["committed_at"].cast(pa.int64()).to_pylist()
    assert times == sorted(set(times))
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items() if key.startswith(b"draftd.")}
    assert metadata == {
        "draftd.format": "1",
        "draftd.namespace": "full",
        "draftd.vocab_size": str(VOCAB),
        "draftd.tokenizer_fingerprint": "tok",
        "draftd.generation": "1",
    }


def test_import_elsewhere_and_again(running: RunningService, file: Path) -> None:
    tokens = sum(map(len, TEXTS.values()))
    said = json.loads(_ok(running, "import", str(file), "-n", "copy", "--json"))
    assert said == {"namespace": "copy", "documents": 50, "tokens": tokens, "known_documents": 0, "durable": True}
    assert _documents(running, "copy") == _documents(running, "full")
    copy = running.namespace("copy")
    assert (copy.vocab_size, copy.tokenizer_fingerprint, copy.generation) == (VOCAB, "tok", 1)
    assert "imported 0 documents, 0 tokens; 50 were there already" in _ok(running, "import", str(file), "-n", "copy")


def test_import_goes_where_the_export_came_from(running: RunningService, file: Path) -> None:
    assert _ok(running, "import", str(file)) == "imported 0 documents, 0 tokens into full; 50 were there already\n"


def test_row_groups_are_written_and_read_one_by_one(running: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_GROUP_DOCUMENTS", 7)
    monkeypatch.setattr(parquet, "_READ_DOCUMENTS", 5)
    monkeypatch.setattr(documents_module, "_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(documents_module, "_PART_BYTES", 40)
    _ok(running, "export", str(tmp_path / "groups.parquet"), "-n", "full")
    assert pq.ParquetFile(tmp_path / "groups.parquet").num_row_groups == 8
    _ok(running, "import", str(tmp_path / "groups.parquet"), "-n", "groups")
    assert _documents(running, "groups") == _documents(running, "full")


def test_empty_namespace(running: RunningService, tmp_path: Path) -> None:
    running.attach("empty", namespace="empty", max_length=16)
    _ok(running, "export", str(tmp_path / "empty.parquet"), "-n", "empty")
    assert json.loads(_ok(running, "import", str(tmp_path / "empty.parquet"), "-n", "empty-copy", "--json"))["documents"] == 0
    assert running.namespace("empty-copy").vocab_size == VOCAB


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.int32())])
def test_file_that_somebody_else_made(running: RunningService, tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "foreign.parquet"
    table = _table(tokens=pa.array([[1, 2], [3]], kind), document_id=pa.array(["a", "b"], pa.large_string()))
    pq.write_table(table, path, write_statistics=False)
    name = f"foreign-{kind}".replace("<", ".").replace(">", ".").replace(": ", ".")
    assert "says no vocab_size; give --vocab-size" in _refused(running, "import", str(path), "-n", name)
    _ok(running, "import", str(path), "-n", name, "--vocab-size", "10")
    assert _documents(running, name) == {"a": (pack([1, 2]), 0), "b": (pack([3]), 0)}


# -- what is checked before anything is taken --------------------------------------------------------------------------------


def test_file_of_another_vocabulary_or_tokenizer(running: RunningService, file: Path) -> None:
    running.attach("small", namespace="small", vocab_size=VOCAB - 1, max_length=16)
    assert "its vocab_size is 1000; namespace 'small' has 999" in _refused(running, "import", str(file), "-n", "small")
    assert "its vocab_size is 1000, not 999" in _refused(running, "import", str(file), "-n", "nowhere", "--vocab-size", "999")
    running.attach("other", namespace="other", tokenizer_fingerprint="another", max_length=16)
    assert "its tokenizer is not that of namespace 'other'" in _refused(running, "import", str(file), "-n", "other")
    assert _documents(running, "small") == _documents(running, "other") == {}
    assert error_of(lambda: running.namespace("nowhere"))[0] == "NOT_FOUND"


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("token", [10, -1, 2**31])
def test_token_outside_the_vocabulary_is_found_before_anything_is_taken(
    running: RunningService, tmp_path: Path, statistics: bool, token: int
) -> None:
    path = tmp_path / "wrong.parquet"
    table = _table(tokens=pa.array([[1, 2], [token]], pa.list_(pa.int64())))
    pq.write_table(table, path, write_statistics=statistics, row_group_size=1)
    said = _refused(running, "import", str(path), "-n", "wrong", "--vocab-size", "10")
    assert f"has the token {token}, which is not in the vocabulary of 10" in said
    assert error_of(lambda: running.namespace("wrong"))[0] == "NOT_FOUND"


def _with_metadata(table: pa.Table, **metadata: str) -> pa.Table:
    return table.replace_schema_metadata({f"draftd.{name}": value for name, value in metadata.items()})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (_table().drop_columns("tokens"), "has no column tokens"),
        (_table().drop_columns("document_id"), "has no column document_id"),
        (_table(tokens=["1", "2"]), "column tokens is string"),
        (_table(tokens=[[1.5], [2.5]]), "column tokens is list"),
        (_table(document_id=[1, 2]), "column document_id is int64"),
        (_table(generation=["x", "y"]), "column generation is string"),
        (_table(document_id=["a", None]), "has a row with an empty cell"),
        (_table(tokens=[[1], None]), "has a row with an empty cell"),
        (_with_metadata(_table(), format="2"), "has format 2; this version of draftd reads up to 1"),
        (_with_metadata(_table(), format="x"), "metadata is damaged"),
        (_with_metadata(_table(), vocab_size="many"), "metadata is damaged"),
    ],
)
def test_file_that_is_no_corpus(running: RunningService, tmp_path: Path, table: pa.Table, said: str) -> None:
    pq.write_table(table, tmp_path / "bad.parquet")
    assert said in _refused(running, "import", str(tmp_path / "bad.parquet"), "-n", "bad", "--vocab-size", "10")


def test_documents_of_several_namespaces_need_a_choice(running: RunningService, tmp_path: Path) -> None:
    table = _with_metadata(_table(namespace=["one", "two"]), namespace="one", vocab_size="10", format="1")
    pq.write_table(table, tmp_path / "two.parquet")
    assert "has documents of other namespaces than 'one'" in _refused(running, "import", str(tmp_path / "two.parquet"))
    _ok(running, "import", str(tmp_path / "two.parquet"), "-n", "both")
    assert set(_documents(running, "both")) == {"a", "b"}


def test_damaged_files_are_one_line(running: RunningService, file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    rng = random.Random(0)
    right = _documents(running, "full")
    damaged = tmp_path / "damaged.parquet"
    refused = 0
    for i in range(120):
        content = bytearray(whole)
        if i % 3 == 0:
            del content[rng.randrange(len(content)) :]
        else:
            for _ in range(rng.choice([1, 4, 40])):
                content[rng.randrange(len(content))] = rng.randrange(256)
        damaged.write_bytes(content)
        result = _run(running, "import", str(damaged), "-n", f"damaged-{i}")
        assert result.returncode in (0, 1)
        if result.returncode:
            refused += 1
            assert "Traceback" not in result.stderr
            assert result.stderr.startswith("draftd: ") or "documents are in" in result.stderr
    assert refused > 60
    assert _documents(running, "full") == right


def test_missing_file(running: RunningService) -> None:
    assert "/none.parquet: No such file" in _refused(running, "import", "/none.parquet", "-n", "full")
    assert "/none/x.parquet: No such file" in _refused(running, "export", "/none/x.parquet", "-n", "full")


# -- what an interruption leaves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_interrupted_export_leaves_what_was_there(
    running: RunningService, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"out.{suffix}"
    path.write_text("what was there")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parquet.ParquetWriter, "write", interrupt)
    monkeypatch.setattr(documents_module, "write_document", interrupt)
    assert _run(running, "export", str(path), "-n", "full").returncode == 130
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_interrupted_import_goes_on_where_it_was(running: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_READ_DOCUMENTS", 10)
    monkeypatch.setattr(documents_module, "_PART_BYTES", 1)
    texts = [[1, 2, 3]] * 25 + [[4] * 5000] + [[5]] * 4
    table = pa.table({"document_id": [f"d{i}" for i in range(30)], "tokens": texts})
    pq.write_table(table, tmp_path / "long.parquet")
    arguments = ("import", str(tmp_path / "long.parquet"), "-n", "resumed", "--vocab-size", "10")
    result = _run(running, *arguments)
    assert (result.returncode, result.stderr.splitlines()[0]) == (1, "20 documents are in; run the command again to go on")
    assert "documents[5].packed_tokens has 20000 bytes; it must have 1 to max_length=4096 tokens" in result.stderr
    assert len(_documents(running, "resumed")) == 20, "a part of a message was taken"
    pq.write_table(table.set_column(1, "tokens", pa.array([*texts[:25], [4], *texts[26:]])), tmp_path / "long.parquet")
    sent: list[str] = []
    requests = documents_module._requests

    def noted(part: list[list[pb.StoredDocument]], header: Header) -> Iterator[pb.ImportRequest]:
        sent.extend(document.document_id for message in part for document in message)
        return requests(part, header)

    monkeypatch.setattr(documents_module, "_requests", noted)
    assert json.loads(_ok(running, *arguments, "--json")) == {
        "namespace": "resumed",
        "documents": 10,
        "tokens": 20,
        "known_documents": 20,
        "durable": True,
    }
    assert sent == [f"d{i}" for i in range(20, 30)], "what is there need not be sent"
    sent.clear()
    assert json.loads(_ok(running, *arguments, "--json"))["known_documents"] == 30
    assert sent == []


def test_import_that_was_killed_goes_on_where_it_was(running: RunningService, tmp_path: Path) -> None:
    count = 20_000
    with (tmp_path / "long.jsonl").open("w") as lines:
        lines.writelines(json.dumps({"document_id": f"d{i}", "tokens": [i % VOCAB] * 100}) + "\n" for i in range(count))
    arguments = ("import", str(tmp_path / "long.jsonl"), "-n", "killed", "--vocab-size", str(VOCAB))
    killed = subprocess.Popen([*DRAFTD, *arguments, "--endpoint", f"unix:{running.config.socket_path()}"], env=clean_environment())
    wait_until(lambda: [n for n in running.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces if n.name == "killed"], 60)
    killed.kill()
    assert killed.wait(30) == -signal.SIGKILL
    said = json.loads(_ok(running, *arguments, "--json"))
    assert said["known_documents"] > 0
    assert said["documents"] + said["known_documents"] == count
    assert len(_documents(running, "killed")) == count


def _in_a_terminal(running: RunningService, *arguments: str) -> str:
    """What a command writes to standard error where that is a terminal."""
    near, far = pty.openpty()
    command = [*DRAFTD, *arguments, "--endpoint", f"unix:{running.config.socket_path()}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=far, env={**clean_environment(), "TERM": "xterm"}) as started:
        os.close(far)
        shown = b""
        # The other end of a terminal that is gone is an error.
        with contextlib.suppress(OSError):
            while part := os.read(near, 65_536):
                shown += part
    os.close(near)
    assert started.returncode == 0, shown
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())


def test_people_see_how_far_it_is_and_scripts_do_not(running: RunningService, file: Path) -> None:
    for command in ("export", "import"):
        assert re.search(rf"{command} \S+ +50/50 documents", _in_a_terminal(running, command, str(file), "-n", "full"))
        assert "50/50" not in _run(running, command, str(file), "-n", "full").stderr


def test_ids_alone_are_exported_where_tokens_are_not_asked_for(running: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftd.server.rpc.corpus._EXPORT_BYTES", 20)
    answers = list(running.corpus.Export(pb.ExportRequest(namespace="full", ids_only=True)))
    assert len(answers) > 5
    assert all(sum(len(document.document_id) for document in answer.documents) <= 20 for answer in answers)
    documents = [document for answer in answers for document in answer.documents]
    assert [document.document_id for document in documents] == list(TEXTS)
    assert {document.packed_tokens for document in documents} == {b""}


def test_who_may_only_write_imports_without_asking_what_is_there(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, {"writer": {"rights": ["write"], "namespaces": ["a/*"]}})
    try:
        guarded.as_("writer")
        lines = tmp_path / "some.jsonl"
        lines.write_text("\n".join(json.dumps({"document_id": f"d{i}", "tokens": [1, 2]}) for i in range(3)))
        arguments = ("import", str(lines), "-n", "a/x", "--vocab-size", "10", "--json", "--endpoint", guarded.target)
        for documents in (3, 0):
            result = draftd(*arguments, "--token-file", str(tmp_path / "writer.token"))
            assert result.returncode == 0, result.stderr
            said = json.loads(result.stdout[result.stdout.index("{") :])
            assert (said["documents"], said["known_documents"]) == (documents, 3 - documents)
    finally:
        guarded.close()


def test_export_into_what_is_no_file(running: RunningService) -> None:
    _ok(running, "export", "/dev/null", "-n", "full")
