"""docs/protocol.md shows what grpcurl really answers: its calls are run again, in order, against a fresh service."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Process, short_directory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"

# Values that differ from run to run; that they are there, and of what type, is compared all the same.
VOLATILE = {
    "attachment_id",
    "instance",
    "version",
    "versions",
    "bytes",
    "quota_tokens",
    "lease_ms",
    "server_id",
    "socket_id",
    "name",
    "creation_timestamp",
    "committed_us",
    "timestamp",
    "last_call_started_timestamp",
    "calls_started",
    "calls_succeeded",
}


def _calls() -> list[tuple[str, str]]:
    """The page's commands and their output."""
    calls = []
    for block in PAGE.read_text().split("```console\n")[1:]:
        command, _, output = block.partition("```")[0].partition("\n")
        assert command.startswith("$ grpcurl ")
        calls.append((command[2:], output.strip()))
    return calls


def _same(shown: Any, got: Any, key: str = "") -> None:
    """Asserts that two JSON values are alike, but for values that differ from run to run."""
    assert type(shown) is type(got), key
    if isinstance(shown, dict):
        assert shown.keys() == got.keys(), key
        for name in shown:
            _same(shown[name], got[name], name)
    elif isinstance(shown, list):
        assert len(shown) == len(got), key
        for left, right in zip(shown, got, strict=True):
            _same(left, right, key)
    elif key not in VOLATILE:
        # Mixed probabilities are what the machine's logarithm makes of them.
        assert shown == (pytest.approx(got, abs=1e-4) if isinstance(got, float) else got), key


def _values(text: str) -> list[Any]:
    """The JSON values of an output, which for a stream are several; none if it is not JSON."""
    values = []
    decoder = json.JSONDecoder()
    while text.startswith("{"):
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].strip()
    return [] if text else values


def test_calls_answer_as_shown() -> None:
    calls = _calls()
    assert len(calls) >= 15
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    assert shutil.which("grpcurl", path=tools), "grpcurl comes with the dev extra"
    with short_directory() as directory:
        shm = Path("/dev/shm") / directory.name
        process = Process(directory, "--http", "off", "--shm-root", str(shm), "--lease-ms", "600000", "--policy", "calibrated").wait_ready()
        try:
            environment = {**os.environ, "PATH": tools, "SOCKET": str(process.socket)}
            for command, shown in calls:
                run = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=60, check=False)
                got = (run.stdout + run.stderr).strip()
                assert (run.returncode == 0) != shown.startswith("ERROR"), got
                if _values(shown):
                    assert len(_values(shown)) == len(_values(got)), got
                    _same(_values(shown), _values(got))
                else:
                    assert got == shown
        finally:
            process.stop()
            shutil.rmtree(shm, ignore_errors=True)


def test_page_names_every_rpc_and_transport() -> None:
    text = PAGE.read_text()
    for word in ("Attach", "Detach", "Heartbeat", "Propose", "ProposeStream", "Ingest", "Harvest", "ListNamespaces", "DropNamespace"):
        assert word in text
    for word in ("AdvanceGeneration", "Explain", "Export", "Import", "MAPPED", "HANDLE", "INLINE"):
        assert word in text
