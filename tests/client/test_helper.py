"""The helper process of an engine that drafts on a GPU: what it is told, and what becomes of the engine when it dies or stands still."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.client import helper_process as module
from draftd.client.config import ClientConfig
from draftd.client.credentials import Credentials
from draftd.client.failopen import FailOpen
from draftd.client.frames import Frames, encode
from draftd.client.helper import Greeting
from draftd.client.helper_block import HelperBlock
from draftd.client.helper_process import HelperProcess
from draftd.drafter.errors import FailedPrecondition, InvalidArgument
from draftd.drafter.ops.collect.ring import RingShape
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import FAIL_OPEN_REASONS
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

SHAPE = RingShape(2, 4, teaching=False)
CONFIG = ClientConfig(
    endpoint="unix:/tmp/nobody.sock", engine="here", vocab_size=100, k=4, max_rows=2, max_length=64, namespace="default",
    extra_namespaces=(), transport="mapped", timeout_ms=2.0, params=DraftParams(k=4), tokenizer_fingerprint="", strict=False,
    credentials=Credentials(), device_uuid="ab" * 16,
)  # fmt: skip
GREETING = Greeting(CONFIG, SHAPE, np.zeros(2, np.int64), log_level=logging.INFO)
STRICT = replace(GREETING, config=replace(CONFIG, strict=True))


def helper_of(greeting: Greeting, block: HelperBlock | None = None) -> HelperProcess:
    return HelperProcess(block or HelperBlock.create(SHAPE), lambda: greeting, lambda message: None)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    """One whose drafter raises."""
    made = helper_of(STRICT)
    yield made
    made.close()


@given(st.lists(st.tuples(st.text(), st.integers(), st.binary(max_size=3000)), max_size=8), st.integers(1, 5000))
def test_messages_come_out_as_they_went_in(messages: list[tuple[str, int, bytes]], size: int) -> None:
    data = b"".join(map(encode, messages))
    frames = Frames()
    assert [m for at in range(0, len(data), size) for m in frames.feed(data[at : at + size])] == messages


def test_what_a_strict_drafter_raises_reaches_the_engine(helper: HelperProcess) -> None:
    helper.ask("start", 0, 1, np.arange(5), "a", None, False, None)
    with pytest.raises(InvalidArgument, match="tokens has 100"):
        helper.ask("start", 1, 1, np.array([100]), "b", None, False, None)
    with pytest.raises(InvalidArgument, match="row is 7"):
        helper.ask("start", 7, 1, np.arange(5), "b", None, False, None)
    with pytest.raises(InvalidArgument, match="namespace"):
        helper.ask("start", 1, 1, np.arange(5), "b", "nobodys", False, None)
    helper.ask("committed", 0, np.arange(3))
    helper.ask("finish", 0, None, False)
    for what, arguments in (("finish", (0, None, False)), ("preempt", (0,)), ("committed", (1, np.arange(2)))):
        with pytest.raises(FailedPrecondition, match="no request"):
            helper.ask(what, *arguments)
    assert helper.ask("visible", 0.1) is False


def test_a_lenient_engine_hears_nothing_and_it_is_counted() -> None:
    block = HelperBlock.create(SHAPE)
    helper = helper_of(GREETING, block)
    helper.tell("start", 0, 1, np.array([100]), "a", None, False, None)
    helper.tell("start", 1, 1, np.arange(9), "b", None, False, None)
    helper.tell("committed", 1, np.arange(3))
    helper.tell("finish", 9, None, False)
    assert helper.ask("visible", 0.1) is False
    helper.tell("start", 0, 1, np.arange(5), lambda: "no id", None, False, None)
    helper.tell("finish", None, None, False)
    assert helper.ask("visible", 0.1) is False
    assert int(block.stats.fail_opens.sum()) == 4
    assert int(block.stats.committed_tokens[0]) == 3
    assert not helper.wait(lambda: helper.attached, 0.1)
    until(lambda: helper.trouble[0] == "unavailable")
    helper.close()
    assert helper.pid is None


def test_helper_that_dies_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    block = HelperBlock.create(SHAPE)
    helper = helper_of(STRICT, block)
    helper.ask("start", 0, 1, np.arange(5), "a", None, False, None)
    helper.ask("committed", 0, np.arange(5))
    first = helper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: helper.restarts == 1 and helper.pid not in (None, first))
    assert f"status {-signal.SIGKILL}" in caplog.text
    with pytest.raises(FailedPrecondition, match="no request"):
        helper.ask("committed", 0, np.arange(5))
    helper.ask("start", 0, 2, np.arange(5), "b", None, False, None)
    helper.ask("committed", 0, np.arange(5))
    assert int(block.stats.committed_tokens[0]) == 10, "counts go on where they were"
    assert dict(zip(FAIL_OPEN_REASONS, block.stats.fail_opens.tolist(), strict=True))["internal"] == 1
    helper.close()


def test_helper_that_stands_still_holds_up_nobody_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_UNSENT_BYTES", 1 << 20)
    helper = helper_of(GREETING)
    helper.ask("visible", 0.1)
    first = helper.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    prompt = np.zeros(1 << 18, np.int32)
    for i in range(100):
        helper.tell("start", 0, i, prompt, f"{i}", None, False, None)
    until(lambda: helper.restarts == 1 and helper.pid not in (None, first))
    assert helper.ask("visible", 0.1) is False
    helper.close()


def test_helper_that_stands_still_is_replaced_though_nobody_tells_it_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    helper = helper_of(GREETING)
    helper.ask("visible", 0.1)
    monkeypatch.setattr(module, "_STILL_S", 1.0)
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    first = helper.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    until(lambda: helper.restarts == 1 and helper.pid not in (None, first))
    assert "has stood still for 1 s" in caplog.text
    helper.close()


def test_helper_without_anything_to_do_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HelperBlock.create(SHAPE)
    helper = helper_of(GREETING, block)
    helper.ask("visible", 0.1)
    monkeypatch.setattr(module, "_STILL_S", 1.0)
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    beats = int(block.beats[0])
    time.sleep(2)
    assert helper.restarts == 0
    assert block.beats[0] > beats
    helper.close()


def test_answer_that_nobody_waits_for_any_more_is_not_kept() -> None:
    helper = helper_of(GREETING)
    helper.ask("visible", 0.1)
    with pytest.raises(FailOpen):
        helper.ask("visible", 0.2, timeout_s=0.0)
    assert helper.ask("visible", 0.5) is False
    assert not helper._answers
    helper.close()


def test_what_is_told_to_a_helper_that_stands_still_for_a_moment_reaches_it() -> None:
    """It is more than the socket takes."""
    block = HelperBlock.create(SHAPE)
    helper = helper_of(replace(GREETING, config=replace(CONFIG, max_length=1 << 23)), block)
    helper.tell("start", 0, 1, np.arange(5), "a", None, False, None)
    assert helper.ask("visible", 0.1) is False
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGSTOP)
    for _ in range(60):
        helper.tell("committed", 0, np.ones(100_000, np.int32))
    os.kill(helper.pid, signal.SIGCONT)
    helper.tell("committed", 0, np.ones(1, np.int32))
    assert helper.ask("visible", 0.1) is False
    assert (int(block.stats.committed_tokens[0]), helper.restarts) == (6_000_001, 0)
    helper.close()


def test_helper_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    helper = helper_of(GREETING)
    helper.tell("start", 0, 1, np.arange(5), "a", None, False, None)
    until(lambda: "cannot be started" in helper.trouble[1])
    monkeypatch.undo()
    until(lambda: helper.pid is not None)
    assert helper.ask("visible", 0.1) is False
    helper.close()


def test_what_the_helper_logs_the_engine_logs(caplog: pytest.LogCaptureFixture) -> None:
    helper = helper_of(GREETING)
    helper.tell("start", 0, 1, np.array([100]), "a", None, False, None)
    until(lambda: "engine here drafts without the service (refused)" in caplog.text)
    helper.close()


def test_helper_ends_with_its_engine() -> None:
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_helper import GREETING, helper_of
helper = helper_of(GREETING)
helper.ask("visible", 0.1)
print(helper.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )  # fmt: skip
    pid = int(done.stdout)
    until(lambda: gone(pid))


class Odd:
    """A class of the engine's."""


