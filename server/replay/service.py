"""A service of one's own, as a child process on a socket of its own: for a replay, and for tests that kill and restart it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_S = 0.05
_STOP_S = 20.0


class ServiceFailed(Exception):
    """The service did not become ready; the message has the end of its log."""


class PrivateService:
    """A service child process; a context manager that starts it, if it is not started yet, and stops it.

    Args:
        flags: Further flags of `draftd serve`.
        http: Serve HTTP on a free port.
        start_timeout_s: Longest wait until it is ready; the first start on a machine compiles kernels.
    """

    def __init__(self, flags: Sequence[str] = (), *, http: bool = True, start_timeout_s: float = 180.0) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="draftd-")
        root = Path(self._directory.name)
        self._log_path = root / "log"
        self._socket = root / "draftd.sock"
        self._flags = list(flags)
        self._http = http
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """gRPC target; the same after a restart."""
        return f"unix:{self._socket}"

    @property
    def http_url(self) -> str:
        """Root of its HTTP endpoint; empty without one."""
        found = re.findall(r"http://\S+", self.log())
        return found[-1] if found else ""

    @property
    def exit_code(self) -> int | None:
        """What the process has ended with; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def log(self) -> str:
        """What the running process has written to standard error."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def spawn(self) -> None:
        """Starts the process without waiting for it."""
        http = "127.0.0.1:0" if self._http else "off"
        command = [sys.executable, "-m", "draftd.server.main", "serve", "--socket", str(self._socket), "--http", http, *self._flags]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        """Waits until the service says that it is ready.

        Raises:
            ServiceFailed: It ended before, or took too long.
        """
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while " is ready " not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = " | ".join(self.log().strip().splitlines()[-3:])
                raise ServiceFailed(f"the service did not start: {tail or 'it wrote nothing'}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stops the process gracefully, or kills it if that takes too long; removes its directory."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._directory.cleanup()

    def start(self) -> None:
        """Starts the process and waits until it is ready; see wait_ready."""
        try:
            self.spawn()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
