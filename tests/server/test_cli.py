"""The client commands against a running service, as a person types them: output, exit codes, one-line errors."""

import gzip
import io
import json
import sys
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
    assert sorted(item["document_id"].rpartition(":")[0] for item in longest["documents"]) == ["mixed.txt:1", "mixed.txt:3"]
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
    assert [line["document_id"].rpartition(":")[0] for line in lines[:2]] == ["mixed.txt:1", "mixed.txt:3"]
    assert lines[2] == {"document_id": "named", "tokens": list(range(10, 30)), "generation": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["propose", "--tokens", "1,x"], 2, "--tokens must be integers"),
        (["propose"], 2, "give --tokens or --text"),
        (["propose", "--tokens", "1", "--k", "many"], 2, "--k"),
        (["propose", "--tokens", "1", "-n", "nowhere"], 1, "NOT_FOUND: rows[0].namespace 'nowhere' does not exist"),
        (["propose", "--tokens", "100", "-n", "cli"], 1, "INVALID_ARGUMENT: rows[0].tokens[0] is 100"),
        (["propose", "--tokens", ""], 2, "at least one token"),
        (["propose", "1", "2"], 2, "(see draftd propose --help)"),
        (["propose", "--tokens", "1,99999999999999"], 2, "--tokens: [1, 99999999999999] is out of range"),
        (["propose", "--tokens", "1", "--k", "99999999999"], 2, "--k: 99999999999 is out of range"),
        (["propose", "--tokens", "1", "--branches", "99999999999"], 2, "--branches"),
        (["propose", "--tokens", "1", "-n", "x\udcff"], 2, "--namespace: 'x\\udcff' is out of range, or no UTF-8"),
        (["explain", "--tokens", "1", "--limit", "99999999999"], 2, "--limit"),
        (["explain", "--tokens", "1", "--max-depth", "-99999999999"], 2, "--max-depth"),
        (["ingest", "/dev/null", "--vocab-size", "99999999999"], 2, "--vocab-size"),
        (["import", "/dev/null", "--vocab-size", "99999999999"], 2, "--vocab-size"),
        (["export", "-n", "x\udcff"], 2, "--namespace"),
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


@pytest.mark.parametrize(
    "text",
    [
        "1 2 x",
        '{"tokens": [1]}',
        "[1, [2]]",
        "{",
        "[]",
        "[1.5]",
        "[1, true]",
        '{"document_id": "d", "tokens": [99999999999]}',
        '{"document_id": "d", "tokens": []}',
        '{"document_id": "d", "tokens": [1.9]}',
        '{"document_id": "d", "tokens": "12"}',
        '{"document_id": "d", "tokens": [1], "generation": 1.5}',
        '{"id": "s", "turns": [{"output": [0.5]}]}',
    ],
)
@pytest.mark.parametrize("command", ["ingest", "import"])
def test_damaged_file(filled: Process, tmp_path: Path, text: str, command: str) -> None:
    (tmp_path / "damaged").write_text(text)
    code, line = _error(filled, command, str(tmp_path / "damaged"), "-n", "cli")
    assert (code, "damaged:1" in line or "is not an int32" in line) == (1, True), line


@pytest.mark.parametrize("cut", [1, 6, 600])
@pytest.mark.parametrize("command", ["ingest", "import", "replay"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_file_that_is_cut_off(filled: Process, tmp_path: Path, suffix: str, command: str, cut: int) -> None:
    text = "".join(_session(f"{i}", [i % 97, i % 89, i * i % 83]) + "\n" for i in range(1000)).encode()
    whole = gzip.compress(text) if suffix == "gz" else zstandard.compress(text)
    (tmp_path / f"cut.{suffix}").write_bytes(whole[:-cut])
    code, line = _error(filled, command, str(tmp_path / f"cut.{suffix}"), *([] if command == "replay" else ["-n", "cli"]))
    assert (code, f"cut.{suffix}" in line, "ended before" in line) == (1, True, True), line


def test_documents_without_ids_are_told_apart_by_what_is_in_them(filled: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text, kept in (("1 2 3 4\n", 1), ("9 9 9 9\n", 1), ("1 2 3 4\n", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        said = json.loads(_run(filled, "ingest", "-", "-n", "unnamed", "--vocab-size", "100", "--json"))
        assert (said["documents"], said["known_documents"]) == (kept, 1 - kept)
    for folder, text in (("a", "5 6 7\n"), ("b", "[5, 6, 8]\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(text)
        assert "ingested 1 documents" in _run(filled, "ingest", str(tmp_path / folder / "same.txt"), "-n", "unnamed")


def test_a_document_whose_id_is_there_must_be_the_same(filled: Process, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    for tokens, said in (([1, 2, 3], "ingested 1"), ([1, 2, 3], "1 were there"), ([1, 2], "1 were there")):
        file.write_text(json.dumps({"document_id": "one", "tokens": tokens}))
        assert said in _run(filled, "ingest", str(file), "-n", "same", "--vocab-size", "100")
    for tokens, wrong in (([1, 2, 4], "with other tokens"), ([7], "with other tokens"), ([1, 2, 3, 4], "nothing can be appended")):
        file.write_text(json.dumps({"document_id": "one", "tokens": tokens}))
        code, line = _error(filled, "ingest", str(file), "-n", "same")
        assert (code, wrong in line) == (1, True), line


def test_ids_of_others_do_nothing_to_a_terminal(filled: Process, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text(json.dumps({"document_id": "\x1b[31mred\x1b]0;title\x07\u009b", "tokens": [5, 6, 7, 8]}))
    _run(filled, "ingest", str(tmp_path / "odd.jsonl"), "-n", "odd", "--vocab-size", "100", "--wait")
    table = _run(filled, "explain", "--tokens", "5,6,7", "-n", "odd")
    assert "\\x1b[31mred\\x1b]0;title\\x07\\x9b@" in table
    assert not any(character in table for character in "\x1b\x07\x9b")


def test_replay_says_at_once_that_no_service_answers() -> None:
    trace = str(Path(__file__).parents[2] / "samples" / "gsm8k.jsonl.gz")
    result = draftd("replay", trace, "--endpoint", "unix:/none/d.sock")
    assert (result.returncode, "no service answers at unix:/none/d.sock" in result.stderr) == (1, True)
    result = draftd("replay", trace, "--vocab-size", "10")
    assert (result.returncode, "--vocab-size is 10; the trace has token" in result.stderr) == (2, True)


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


def test_help_says_which_extras_to_install() -> None:
    for command in ("serve", "config"):
        said = " ".join(draftd(command, "--help", COLUMNS="200").stdout.split())
        assert all(f"draftd[{extra}]" in said for extra in ("gpu", "nats", "otel"))


def test_version() -> None:
    # A service of another test may log meanwhile.
    assert draftd("--version").stdout.splitlines()[-1].startswith("draftd ")


def test_commands_work_as_processes(filled: Process) -> None:
    result = draftd_process("propose", "--tokens", "10,11,12", "-n", "cli", "--k", "2", DRAFTD_ENDPOINT=filled.target)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("draft          13 14\n")
    result = draftd_process("propose", "--tokens", "x")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
