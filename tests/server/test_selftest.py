"""`draftd selftest`, as a person types it: what it shows, and how it exits."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftd.server.cli import selftest
from tests.client.test_gpus import FakeDriver
from tests.server.harness import Process, draftd


def _json(*arguments: str) -> tuple[int, Any]:
    result = draftd("selftest", "--json", *arguments)
    return result.returncode, json.loads(result.stdout)


def test_this_machine_can_map_from_a_service_that_runs(process: Process) -> None:
    result = draftd("selftest", "--device", "cpu", "--endpoint", process.target)
    assert result.returncode == 0, result.stdout
    said = " ".join(result.stdout.split())
    for line in (
        "mapped on the CPU ok works here",
        "handle on the CPU ok works here",
        f"answers at {process.target.removeprefix('unix:')}",
    ):
        assert line in said, result.stdout


def test_a_service_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    code, said = _json("--device", "cpu", "--endpoint", f"unix:{tmp_path}/nobody")
    assert code == 1
    assert said["abilities"]["mapped on the CPU"] == {"possible": False, "reasons": [f"service: none at {tmp_path}/nobody"]}
    code, said = _json("--device", "cpu")
    assert (code, said["ok"]) == (0, True)


def test_a_gpu_that_is_asked_for_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftd.client.gpus._version", lambda _: "1.0")
    monkeypatch.setattr(selftest, "load_driver", lambda: None)
    assert _json("--device", "cuda")[0] == 1
    assert _json("--device", "auto")[0] == 0
    monkeypatch.setattr(selftest, "load_driver", FakeDriver)
    code, said = _json("--device", "cuda")
    assert (code, sorted(said["abilities"])) == (0, ["handle on cuda:0", "mapped on cuda:0"])
    monkeypatch.setattr(selftest, "load_driver", lambda: FakeDriver(failing=("cuIpcGetMemHandle",)))
    code, said = _json()
    assert (code, said["abilities"]["handle on cuda:0"]["possible"]) == (1, False)


def test_a_device_that_is_none_is_a_wrong_call() -> None:
    assert draftd("selftest", "--device", "tpu").returncode == 2