def test_what_only_the_engine_can_read_is_refused() -> None:
    block = HelperBlock.create(SHAPE)
    helper = helper_of(GREETING, block)
    helper.tell("start", 0, 1, np.array([Odd()]), "a", None, False, None)
    helper.tell("finish", Odd(), None, False)
    assert helper.ask("visible", 0.1) is False
    assert dict(zip(FAIL_OPEN_REASONS, block.stats.fail_opens.tolist(), strict=True))["refused"] == 2
    assert helper.restarts == 0
    helper.close()


def test_engine_that_fails_while_it_listens_gets_another_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not understood")

    monkeypatch.setattr(HelperProcess, "_heard", fail)
    helper = helper_of(GREETING)
    until(lambda: helper.restarts >= 1)
    monkeypatch.undo()
    until(lambda: helper.trouble[0] == "unavailable" and helper.pid is not None)
    assert helper.ask("visible", 0.1) is False
    helper.close()


def test_mapping_holds_up_nothing_else() -> None:
    go_on = threading.Event()

    def remap(_: bytes) -> None:
        go_on.wait(60)

    helper = HelperProcess(HelperBlock.create(SHAPE), lambda: GREETING, remap)
    helper._heard("map", 1, b"")
    assert helper.ask("visible", 0.1) is False
    assert not go_on.is_set()
    go_on.set()
    helper.close()


