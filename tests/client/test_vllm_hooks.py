"""The vLLM plugin without vLLM: its entry point, and what it changes of vLLM's classes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftd.client.vllm import plugin
from draftd.client.vllm.plugin import AfterImport, is_known
from draftd.client.vllm.runner import hook_runner
from draftd.client.vllm.scheduler import DISCARDED, ends_of, hook_scheduler, salt_of, salted
from tests.client.fake_vllm import (
    FakeSession,
    FakeStock,
    Output,
    make,
    new_request,
    req_states,
    told,
)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


class FakeScheduler:
    """vLLM's Scheduler, as far as it is hooked."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.next = Output()

    def schedule(self, throttle_prefills: bool = False) -> Output:
        output, self.next = self.next, Output()
        return output

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> str:
        self.next.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]
        return "freed"

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        self.next.preempted_req_ids = {request.request_id}


def scheduled(name: str, tokens: int, salt: str | None = None, status: str = "FINISHED_STOPPED") -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_tokens=tokens, cache_salt=salt, status=SimpleNamespace(name=status))


def test_the_scheduler_tells_lengths_and_salts() -> None:
    class Scheduler(FakeScheduler):
        pass

    hook_scheduler(Scheduler)
    scheduler = Scheduler()
    for request in (scheduled("a", 9), scheduled("b", 5), scheduled("c", 7, status="FINISHED_ERROR"), scheduled("d", 1, "pepper")):
        scheduler.requests[request.request_id] = request
    scheduler.next.scheduled_new_reqs = [new_request("a", [1]), new_request("d", [1])]
    output = pickle.loads(pickle.dumps(scheduler.schedule()))
    assert ends_of(output) == {}
    assert salt_of(output, "a") == ""
    assert salt_of(output, "d") == salted("pepper")
    assert scheduler._free_request(scheduler.requests["a"], delay_free_blocks=False) == "freed"
    scheduler._preempt_request(scheduler.requests["b"], 1.0)
    scheduler._free_request(scheduler.requests["c"])
    output = scheduler.schedule()
    assert ends_of(output) == {"a": 9, "b": 5, "c": DISCARDED}
    assert ends_of(scheduler.schedule()) == {}


def test_an_output_of_another_scheduler_tells_nothing() -> None:
    assert ends_of(Output()) == {}
    assert salt_of(Output(), "a") is None


class FakeRunner:
    """vLLM's GPUModelRunner, as far as it is hooked."""

    def __init__(self, speculator: Any) -> None:
        self.speculator = speculator
        self.req_states = req_states()
        self.log: list[str] = []

    def finish_requests(self, scheduler_output: Output) -> None:
        self.log.append("finish")

    def add_requests(self, scheduler_output: Output) -> None:
        for i, new in enumerate(scheduler_output.scheduled_new_reqs):
            self.req_states.req_id_to_index[new.req_id] = i
        self.log.append("add")

    def shutdown(self) -> None:
        self.log.append("shutdown")


def test_the_runner_tells_its_speculator(session: FakeSession) -> None:
    class Runner(FakeRunner):
        pass

    hook_runner(Runner)
    runner = Runner(make(session))
    runner.add_requests(told(Output([new_request("a", [1, 2])])))
    runner.finish_requests(told(Output(finished_req_ids={"a"}), {"a": 4}))
    runner.shutdown()
    assert session.calls == [("start", 0, [1, 2], "model", False, 2), ("finish", 0, 4, False)]
    assert session.closed
    assert runner.log == ["add", "finish", "shutdown"]


def test_a_runner_with_another_speculator_is_left_alone() -> None:
    class Runner(FakeRunner):
        pass

    hook_runner(Runner)
    for speculator in (None, FakeStock()):
        runner = Runner(speculator)
        runner.add_requests(told(Output([new_request("a", [1])])))
        runner.finish_requests(told(Output(finished_req_ids={"a"})))
        runner.shutdown()
        assert runner.log == ["add", "finish", "shutdown"]


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts Python's finders of modules back after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def installed() -> int:
    return sum(isinstance(finder, AfterImport) for finder in sys.meta_path)


@pytest.mark.usefixtures("finders")
def test_without_an_endpoint_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTD_ENDPOINT", raising=False)
    monkeypatch.setattr(plugin, "installed_release", lambda: "0.33.0")
    plugin.register()
    assert installed() == 0


@pytest.mark.usefixtures("finders")
def test_the_plugin_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/s")
    monkeypatch.setattr(plugin, "installed_release", lambda: "0.33.0+cu130")
    plugin.register()
    plugin.register()
    assert installed() == 1


@pytest.mark.usefixtures("finders")
def test_other_releases_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DRAFTD_ENDPOINT", "unix:/s")
    monkeypatch.setattr(plugin, "installed_release", lambda: "0.34.1")
    plugin.register()
    assert installed() == 0
    assert [record.message for record in caplog.records] == [
        "draftd does not know vLLM 0.34.1, only 0.33: vLLM runs as it is, without draftd"
    ]


def test_the_package_names_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"draftd": f"{plugin.__name__}:{plugin.register.__name__}"}


def test_loading_the_plugin_is_cheap() -> None:
    code = (
        "import sys; from draftd.client.vllm.plugin import register; register();"
        "print([name for name in ('torch', 'numba', 'numpy', 'grpc') if name in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DRAFTD_ENDPOINT"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_releases_that_are_known() -> None:
    assert [is_known(release) for release in ("0.33", "0.33.0", "0.33.2+cu130", "0.330.1", "0.34.0", "1.0", "?")] == [True] * 3 + [
        False
    ] * 4


@pytest.mark.usefixtures("finders")
def test_modules_are_changed_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("draftd_test_later", "draftd_test_sooner", "draftd_test_broken"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    changed: list[str] = []

    def change(module: Any) -> None:
        changed.append(module.__name__)
        module.value += 1

    def fail(module: Any) -> None:
        raise AttributeError("no such class")

    sooner = __import__("draftd_test_sooner")
    AfterImport({"draftd_test_later": change, "draftd_test_sooner": change, "draftd_test_broken": fail}).install()
    assert (sooner.value, changed) == (2, ["draftd_test_sooner"])
    assert __import__("draftd_test_later").value == 2
    assert __import__("draftd_test_broken").value == 1
    assert "draftd cannot change draftd_test_broken" in caplog.text
    for name in ("draftd_test_later", "draftd_test_sooner", "draftd_test_broken"):
        del sys.modules[name]
