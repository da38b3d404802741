"""A real service for tests: in a thread of this process, or as `draftd serve`; and short ways to call it."""

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
from google.protobuf.message import Message

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.cli.app import run
from draftd.server.config import ServerConfig
from draftd.server.service import Service
from tests.logs import log_to_stderr

VOCAB = 1000
DRAFTD = [sys.executable, "-m", "draftd.server.main"]
REFRAIN = list(range(100, 140))
"""A document that the corpus of every test service holds: whoever follows it gets a draft from it."""


def pack(tokens: list[int]) -> bytes:
    """Packed little-endian int32."""
    return np.asarray(tokens, "<i4").tobytes()


class Stubs:
    """The services of one channel."""

    def __init__(self, target: str, channel: grpc.Channel | None = None) -> None:
        self.channel = channel or grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)])
        self.drafter = draftd_pb2_grpc.DrafterServiceStub(self.channel)
        self.corpus = draftd_pb2_grpc.CorpusServiceStub(self.channel)

    def attach(self, engine: str, **fields: Any) -> pb.AttachResponse:
        """Attaches an engine: inline, vocabulary 1000, k 8, 4 rows of at most 256 tokens, unless `fields` say otherwise."""
        given: dict[str, Any] = {
            "vocab_size": VOCAB,
            "k": 8,
            "max_rows": 4,
            "max_length": 256,
            "transport": pb.TRANSPORT_INLINE,
        } | fields
        return self.drafter.Attach(pb.AttachRequest(engine=engine, **given))

    def propose(self, rows: list[pb.Row], attachment_id: str = "", **parameters: Any) -> pb.ProposeResponse:
        """Proposes for rows."""
        return self.drafter.Propose(pb.ProposeRequest(attachment_id=attachment_id, rows=rows, parameters=pb.DraftParameters(**parameters)))

    def draft(self, tokens: list[int], **parameters: Any) -> list[int]:
        """The draft of one context."""
        return list(self.propose([pb.Row(tokens=tokens)], **parameters).drafts[0].tokens)

    def ingest(self, document_id: str, tokens: list[int], attachment_id: str = "", **fields: Any) -> pb.DocumentResult:
        """Ingests one document; `offset`, `complete` and `packed_lead` are the document's, other fields the request's."""
        of_document = {name: fields.pop(name) for name in ("offset", "complete", "packed_lead") if name in fields}
        document = pb.IngestDocument(document_id=document_id, tokens=tokens, **of_document)
        return self.drafter.Ingest(pb.IngestRequest(attachment_id=attachment_id, documents=[document], **fields)).results[0]

    def harvest(self, attachment_id: str, document_id: str, tokens: list[int], offset: int, **fields: Any) -> pb.DocumentResult:
        """Harvests one row."""
        wait = fields.pop("wait_visible", False)
        row = pb.HarvestRow(document_id=document_id, tokens=tokens, offset=offset, **fields)
        return self.drafter.Harvest(pb.HarvestRequest(attachment_id=attachment_id, rows=[row], wait_visible=wait)).results[0]

    def namespace(self, name: str = "default") -> pb.Namespace:
        """A namespace's state."""
        return self.corpus.GetNamespace(pb.GetNamespaceRequest(namespace=name)).namespace

    def seed(self) -> None:
        """Commits the refrain and waits until it can be drafted from."""
        self.ingest("refrain", REFRAIN, complete=True, wait_visible=True, vocab_size=VOCAB)


class RunningService(Stubs):
    """A service in a thread of this process; `service` gives access to its inside."""

    def __init__(self, **settings: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="draftd-test-"))
        self.shm_root = Path(tempfile.mkdtemp(prefix="draftd-test-", dir="/dev/shm"))
        defaults: dict[str, Any] = {"socket": str(self.directory / "d.sock"), "http": "127.0.0.1:0", "shm_root": self.shm_root}
        defaults |= {"policy": "tree", "quota_tokens": 65_536, "recent_tokens": 8192, "live_tokens": 8192}
        self.config = ServerConfig(**(defaults | settings))
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        if not self._up.wait(120):
            raise TimeoutError("the service did not start")
        super().__init__(f"unix:{self.config.socket_path()}")

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.service = Service(self.config)
        await self.service.start()
        self._up.set()
        await self._stop.wait()
        await self.service.stop()

    def get(self, path: str, token: str = "") -> str:
        """The body of an HTTP answer."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.service.http_port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, sample: str, principal: str = "") -> float:
        """The value of one sample, written as Prometheus does; 0 if it is not there. `principal` is whose token to send."""
        for line in self.get("/metrics", f"{principal}-token" if principal else "").splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    def on_loop(self, call: Callable[[], Any]) -> None:
        """Runs `call` in the service's event loop, and returns when it has run."""
        done = threading.Event()

        def run_it() -> None:
            call()
            done.set()

        self._loop.call_soon_threadsafe(run_it)
        assert done.wait(30)

    def hold_up(self, seconds: float) -> None:
        """Keeps the service's event loop busy for a while."""
        held = threading.Event()

        def hold() -> None:
            time.sleep(seconds)
            held.set()

        self._loop.call_soon_threadsafe(hold)
        held.wait(seconds + 30)

    def close(self) -> None:
        """Stops the service and removes its files."""
        self.channel.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.shm_root, ignore_errors=True)


def error_of(call: Any) -> tuple[str, str]:
    """The status code's name and the message of a call that must fail."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call did not fail")


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    """Waits until `condition()` holds; fails if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def as_dict(message: Message) -> dict[str, Any]:
    """Set fields of a message."""
    return {descriptor.name: value for descriptor, value in message.ListFields()}


class Process:
    """`draftd serve` as a process of its own."""

    def __init__(self, directory: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.socket = directory / "d.sock"
        self.target = f"unix:{self.socket}"
        self.log = directory / "log"
        environment = {**clean_environment(), **(environment or {})}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*DRAFTD, "serve", "--socket", str(self.socket), "--policy", "tree", "--quota-tokens", "65536", *flags],
                stderr=log,
                stdout=log,
                env=environment,
            )

    def wait_ready(self) -> "Process":
        """Returns when the start block is printed."""
        wait_until(lambda: "is ready" in self.log.read_text() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def http_port(self) -> int:
        """The port that the start block names."""
        line = next(line for line in self.log.read_text().splitlines() if line.strip().startswith("http"))
        return int(line.rpartition(":")[2])

    def stop(self) -> int:
        """SIGTERM; answers the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path is short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="draftd-test-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def clean_environment() -> dict[str, str]:
    """This process's environment without draftd's own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DRAFTD_")}


@dataclass(frozen=True)
class Result:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


def draftd(*arguments: str, **environment: str) -> Result:
    """Runs the command line to its end, in this process: importing it anew for each call would take most of the tests' time."""
    out, err = io.StringIO(), io.StringIO()
    variables = {**clean_environment(), "TERM": "dumb", "NO_COLOR": "1", **environment}
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(sys, "argv", ["draftd", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as exit_:
            return Result(int(exit_.code or 0), out.getvalue(), err.getvalue())
        finally:
            # `serve` sets logs up to go to what is standard error here.
            log_to_stderr()
    raise AssertionError("the command did not exit")


def draftd_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end, as a process of its own."""
    return subprocess.run(
        [*DRAFTD, *arguments],
        capture_output=True,
        text=True,
        env={**clean_environment(), "TERM": "dumb", "NO_COLOR": "1", **environment},
        timeout=120,
        check=False,
    )
