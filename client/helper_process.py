"""An engine's side of its helper process: starts it, starts it anew if it dies, and never waits for it on the decode path.

See draftd.client.helper for what it does. Nothing here needs a GPU.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from draftd.client.failopen import FailOpen
from draftd.client.frames import Frames, encode
from draftd.client.helper import Greeting
from draftd.client.helper_block import HelperBlock, above_standard

_log = logging.getLogger("draftd.client")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_LIVED_S = 60.0
_CLOSE_S = 8.0
_LOOK_S = 1.0
_STILL_S = 120.0
"""A helper that has not looked for something to do for so long is replaced. It compiles for some seconds when it starts."""
_ANSWER_S = 30.0
_MOST_UNSENT_BYTES = 256 << 20
_SEND_BUFFER_BYTES = 4 << 20
_RECEIVE_BYTES = 1 << 20


class HelperProcess:
    """The helper process of one session.

    Args:
        block: What both processes have in common.
        greet: What a new helper is told first; called when one starts, while nothing else is sent.
        remap: Maps what a service hands out, a serialized DeviceMap; raises what goes wrong. Called from a thread.

    Attributes:
        attached, transport, attachments, trouble: As Drafter has them.
        restarts: Times that a helper has ended and another was started.
    """

    def __init__(self, block: HelperBlock, greet: Callable[[], Greeting], remap: Callable[[bytes], None]) -> None:
        self.attached = False
        self.transport = "none"
        self.trouble = ("unattached", "the service has not answered yet")
        self.restarts = 0
        self._attachments = [0, 0]
        self._block, self._greet, self._remap = block, greet, remap
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._wake = above_standard(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        weakref.finalize(self, os.close, self._wake)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._asked: set[int] = set()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = ""
        # What is told from now on reaches it.
        connection = self._start()
        self._thread = threading.Thread(target=self._run, args=(connection,), name="draftd-helper", daemon=True)
        self._thread.start()

    @property
    def attachments(self) -> int:
        """Attachments so far."""
        return sum(self._attachments)

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def tell(self, what: str, *arguments: Any) -> None:
        """Has the helper do something; waits for nothing, and raises nothing. Without a helper it is forgotten."""
        self._send((what, 0, *arguments))

    def ask(self, what: str, *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Has the helper do something and waits for its answer; not for the decode loop.

        Raises:
            FailOpen: There is no helper, or it does not answer.
            Exception: What the helper raised.
        """
        number = next(self._numbers)
        with self._changed:
            self._asked.add(number)
        self._send((what, number, *arguments))
        deadline = time.monotonic() + timeout_s
        with self._changed:
            try:
                while number not in self._answers:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._socket is None or not self._changed.wait(left):
                        raise FailOpen("unavailable", f"the helper process does not answer: {self.trouble[1]}")
                answer = self._answers.pop(number)
            finally:
                self._asked.remove(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something holds that the helper tells; not for the decode loop."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def close(self) -> None:
        """Ends the helper when it has told the service all that it has, or after some seconds. A forked process leaves it alone."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._send(("close", 0))
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        self._thread.join(_CLOSE_S)
        self.attached = False

    # -- behind it ---------------------------------------------------------------------------------------------------------------

    def _send(self, message: tuple[Any, ...]) -> None:
        """Sends at once what the socket takes; the thread sends the rest, and whatever comes behind it."""
        frame = _encoded(message)
        with self._sending:
            if self._socket is None:
                return
            if not self._unsent:
                frame = frame[self._sent(frame) :]
            if frame:
                self._unsent.append(frame)
                self._unsent_bytes += len(frame)
                os.eventfd_write(self._wake, 1)
            if self._unsent_bytes > _MOST_UNSENT_BYTES:
                # It stands still: another one begins with what there is then.
                self._forget_unsent()
                self._kill()

    def _sent(self, frame: memoryview) -> int:
        """Bytes of a frame that the socket has taken without waiting. Holds `_sending`."""
        assert self._socket is not None
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            # The helper is gone, which the thread sees too.
            return len(frame)

    def _send_on(self) -> None:
        """Sends some of what could not be sent at once."""
        with self._sending:
            if self._unsent and self._socket is not None:
                frame = self._unsent.popleft()
                sent = self._sent(frame)
                self._unsent_bytes -= sent
                if sent < len(frame):
                    self._unsent.appendleft(frame[sent:])

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _run(self, connection: socket.socket | None) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stop.is_set():
            began = time.monotonic()
            if connection is not None:
                try:
                    self._listen(connection)
                except Exception as error:  # noqa: BLE001 -- whatever it is, another helper is started
                    _log.warning("what the helper process says is not understood: %r", error)
                    self._kill()
                self._bury(connection)
            if self._stop.is_set():
                return
            self.restarts += 1
            _log.warning("%s; another is started", self._ended)
            with self._changed:
                self.attached, self.trouble = False, ("unavailable", self._ended)
                self._attachments = [self.attachments, 0]
                self._changed.notify_all()
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _LIVED_S else min(_LONGEST_PAUSE_S, 2 * pause)
            if self._stop.wait(pause):
                return
            connection = self._start()

    def _start(self) -> socket.socket | None:
        """Starts a helper; None if that cannot be."""
        try:
            return self._spawn()
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is tried again
            self._ended = f"the helper process cannot be started: {error}"
            return None

    def _spawn(self) -> socket.socket:
        ours, theirs = (socket.socket(fileno=above_standard(end.detach())) for end in socket.socketpair())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # It imports what this process does, and nothing that lies in the current directory by chance.
        arguments = [str(number) for number in (theirs.fileno(), self._block.fd, self._pid)]
        command = [sys.executable, "-P", "-m", "draftd.client.helper", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())}
        try:
            with theirs:
                # Of its own session: what interrupts the engine at a terminal leaves it time to tell what there is.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(), self._block.fd),
                    env=environment, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        with self._sending:
            self._forget_unsent()
            self._socket = ours
            greeting = memoryview(encode((replace(self._greet(), successor=self.restarts > 0),)))
            self._unsent.append(greeting)
            self._unsent_bytes = len(greeting)
        self._send_on()
        return ours

    def _listen(self, connection: socket.socket) -> None:
        """Does what the helper asks for, until it is gone."""
        frames = Frames()
        beats, still_s, looked = -1, 0.0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                with self._sending:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                selector.modify(connection, wanted)
                ready = {key.fileobj: events for key, events in selector.select(_LOOK_S)}
                if not ready and self.pid is None:
                    # A process that was forked meanwhile may hold the other end open.
                    return
                now, seen = time.monotonic(), int(self._block.beats[0])
                # While this process was stopped itself it has seen nothing.
                still_s = still_s + min(now - looked, 2 * _LOOK_S) if seen == beats else 0.0
                beats, looked = seen, now
                if still_s > _STILL_S:
                    _log.warning("the helper process has stood still for %.0f s", still_s)
                    self._kill()
                    return
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if ready.get(connection, 0) & selectors.EVENT_WRITE:
                    self._send_on()
                if not ready.get(connection, 0) & selectors.EVENT_READ:
                    continue
                try:
                    data = connection.recv(_RECEIVE_BYTES)
                except OSError:
                    data = b""
                if not data:
                    return
                for what, *arguments in frames.feed(data):
                    self._heard(what, *arguments)

    def _heard(self, what: str, *arguments: Any) -> None:
        if what == "map":
            # It may wait for the GPU, and what the decode thread tells may not wait for that.
            threading.Thread(target=self._map, args=arguments, name="draftd-map", daemon=True).start()
        elif what == "log":
            name, level, text = arguments
            with suppress(Exception):  # of whoever handles the engine's log
                logging.getLogger(name).log(level, "%s", text)
        else:
            with self._changed:
                if what == "state":
                    self.attached, self.transport, self._attachments[1], self.trouble = arguments
                elif arguments[0] in self._asked:
                    self._answers[arguments[0]] = arguments[1]
                self._changed.notify_all()

    def _map(self, number: int, message: bytes) -> None:
        failure = ""
        try:
            self._remap(message)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the helper waits for an answer
            failure = str(error) or type(error).__name__
        self.tell("mapped", number, failure)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _bury(self, connection: socket.socket) -> None:
        """Notes that the helper is gone, and how it ended."""
        with self._sending:
            self._socket = None
            self._forget_unsent()
        connection.close()
        assert self._process is not None
        try:
            status = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._ended = f"the helper process has ended with status {status}"


def _encoded(message: tuple[Any, ...]) -> memoryview:
    """A message as bytes; of one that cannot be sent, that it is refused."""
    what, number, *arguments = message
    wrong = next((type(argument).__name__ for argument in arguments if not _is_plain(argument)), "")
    if wrong:
        message = ("refuse", number, f"{what} takes no {wrong}")
    return memoryview(encode(message))


def _is_plain(argument: object) -> bool:
    """The helper can read it: it has none of the engine's classes."""
    if isinstance(argument, np.ndarray):
        return argument.dtype.kind in "biuf"
    return argument is None or isinstance(argument, bool | int | float | str | bytes | np.generic)


def _import_path() -> list[str]:
    """Where this process imports from, without what is no path any more."""
    paths = []
    for path in sys.path:
        try:
            paths.append(path or os.getcwd())
        except OSError:
            continue
    return [path for path in paths if isinstance(path, str)]
