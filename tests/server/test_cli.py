"""The client commands against a running service, as a person types them: output, exit codes, one-line errors."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.server.harness import Process, draftd, draftd_process


def _run(process: Process, *arguments: str) -> str:
    """The standard output of a command that must succeed."""
    result = draftd(*arguments, "--endpoint", process.target)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _error(process: Process, *arguments: str) -> tuple[int, str]:
    """The exit code and the one line of a command that must fail."""
    result = draftd(*arguments, DRAFTD_ENDPOINT=process.target)
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("draftd: ")
    return result.returncode, result.stderr


def _session(name: str, *outputs: list[int]) -> str:
    return json.dumps({"id": name, "group": "g", "turns": [{"input": [1], "output": output} for output in outputs]})


@pytest.fixture(scope="module")
def filled(process: Process, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A service with a namespace `cli` of three documents."""
    file = tmp_path_factory.mktemp("cli") / "mixed.txt"
    document = json.dumps({"document_id": "named", "tokens": list(range(10, 30))})
    file.write_text(f"1 2 3 4 5 6 7 8\n\n1,2,3,4,9\n{document}\n")
    said = _run(process, "ingest", str(file), "-n", "cli", "--vocab-size", "100", "--wait", "--json")
    assert json.loads(said) == {"documents": 3, "tokens": 33, "known_documents": 0}
    return process


def test_propose_from_tokens(filled: Process) -> None:
    answer = json.loads(_run(filled, "propose", "--tokens", "10,11,12,13", "-n", "cli", "--k", "3", "--json"))
    assert answer == {"tokens": [14, 15, 16], "probabilities": [1.0] * 3, "source": "corpus", "match_length": 3, "occurrences": 1}
    text = _run(filled, "propose", "--tokens", "10 11 12 13", "-n", "cli", "--k", "3")
    assert "14 15 16" in text
    assert "corpus: match of 3 tokens, 1 occurrences" in text
    assert _run(filled, "propose", "--tokens", "99", "-n", "cli") == "no draft\n"


