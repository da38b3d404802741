"""The helper process of a DeviceSession: everything that an engine's drafting needs beside its kernels, outside the engine's interpreter.

It keeps the engine attached, reads what the stream carries, and tells the service. The engine's process only launches kernels and, now
and then, sends a few bytes: its decode thread never shares an interpreter with any of this. Started by draftd.client.helper_process.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftd.client.carrier import Carrier
from draftd.client.config import ClientConfig
from draftd.client.drafter import Drafter, wait_until
from draftd.client.frames import Frames, encode
from draftd.client.helper_block import HelperBlock
from draftd.client.rows import is_row
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.lessons import Learned, warm_up
from draftd.drafter.ops.collect.ring import RingShape
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_log = logging.getLogger("draftd.client")

_PAUSE_S = 0.002
_IDLE_PAUSE_S = 0.02
_IDLE_AFTER_S = 1.0
_MAP_TIMEOUT_S = 60.0
_VISIBLE_SLICE_S = 0.25
_LAST_WORDS_S = 1.0
_FIRST_ATTACH_S = 3.0
_CLOSED = "the engine has closed the session"
_RECEIVE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a helper is told first.

    Attributes:
        config: The engine's side of the attachment; with parameters.
        shape: Of the ring in the block.
        newest: int64 [max_rows]; the generation of each row's request.
        carries: The engine has launched.
        successor: A helper before it has died.
        log_level: The least that the engine's process logs of draftd.
    """

    config: ClientConfig
    shape: RingShape
    newest: NDArray[np.int64]
    carries: bool = False
    successor: bool = False
    log_level: int = logging.WARNING


