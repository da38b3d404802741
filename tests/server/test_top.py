"""`draftd top`: what it prints for scripts, what it shows in a terminal of 80 x 24, its keys, and what it says when nobody answers."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.cli.top_screen import ENGINE_COLUMNS, NAMESPACE_COLUMNS, View, screen
from draftd.server.security.tokens import hash_of
from tests.server.harness import DRAFTD, REFRAIN, RunningService, clean_environment, draftd, wait_until

COLUMNS, LINES = 80, 24


@pytest.fixture(scope="module")
def watched() -> Iterator[RunningService]:
    """A service with two engines, which have had drafts verified."""
    running = RunningService()
    running.seed()
    for name in ("one", "two"):
        attachment = running.attach(name, namespace=f"space/{name}").attachment_id
        for i in range(3):
            running.propose(
                [pb.Row(document_id="d", offset=6 * i, tokens=REFRAIN[6 * i : 6 * i + 6], prompt_length=0 if i else 6)], attachment
            )
    running.on_loop(running.service.telemetry.update)
    wait_until(lambda: len(json.loads(running.get("/v1/history"))["samples"]) > 1)
    yield running
    running.close()


def url(service: RunningService) -> str:
    return f"http://127.0.0.1:{service.service.http_port}"


def test_json_is_for_scripts(watched: RunningService) -> None:
    done = draftd("top", "--http", url(watched), "--json", "--window", "900")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["ready"], figures["run"]) == (True, watched.service.corpus.instance)
    assert [engine["engine"] for engine in figures["engines"]] == ["one", "two"]
    assert {space["name"] for space in figures["namespaces"]} == {"default", "space/one", "space/two"}
    assert figures["totals"]["proposals"] == 6
    assert figures["propose"]["inline"]["p50_s"] > 0
    assert figures["events"][0]["kind"] == "attach"
    (default,) = [space for space in figures["namespaces"] if space["name"] == "default"]
    assert (default["tokens"], default["acceptance_length"]) == (len(REFRAIN), None)


def test_once_prints_the_screen(watched: RunningService) -> None:
    for arguments in (("--once",), ()):  # what is not written to a terminal is written once
        done = draftd("top", "--http", url(watched), *arguments)
        assert done.returncode == 0, done.stderr
        assert "READY" in done.stdout
        assert re.search(r"^one +inline +space/one +1/4", done.stdout, re.MULTILINE)
        assert "attached over inline" in done.stdout
    by_namespace = draftd("top", "--http", url(watched), "--by", "namespace").stdout
    assert "default" in by_namespace
    assert "space/two" in by_namespace


def test_sorting(watched: RunningService) -> None:
    reverse = json.loads(draftd("top", "--http", url(watched), "--json", "--reverse").stdout)
    assert [engine["engine"] for engine in reverse["engines"]] == ["two", "one"]
    by_tokens = json.loads(draftd("top", "--http", url(watched), "--json", "--by", "namespace", "--sort", "tokens").stdout)
    assert by_tokens["namespaces"][0]["name"] == "default"
    wrong = draftd("top", "--http", url(watched), "--sort", "colour")
    assert wrong.returncode == 2
    assert "none of engine, transport" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--http", "http://127.0.0.1:1"), 1, "no service answers at http://127.0.0.1:1"),
        (("--http", "http://nowhere.invalid:1"), 1, "no service answers at"),
        (("--http", "127.0.0.1:9464"), 2, "is no http:// or https:// URL"),
        (("--http", "ftp://127.0.0.1"), 2, "is no http:// or https:// URL"),
        (("--window", "1"), 2, "--window"),
        (("--token-file", "/nowhere"), 2, "/nowhere"),
        (("--http", "https://127.0.0.1:1", "--tls-ca", "/nowhere"), 2, "/nowhere"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = draftd("top", *arguments, "--once")
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_something_else_that_answers_is_no_service(watched: RunningService) -> None:
    done = draftd("top", "--http", url(watched) + "/elsewhere", "--once")
    assert done.returncode == 1
    assert "answers 404" in done.stderr


def test_token_is_sent_where_it_is_safe(tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.write_text(f'[tokens.me]\nsha256 = "{hash_of("secret")}"\nrights = ["read"]\nnamespaces = ["*"]\n')
    mine.write_text("secret\n")
    for file in (tokens, mine):
        file.chmod(0o600)
    running = RunningService(token_file=tokens)
    try:
        refused = draftd("top", "--http", url(running), "--once")
        assert refused.returncode == 1
        assert "a token is needed" in refused.stderr
        assert draftd("top", "--http", url(running), "--once", "--token-file", str(mine)).returncode == 0
        assert draftd("top", "--http", url(running), "--once", DRAFTD_CLIENT_TOKEN_FILE=str(mine)).returncode == 0
        clear = draftd("top", "--http", "http://192.0.2.1:9464", "--once", "--token-file", str(mine))
        assert clear.returncode == 2
        assert "over TLS only" in clear.stderr
    finally:
        running.close()


class Terminal:
    """`draftd top` in a terminal of 80 x 24."""

    def __init__(self, *arguments: str) -> None:
        self._fd, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(other)
        self._other = other
        self.process = subprocess.Popen(
            [*DRAFTD, "top", *arguments], stdin=other, stdout=other, stderr=other, env={**clean_environment(), "TERM": "xterm"}
        )
        self.text = ""

    def shows(self, wanted: str) -> bool:
        """Reads for a moment; the text has been on the screen since the last `forget`."""
        if select.select([self._fd], [], [], 0.05)[0]:
            self.text += os.read(self._fd, 65_536).decode(errors="replace")
        return wanted in self.text

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self._fd, keys.encode())

    def modes(self) -> Any:
        return termios.tcgetattr(self._other)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
        os.close(self._other)


@pytest.fixture
def terminal(watched: RunningService) -> Iterator[Terminal]:
    started = Terminal("--http", url(watched))
    wait_until(lambda: started.shows("READY"), 30)
    yield started
    started.close()


def test_keys(terminal: Terminal) -> None:
    wait_until(lambda: terminal.shows("LEASE"))
    terminal.press("n")
    wait_until(lambda: terminal.shows("QUOTA USED"))
    terminal.press("w")
    wait_until(lambda: terminal.shows("last 300 s"))
    terminal.press("e")
    wait_until(lambda: terminal.shows("LEASE"))
    terminal.press("rsx?")
    wait_until(lambda: terminal.shows("READY"))
    terminal.press("q")
    wait_until(lambda: terminal.shows("\x1b[?1049l") and terminal.process.poll() is not None)
    assert terminal.process.returncode == 0
    # The terminal is as it was: keys are shown again, and wait for the end of the line.
    assert terminal.modes() == terminal.before


def test_interrupt_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGINT)
    wait_until(lambda: terminal.shows("\x1b[?1049l") and terminal.process.poll() is not None)
    assert terminal.process.returncode == 0
    assert "Traceback" not in terminal.text
    assert terminal.modes() == terminal.before


def test_service_that_goes_is_said_to_be_gone() -> None:
    running = RunningService()
    terminal = Terminal("--http", url(running))
    try:
        wait_until(lambda: terminal.shows("READY"), 30)
    finally:
        running.close()
    try:
        wait_until(lambda: terminal.shows("NO ANSWER for"))
        terminal.press("q")
        wait_until(lambda: terminal.shows("\x1b[?1049l") and terminal.process.poll() is not None)
    finally:
        terminal.close()


def _figures(engines: int) -> dict[str, Any]:
    none: dict[str, Any] = {"acceptance_length": None, "acceptance_rate": None, "proposals_per_s": None, "committed_tokens_per_s": 0.0}
    engine = {"transport": "mapped", "rows": 12, "max_rows": 1024, "lease_left_ms": -5, "fail_opens": 123_456, **none}
    space = {"tokens": 4_000_000, "quota_tokens": 4_194_304, "documents": 1_234_567, "open_documents": 9, "evicted_tokens": 10**10}
    latency = {"count": 1, "p50_s": 0.000021, "p99_s": 0.01}
    return {
        "version": "0.1.0",
        "run": "0123456789abcdef",
        "ready": True,
        "uptime_s": 1e6,
        **none,
        "propose": {"handle": latency, "inline": latency, "mapped": latency},
        "visibility": latency,
        "refresh": {"full": latency, "live": latency, "merge": latency, "recent": latency},
        "store": {"bytes": 10**9, "pending_documents": 0, "failure": ""},
        "engines": [
            engine | {"engine": f"engine-with-a-long-name-{i:03}", "namespaces": ["model/adapter/tenant" * 3] * 2} for i in range(engines)
        ],
        "namespaces": [space | none | {"name": f"model/adapter/tenant-{i:03}", "generation": 0, "attachments": 3} for i in range(engines)],
        "asleep": [],
    }


@pytest.mark.parametrize("by", ["engine", "namespace"])
@pytest.mark.parametrize("engines", [0, 1, 300])
def test_screen_fits_80_by_24(by: str, engines: int) -> None:
    event = {"last_s": time.time(), "kind": "fail-open", "level": "warning", "subject": "n" * 60, "text": "t" * 90, "amount": 1234}
    console = Console(width=COLUMNS, height=LINES, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    console.print(screen(_figures(engines), [event] * 50, View(by=by), LINES - 1, 3.0))
    lines = console.export_text().splitlines()
    assert len(lines) <= LINES - 1
    assert max(len(line) for line in lines) <= COLUMNS
    text = "\n".join(lines)
    assert "NO ANSWER for 3 s" in text
    if engines == 300:
        assert re.search(r"and 29\d more", text)
        for column in ENGINE_COLUMNS if by == "engine" else NAMESPACE_COLUMNS:
            assert column.heading in text
        assert ("123K" if by == "engine" else "1.23M") in text


def test_missing_figures_come_last_and_are_no_zero() -> None:
    rows = [{"engine": name, "acceptance_length": value} for name, value in (("a", None), ("b", 0.0), ("c", 2.0))]
    assert [row["engine"] for row in View(sort="acceptance_length").sorted(rows)] == ["c", "b", "a"]
    assert [row["engine"] for row in View(sort="acceptance_length", reverse=True).sorted(rows)] == ["b", "c", "a"]
    cells = {row["engine"]: next(c for c in ENGINE_COLUMNS if c.key == "acceptance_length").cell(row) for row in rows}
    assert cells == {"a": "-", "b": "0.00", "c": "2.00"}
