"""Reading traces: every form of a file, and what is said about a bad one."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from draftd.server.replay.trace import TraceError, load_trace, vocab_size_of

GOOD = b'{"id": "a", "group": "g", "turns": [{"input": [1, 2], "output": [3]}, {"input": [], "output": [9, 4]}]}\n'


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t"])
def test_compression_is_seen_from_the_content(tmp_path: Path, pack: type[bytes], name: str) -> None:
    path = tmp_path / name
    path.write_bytes(pack(GOOD + b"\n" + GOOD))
    first, second = load_trace(str(path))
    assert first.id == second.id == "a"
    assert first.group == "g"
    assert [[turn.input.tolist(), turn.output.tolist()] for turn in first.turns] == [[[1, 2], [3]], [[], [9, 4]]]
    assert first.length == 5
    assert vocab_size_of([first]) == 10
    assert len(load_trace(str(path), limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "a session is"),
        (b'{"id": "a"}', "a session is"),
        (b'{"turns": []}', "turns is empty"),
        (b'{"turns": [1]}', "turns[0] is not an object"),
        (b'{"turns": [{"input": [1]}]}', "turns[0].output is not a list"),
        (b'{"turns": [{"input": [1, -1], "output": []}]}', "turns[0].input[1] is -1"),
        (b'{"turns": [{"input": [], "output": [2097151]}]}', "turns[0].output[0] is 2097151"),
        (b'{"turns": [{"input": [true], "output": []}]}', "turns[0].input[0] is True"),
        (b'{"turns": [{"input": [1.5], "output": []}]}', "turns[0].input[0] is 1.5"),
        (b'{"turns": [{"input": [1], "output": [2]}], "group": "%s"}' % (129 * b"g"), "group has 129 bytes"),
        (b'{"turns": [{"input": [1], "output": [2]}], "group": "\\ud800"}', "surrogates"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(GOOD + line + b"\n")
    with pytest.raises(TraceError, match="t:2: ") as error:
        load_trace(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_truncated_file_is_an_error(tmp_path: Path, pack: type[bytes]) -> None:
    path = tmp_path / "t"
    path.write_bytes(
        pack(b"".join(json.dumps({"turns": [{"input": [i], "output": [i * 7 % 97]}]}).encode() + b"\n" for i in range(5000)))[:-300]
    )
    with pytest.raises(TraceError):
        load_trace(str(path))


@pytest.mark.parametrize(("given", "expected"), [("", ""), ('"group": null,', ""), ('"group": 7,', "7"), ('"group": 0,', "0")])
def test_a_group_is_a_label_or_none(tmp_path: Path, given: str, expected: str) -> None:
    path = tmp_path / "t"
    path.write_text(f'{{{given} "turns": [{{"input": [1], "output": [2]}}]}}')
    assert load_trace(str(path))[0].group == expected


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no session"):
        load_trace(str(path))
