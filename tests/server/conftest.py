"""Services that tests share. Each test uses engine, document and namespace names of its own, so that one service serves them all."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from draftd.server.logging import configure_logging
from tests.logs import log_to_stderr
from tests.server.harness import Process, RunningService, short_directory


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    """A service with small limits, which holds the refrain."""
    running = RunningService(max_k=32, max_rows=64, max_length=4096, max_batch=16, max_message_bytes=2**17)
    running.seed()
    yield running
    running.close()


@pytest.fixture
def json_logs() -> Iterator[None]:
    """Logs as JSON, errors only."""
    configure_logging("error", "json")
    yield
    log_to_stderr()


@pytest.fixture(scope="session")
def process() -> Iterator[Process]:
    """`draftd serve`, for the command line and grpcurl."""
    with short_directory() as directory:
        started = Process(directory, "--http", "127.0.0.1:0", "--shm-root", f"/dev/shm/{directory.name}").wait_ready()
        yield started
        started.stop()
        Path(f"/dev/shm/{directory.name}").rmdir()