def test_propose_from_text(filled: Process, tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = ["propose", "--text", "w10 w11 w12", "--tokenizer", str(tmp_path / "tokenizer.json"), "-n", "cli", "--k", "2"]
    assert json.loads(_run(filled, *arguments, "--json"))["text"] == "w13 w14"
    assert "'w13 w14'" in _run(filled, *arguments)
    code, said = _error(filled, "propose", "--text", "w10")
    assert (code, "--text needs --tokenizer" in said) == (2, True)
    (tmp_path / "broken.json").write_text("{}")
    code, said = _error(filled, "propose", "--text", "x", "--tokenizer", str(tmp_path / "broken.json"))
    assert (code, "not a tokenizer.json" in said) == (1, True)


def test_explain(filled: Process) -> None:
    answer = json.loads(_run(filled, "explain", "--tokens", "0,2,3,4", "-n", "cli", "--json"))
    longest = answer["matches"][0]
    assert (longest["source"], longest["length"], longest["occurrences"]) == ("corpus", 3, 2)
    assert sorted((item["token"], item["count"]) for item in longest["next_tokens"]) == [(5, 1), (9, 1)]
    assert sorted(item["document_id"] for item in longest["documents"]) == ["mixed.txt:1", "mixed.txt:3"]
    table = _run(filled, "explain", "--tokens", "0,2,3,4", "-n", "cli", "--limit", "1")
    assert "occurrences" in table
    assert "1 more" in table
    assert "mixed.txt:" in table


def test_status(filled: Process) -> None:
    answer = json.loads(_run(filled, "status", "--json"))
    assert (answer["endpoint"], answer["health"]) == (filled.target, "SERVING")
    (namespace,) = [item for item in answer["namespaces"] if item["name"] == "cli"]
    assert (namespace["documents"], namespace["tokens"], namespace["vocab_size"], namespace["attachments"]) == (3, 33, 100, 0)
    table = _run(filled, "status")
    assert "SERVING" in table
    assert "cli" in table


def test_ingest_of_a_trace_takes_each_output_once(process: Process, tmp_path: Path) -> None:
    text = "\n".join([_session("s0", [1, 2, 3], [4, 5]), _session("s1", [6]), _session("s2", [])])
    (tmp_path / "plain.jsonl").write_text(text)
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "trace.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    for name, kept in (("trace.jsonl.gz", 3), ("trace.jsonl.zst", 0), ("plain.jsonl", 0)):
        said = _run(process, "ingest", str(tmp_path / name), "-n", "trace", "--vocab-size", "100", "--json")
        assert json.loads(said) == {"documents": kept, "tokens": 2 * kept, "known_documents": 3 - kept}
    assert "0 were there already" not in _run(process, "ingest", str(tmp_path / "plain.jsonl"), "-n", "trace")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_export_and_import(filled: Process, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"out.{suffix}"
    _run(filled, "export", str(file), "-n", "cli")
    name = f"copy-{suffix}"
    assert "imported 3 documents, 33 tokens; 0 were there" in _run(filled, "import", str(file), "-n", name, "--vocab-size", "100")
    assert "imported 0 documents, 0 tokens; 3 were there" in _run(filled, "import", str(file), "-n", name)
    lines = [json.loads(line) for line in _run(filled, "export", "-", "-n", name).splitlines()]
    assert [line["document_id"] for line in lines] == ["mixed.txt:1", "mixed.txt:3", "named"]
    assert lines[2] == {"document_id": "named", "tokens": list(range(10, 30)), "generation": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["propose", "--tokens", "1,x"], 2, "--tokens must be integers"),
        (["propose"], 2, "give --tokens or --text"),
        (["propose", "--tokens", "1", "--k", "many"], 2, "--k"),
        (["propose", "--tokens", "1", "-n", "nowhere"], 1, "NOT_FOUND: rows[0].namespace 'nowhere' does not exist"),
        (["propose", "--tokens", "100", "-n", "cli"], 1, "INVALID_ARGUMENT: rows[0].tokens[0] is 100"),
        (["propose", "--tokens", "1", "--k", "100"], 1, "INVALID_ARGUMENT: parameters.k is 100; it must be in [1, 64]"),
        (["ingest", "/none", "-n", "cli"], 1, "/none: No such file"),
        (["ingest", "/dev/null/x", "-n", "cli"], 1, "/dev/null/x"),
        (["export", "-n", "nowhere"], 1, "NOT_FOUND"),
        (["export", "/none/out.gz", "-n", "cli"], 1, "/none/out.gz: No such file"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_failure_is_one_line_and_an_exit_code(filled: Process, arguments: list[str], code: int, said: str) -> None:
    got, line = _error(filled, *arguments)
    assert (got, said in line) == (code, True), line


@pytest.mark.parametrize("text", ["1 2 x", '{"tokens": [1]}', "[1, [2]]", "{", '{"document_id": "d", "tokens": [99999999999]}'])
@pytest.mark.parametrize("command", ["ingest", "import"])
def test_damaged_file(filled: Process, tmp_path: Path, text: str, command: str) -> None:
    (tmp_path / "damaged").write_text(text)
    code, line = _error(filled, command, str(tmp_path / "damaged"), "-n", "cli")
    assert (code, "damaged:1" in line or "is not an int32" in line) == (1, True), line


def test_file_cut_off_in_the_middle(filled: Process, tmp_path: Path) -> None:
    whole = gzip.compress(b"1 2 3\n" * 1000)
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    code, line = _error(filled, "ingest", str(tmp_path / "cut.gz"), "-n", "cli")
    assert (code, "cut.gz" in line) == (1, True)


def test_no_service() -> None:
    result = draftd("status", "--endpoint", "unix:/none/d.sock")
    assert result.returncode == 1
    assert result.stderr == "draftd: no service answers at unix:/none/d.sock; start one with `draftd serve`, or give --endpoint\n"


@pytest.mark.parametrize(
    "command", ["", "serve", "status", "selftest", "replay", "propose", "explain", "ingest", "export", "import", "config"]
)
def test_help(command: str) -> None:
    result = draftd(*([command] if command else []), "--help")
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    if not command:
        for name in ("serve", "status", "selftest", "replay", "propose", "explain", "ingest", "export", "import", "config", "bench"):
            assert name in result.stdout


def test_version() -> None:
    # A service of another test may log meanwhile.
    assert draftd("--version").stdout.splitlines()[-1].startswith("draftd ")


def test_commands_work_as_processes(filled: Process) -> None:
    result = draftd_process("propose", "--tokens", "10,11,12", "-n", "cli", "--k", "2", DRAFTD_ENDPOINT=filled.target)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("draft          13 14\n")
    result = draftd_process("propose", "--tokens", "x")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