def test_forked_process_leaves_the_helper_alone() -> None:
    helper = helper_of(GREETING)
    assert helper.ask("visible", 0.1) is False
    first = helper.pid
    child = os.fork()
    if child == 0:
        helper.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert helper.ask("visible", 0.1) is False
    assert helper.pid == first
    helper.close()


def test_helper_whose_end_nobody_closes_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked while the helper started holds the helper's end of the connection."""
    popen, held = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        held.append(os.dup(options["pass_fds"][0]))
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    helper = helper_of(GREETING)
    monkeypatch.undo()
    assert helper.ask("visible", 0.1) is False
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    until(lambda: helper.restarts == 1 and helper.pid is not None)
    assert helper.ask("visible", 0.1) is False
    helper.close()
    os.close(held[0])


def test_helper_imports_whatever_is_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/somewhere"), "", *sys.path])
    helper = helper_of(GREETING)
    assert helper.ask("visible", 0.1) is False
    helper.close()


_WITHOUT_STREAMS = """
import os
for fd in range(3):
    os.close(fd)
from tests.client.test_helper import GREETING, helper_of
helper = helper_of(GREETING)
asked = helper.ask("visible", 0.1)
helper.close()
os._exit(42 if asked is False else 1)
"""


def test_engine_whose_standard_streams_are_closed_has_a_helper() -> None:
    """Its descriptors get the numbers of those."""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", _WITHOUT_STREAMS], cwd=root, timeout=60, check=False).returncode == 42


def test_helper_that_is_asked_to_end_tells_what_there_is_first() -> None:
    helper = helper_of(GREETING)
    assert helper.ask("visible", 0.1) is False
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGTERM)
    assert helper.ask("visible", 0.1) is False
    assert helper.restarts == 0
    helper.close()


def test_what_was_told_before_there_was_an_attachment_arrives() -> None:
    with PrivateService(http=False) as service:
        config = replace(CONFIG, endpoint=service.endpoint, transport="inline", device_uuid="", namespace="early")
        helper = helper_of(replace(GREETING, config=config))
        helper.tell("start", 0, 1, np.arange(5), "a", None, False, None)
        helper.tell("committed", 0, np.arange(20))
        helper.tell("finish", 0, None, False)
        helper.close()
        stub = draftd_pb2_grpc.CorpusServiceStub(grpc.insecure_channel(service.endpoint))
        kept = stub.GetNamespace(pb.GetNamespaceRequest(namespace="early"), timeout=30).namespace
        assert kept.tokens >= 20
