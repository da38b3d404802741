"""Files of documents that are damaged in any way: the command says what is wrong in one line, and the service takes nothing invalid."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.fuzz.conftest import fuzz_settings
from tests.server.harness import REFRAIN, VOCAB, RunningService, draftd, short_directory

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
LINES = (
    "{",
    "[1, 2, 3",
    '{"document_id": "x"}',
    '{"document_id": "x", "tokens": "1"}',
    '{"document_id": "x", "tokens": [1e400]}',
    '{"document_id": "x", "tokens": [-1]}',
    '{"document_id": "x", "tokens": [99999999999999999999]}',
    '{"document_id": "", "tokens": [1]}',
    '{"document_id": "x", "tokens": [1], "generation": -5}',
    '{"document_id": "x", "tokens": [1], "generation": 1e30}',
    '{"id": "x", "turns": [{"output": null}]}',
    '{"id": "x", "turns": 7}',
    '{"document_id": "\\ud800", "tokens": [1]}',
    "[" * 100_000,
    "9" * 10_000,
    "1,,2",
    "\x00",
    "nan",
)


@pytest.fixture(scope="module")
def exported(service: RunningService) -> Iterator[dict[str, bytes]]:
    """The same corpus in each format that is read."""
    for i in range(5):
        service.ingest(f"document-{i}", REFRAIN[i:], namespace="exported", vocab_size=VOCAB, complete=True, wait_visible=True)
    endpoint = f"unix:{service.config.socket_path()}"
    with short_directory() as directory:
        files = {}
        for suffix in SUFFIXES[:-1]:
            path = directory / f"corpus{suffix}"
            result = draftd("export", str(path), "-n", "exported", "--endpoint", endpoint)
            assert result.returncode == 0, result.stderr
            files[suffix] = path.read_bytes()
        files[".txt"] = b"1,2,3\n4 5 6\n"
        yield files


def _import(service: RunningService, data: bytes, suffix: str) -> None:
    """Imports a file that may be anything; afterwards the namespace is gone."""
    endpoint = f"unix:{service.config.socket_path()}"
    with short_directory() as directory:
        path = directory / f"damaged{suffix}"
        path.write_bytes(data)
        result = draftd("import", str(path), "-n", "imported", "--vocab-size", str(VOCAB), "--endpoint", endpoint)
    assert result.returncode in (0, 1), result
    if result.returncode:
        complaints = [line for line in result.stderr.splitlines() if line.startswith("draftd: ")]
        assert len(complaints) == 1, result.stderr
        assert len(complaints[0]) <= 2000
        assert "internal error" not in complaints[0]
    assert "Traceback" not in result.stderr + result.stdout
    if any(n.name == "imported" for n in service.corpus.ListNamespaces(pb.ListNamespacesRequest()).namespaces):
        for answer in service.corpus.Export(pb.ExportRequest(namespace="imported")):
            for document in answer.documents:
                assert 1 <= len(document.document_id.encode()) <= 128
                assert document.packed_tokens
        service.corpus.DropNamespace(pb.DropNamespaceRequest(namespace="imported"))
    sentinel = pb.Row(tokens=REFRAIN[:5], namespace="sentinel")
    assert list(service.propose([sentinel], k=8).drafts[0].tokens) == REFRAIN[5:13]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("damage", ["none", "empty", "half", "end", "begin", "twice", "zeros"])
def test_file_cut_and_pasted(service: RunningService, exported: dict[str, bytes], suffix: str, damage: str) -> None:
    whole = exported[suffix]
    damaged = {
        "none": whole,
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "end": whole[:-3],
        "begin": whole[3:],
        "twice": whole + whole,
        "zeros": bytes(len(whole)),
    }
    _import(service, damaged[damage], suffix)


@fuzz_settings
@given(source=st.randoms(use_true_random=False), suffix=st.sampled_from(SUFFIXES))
def test_file_with_changed_bytes(service: RunningService, exported: dict[str, bytes], source: random.Random, suffix: str) -> None:
    data = bytearray(exported[suffix])
    for _ in range(source.randint(1, 8)):
        at = source.randrange(len(data))
        data[at] = source.randrange(256)
    _import(service, bytes(data), suffix)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_of_another_format(service: RunningService, exported: dict[str, bytes], suffix: str) -> None:
    for other in SUFFIXES:
        _import(service, exported[other], suffix)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_line_that_is_no_document(service: RunningService, line: str) -> None:
    _import(service, (line + "\n").encode("utf-8", "surrogatepass"), ".jsonl")


@fuzz_settings
@given(data=st.binary(max_size=500), suffix=st.sampled_from(SUFFIXES))
def test_any_bytes(service: RunningService, data: bytes, suffix: str) -> None:
    _import(service, data, suffix)


def test_path_that_is_no_file(service: RunningService, tmp_path: Path) -> None:
    endpoint = f"unix:{service.config.socket_path()}"
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.parquet"):
        result = draftd("import", str(path), "--vocab-size", "10", "--endpoint", endpoint)
        assert (result.returncode, len(result.stderr.splitlines())) == (1, 1), result.stderr