class Helper:
    """What runs in the helper process.

    Args:
        connection: To the engine's process, which has greeted.
        block: What both have in common.
        greeting: What the engine's process has said.
        frames: What of the connection has been read already.
    """

    def __init__(self, connection: socket.socket, block: HelperBlock, greeting: Greeting, frames: Frames) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._frames = frames
        self._open = True
        self._sending = threading.Lock()
        self._mapped: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._maps = 0
        self._greeting = greeting
        self._names: list[str | None] = [None] * greeting.config.max_rows
        self._learned: dict[str, Learned] = {}
        self._asked: list[tuple[int, float]] = []
        self._told: object = None
        self._beats = block.beats
        self._used = False
        self._busy_until = 0.0
        logger = logging.getLogger("draftd")
        logger.setLevel(greeting.log_level)
        logger.addHandler(_Forwarding(self._send))
        arguments = {of.name: getattr(greeting.config, of.name) for of in fields(greeting.config)}
        self._drafter = Drafter(**arguments, device=self, stats=block.stats)
        self._carrier = Carrier(self._drafter, block.ring, block.overruns, greeting.newest, self._learned_of)
        self._carrier.carries = greeting.carries
        if greeting.successor:
            # Counted after the drafter was made, so that the service sees it.
            block.stats.count_fail_open("internal")

    def run(self, parent: int) -> None:
        """Serves the engine until it closes the session, or its process, `parent`, is gone."""
        if self._greeting.shape.teaching:
            warm_up(self._greeting.config.k)
        for message in self._frames.feed(b""):
            self._do(*message)
        while self._open and os.getppid() == parent:
            self._receive()
            before = self._carrier.launches
            try:
                self._carrier.drain()
            except Exception as error:  # noqa: BLE001 -- only a strict drafter raises; what was wrong has been passed over
                _log.warning("engine %s: %r", self._drafter.engine, error)
            if self._carrier.launches > before or self._carrier.awaits:
                self._busy_until = time.monotonic() + _IDLE_AFTER_S
            self._tell_state()
            self._answer_asked()
        self._open = False
        self._mapped.put((self._maps, _CLOSED))
        # Whoever writes on would wait for a reader.
        self._connection.settimeout(_LAST_WORDS_S)
        self._carrier.close()
        if self._used:
            # What an engine has told in its first moments is delivered too, if there is a service.
            wait_until(lambda: self._drafter.attached or self._drafter.trouble[0] != "unattached", _FIRST_ATTACH_S)
        self._drafter.detach()

    # -- what the attachment calls, from its own thread ------------------------------------------------------------------------

    def remap(self, device: pb.DeviceMap) -> None:
        """See DeviceLink: the engine's process maps."""
        self._maps += 1
        self._send(("map", self._maps, device.SerializeToString()))
        number, failure = 0, "" if self._open else _CLOSED
        try:
            # An answer that came too late is to an earlier one.
            while number < self._maps and not failure:
                number, failure = self._mapped.get(timeout=_MAP_TIMEOUT_S)
                failure = failure if number == self._maps else ""
        except queue.Empty:
            failure = f"the engine has not mapped the index within {_MAP_TIMEOUT_S:g} s"
        if failure:
            raise OSError(failure)

    def learn_into(self, learned: dict[str, Learned]) -> None:
        """See DeviceLink."""
        self._learned = learned

    # -- what the engine's process sends -----------------------------------------------------------------------------------------

    def start(
        self,
        row: int,
        generation: int,
        tokens: ArrayLike,
        document_id: str,
        namespace: str | None,
        private: bool,
        prompt_length: int | None,
    ) -> None:
        """See DeviceSession.start."""

        def begin() -> None:
            self._drafter.start(row, tokens, document_id, namespace, private, prompt_length=prompt_length)

        self._used = True
        if not self._has(row):
            begin()
            return
        self._names[row] = None if private else self._greeting.config.namespace if namespace is None else namespace
        self._carrier.begin(row, generation, tokens.size if isinstance(tokens, np.ndarray) else 0, begin)

    def committed(self, row: int, tokens: ArrayLike) -> None:
        """See DeviceSession.committed."""
        if self._has(row):
            self._carrier.settle(row)
        self._drafter.append(row, tokens)

    def finish(self, row: int, length: int | None, discard: bool) -> None:
        """See DeviceSession.finish."""
        if not self._has(row):
            self._drafter.finish(row, discard, length=length)
            return
        self._names[row] = None
        self._carrier.finish(row, length, discard)

    def preempt(self, row: int) -> None:
        """See DeviceSession.preempt."""
        if self._has(row):
            self._names[row] = None
            self._carrier.end(row)
        self._drafter.preempt(row)

    def carry(self) -> None:
        """The engine launches from now on."""
        self._carrier.carries = True

    def refuse(self, reason: str) -> None:
        """The engine has called with what cannot be sent."""
        self._drafter.refuse(InvalidArgument(reason))

    def mapped(self, number: int, failure: str) -> None:
        """The engine's process has mapped what it was sent under a number, or says why not."""
        self._mapped.put((number, failure))

    def close(self) -> None:
        """The engine needs nothing more."""
        self._open = False

    # -- how it gets there ---------------------------------------------------------------------------------------------------------

    def _has(self, row: int) -> bool:
        """A row that there is; of others the drafter says what is wrong with them."""
        return is_row(row, len(self._names))

    def _learned_of(self, row: int) -> Learned | None:
        name = self._names[row]
        return None if name is None else self._learned.get(name)

    def _receive(self) -> None:
        """Does what was sent; waits a moment if nothing was."""
        pause = _PAUSE_S if time.monotonic() < self._busy_until else _IDLE_PAUSE_S
        self._beats += 1
        while self._open and self._selector.select(pause):
            self._beats += 1
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                self._open = False
            for message in self._frames.feed(data):
                self._do(*message)
            pause = 0.0

    def _do(self, what: str, number: int, *arguments: Any) -> None:
        """Does one thing; whoever waits for it, under `number`, is answered."""
        self._busy_until = time.monotonic() + _IDLE_AFTER_S
        if what == "visible":
            self._asked.append((number, time.monotonic() + arguments[0]))
            return
        answer: object = None
        try:
            getattr(self, what)(*arguments)
        except Exception as error:  # noqa: BLE001 -- only a strict drafter raises, and then the engine's process does
            answer = error
            if not self._greeting.config.strict:
                _log.warning("engine %s: %s failed: %r", self._drafter.engine, what, error)
        if number:
            self._send(("answer", number, answer))

    def _tell_state(self) -> None:
        drafter = self._drafter
        state = (drafter.attached, drafter.transport, drafter.attachments, drafter.trouble)
        if state != self._told:
            self._told = state
            self._send(("state", *state))

    def _answer_asked(self) -> None:
        for number, until in list(self._asked):
            left = until - time.monotonic()
            visible = self._drafter.wait_visible(min(max(left, 0.001), _VISIBLE_SLICE_S))
            if visible or left < 0:
                self._asked.remove((number, until))
                self._send(("answer", number, visible))

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._sending:
                self._connection.sendall(encode(message))
        except OSError:
            self._open = False


class _Forwarding(logging.Handler):
    """Has the engine's process log what is logged here."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._to_engine = send

    def emit(self, record: logging.LogRecord) -> None:
        self._to_engine(("log", record.name, record.levelno, record.getMessage()))


def main() -> None:
    """Serves the engine whose process has started this one: descriptors of the connection and of the block, and its id."""
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3])
    # Whoever stops a whole group of processes ends the engine, and with it this one when it has told what there is.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    frames = Frames()
    greeting: Greeting | None = None
    while greeting is None:
        data = connection.recv(_RECEIVE_BYTES)
        if not data or os.getppid() != parent:
            return
        for message in frames.feed(data):
            greeting = message[0]
            break
    block = HelperBlock(int(sys.argv[2]), greeting.shape)
    Helper(connection, block, greeting, frames).run(parent)


if __name__ == "__main__":
    main()
