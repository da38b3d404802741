"""Replication while a service runs: one connection to NATS after the other, and what runs over each.

Drafting and ingest never wait for it. While there is no connection, what is committed waits in the outbox.
"""

import asyncio
import contextlib
import os
import random
import ssl
import time
from collections import deque
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import DraftdError
from draftd.server.replicate.counts import EVICTED, TOO_LARGE, ReplicationCounts, ReplicationState
from draftd.server.replicate.mark import Mark
from draftd.server.replicate.message import Origin
from draftd.server.replicate.outbox import Outbox
from draftd.server.replicate.receiving import DONE, Receiver
from draftd.server.replicate.sending import Sender
from draftd.server.replicate.settings import ReplicationSettings
from draftd.server.replicate.stream import ACK_WAIT_S, Consumer, open_consumer, open_stream
from draftd.server.security.files import FileRefused
from draftd.server.store.sleep import Sleepers
from draftd.server.store.store import Store

log = structlog.get_logger()

_CONNECT_S = 10.0
_CALL_S = 5.0
_PING_S = 3
_FETCH = 64
_GROUP = 8
_FETCH_S = 5.0
_ACK_EVERY_S = 0.05
_ON_DISK_S = ACK_WAIT_S / 3
_WATCH_S = 0.5
_LOOK_EVERY = 4
_BACKOFF_S = (0.25, 10.0)
_CLOSE_S = 2.0
_EXPECTED = (nats.errors.Error, OSError, TimeoutError, DraftdError, FileRefused)


class ConnectionLost(DraftdError):
    """The connection to NATS has ended."""


@dataclass(slots=True)
class _Unacked:
    """A message that was taken: what the store had been told by then, and when it was (time.monotonic)."""

    message: Msg
    told: int
    since: float


class Replicator:
    """Publishes what is committed here and takes what others have. `start` and `close` are called once each, in the service's event loop.

    Args:
        outbox: A Keeper of the corpus.
        store: Documents are acknowledged when they are in it; None: when they are in the corpus.
        sleepers: Namespaces that are asleep are woken for what comes; None without a store.

    Attributes:
        counts: What was done.
    """

    def __init__(
        self, settings: ReplicationSettings, corpus: Corpus, outbox: Outbox, store: Store | None, sleepers: Sleepers | None
    ) -> None:
        self.counts = ReplicationCounts()
        self._settings = settings
        self._corpus = corpus
        self._outbox = outbox
        self._store = store
        self._mark = Mark(store.directory.path, settings) if store else None
        origin = Origin(settings.node, corpus.instance)
        self._sender = Sender(settings, origin, corpus, outbox, self.counts)
        self._receiver = Receiver(settings, origin, corpus, outbox, sleepers, self.counts)
        self._resume = False
        self._connected = False
        self._failure = "not connected yet"
        self._connecting_failed = ""
        self._warning = ""
        self._lag = 0
        self._unacked: deque[_Unacked] = deque()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins: what the store has and the stream may lack is published too."""
        if self._mark is not None:
            published_us = self._mark.read()
            self._resume = published_us is not None
            self._outbox.add(self._corpus.committed_since(published_us or 0))
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Publishes what is left, for two seconds at most, and disconnects."""
        if self._task is None:
            return
        deadline = time.monotonic() + _CLOSE_S
        while self._connected and self._outbox and time.monotonic() < deadline:
            await asyncio.sleep(_ACK_EVERY_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._outbox:
            log.warning("replication_not_complete", documents=len(self._outbox), reason=self._failure or "there was not time enough")
        await self._note_mark()

    def state(self) -> ReplicationState:
        """How far it is."""
        return ReplicationState(
            stream=self._settings.stream,
            node=self._settings.node,
            connected=self._connected,
            failure=self._failure,
            warning=self._warning,
            lag_messages=self._lag + len(self._unacked),
            outbox_documents=len(self._outbox),
            outbox_age_s=self._outbox.age_s(),
            unsent_documents={EVICTED: self._outbox.never_sent, TOO_LARGE: self.counts.too_large},
            counts=self.counts,
        )

    # -- one connection after the other --------------------------------------------------------------------------------------

    async def _run(self) -> None:
        delay = _BACKOFF_S[0]
        while True:
            started = time.monotonic()
            try:
                await self._session()
            except Exception as error:  # noqa: BLE001 - counted and logged by _failed; tried again
                self._failed(error)
            delay = _BACKOFF_S[0] if time.monotonic() - started > _BACKOFF_S[1] else min(2 * delay, _BACKOFF_S[1])
            # Many services lose the same server at the same time.
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            await self._note_mark()

    def _failed(self, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        self.counts.errors += 1
        expected = isinstance(error, _EXPECTED)
        reason = _said(error) if expected else "internal error, see the log"
        if isinstance(error, nats.errors.NoServersError | TimeoutError) and self._connecting_failed:
            reason = self._connecting_failed
        if reason != self._failure:
            log.error("replication_failed", reason=reason, outbox=len(self._outbox), exc_info=None if expected else error)
        self._failure = reason

    async def _session(self) -> None:
        """Connects, and replicates until the connection ends; raises why it did."""
        settings, secrets = self._settings, self._settings.secrets()
        client = Client()
        self._connecting_failed = ""
        try:
            async with asyncio.timeout(_CONNECT_S):
                await client.connect(
                    list(settings.servers),
                    name=f"draftd {settings.node}",
                    # Connecting anew is done here, where it never ends and is counted.
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=_PING_S,
                    error_cb=self._note_error,
                    tls=settings.tls(),
                    user=secrets.get("user"),
                    password=secrets.get("password"),
                    token=secrets.get("token"),
                    nkeys_seed_str=secrets.get("nkey"),
                    user_credentials=RawCredentials(secrets["creds"]) if "creds" in secrets else None,
                )
            js = client.jetstream(timeout=_CALL_S)
            await open_stream(js, settings)
            consumer = await open_consumer(js, settings, self._corpus.instance, self._resume, self._corpus.config.quota_of)
            self._resume = True
            self._unacked.clear()
            self._connected, self._failure = True, ""
            self.counts.connections += 1
            log.info("replication_connected", stream=settings.stream, node=settings.node, resumed=consumer.resumed)
            async with asyncio.TaskGroup() as tasks:
                for work in (self._sender.run(js), self._receive(js, consumer), self._acknowledge(), self._watch(client, js, consumer)):
                    tasks.create_task(work)
        finally:
            self._connected = False
            # A server that stands still takes no farewell.
            with contextlib.suppress(TimeoutError, OSError, nats.errors.Error):
                async with asyncio.timeout(1.0):
                    await client.close()

    async def _note_error(self, error: Exception) -> None:
        self._connecting_failed = _said(error)

    # -- what runs over a connection -----------------------------------------------------------------------------------------

    async def _receive(self, js: JetStreamContext, consumer: Consumer) -> None:
        subscription = await js.pull_subscribe_bind(consumer=consumer.name, stream=self._settings.stream)
        # The next messages come while these are taken.
        coming = asyncio.create_task(subscription.fetch(_FETCH, timeout=_FETCH_S))
        try:
            while True:
                try:
                    messages = await coming
                except TimeoutError:
                    messages = []
                coming = asyncio.create_task(subscription.fetch(_FETCH, timeout=_FETCH_S))
                for i, message in enumerate(messages):
                    await self._take(message)
                    if i % _GROUP == _GROUP - 1:
                        # Calls that wait for the event loop come between.
                        await asyncio.sleep(0)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _take(self, message: Msg) -> None:
        try:
            about = message.metadata
        except (nats.errors.Error, ValueError):
            # Somebody else writes to this connection's inbox.
            self.counts.refused["malformed"] += 1
            return
        again_s = await self._receiver.take(message.subject, message.headers, message.data, about.num_delivered)
        self._lag = about.num_pending
        if again_s != DONE:
            await message.nak(delay=again_s)
            return
        told = self._store.backlog.told if self._store else 0
        self._unacked.append(_Unacked(message, told, time.monotonic()))

    async def _acknowledge(self) -> None:
        """Acknowledges what was taken once it is on disk, or the disk refuses it: then drafting from it is all that can be had."""
        while True:
            while self._unacked and self._is_kept(self._unacked[0]):
                await self._unacked.popleft().message.ack()
            await asyncio.sleep(_ACK_EVERY_S)

    def _is_kept(self, taken: _Unacked) -> bool:
        store = self._store
        return store is None or store.told_on_disk >= taken.told or bool(store.failure) or time.monotonic() - taken.since > _ON_DISK_S

    async def _watch(self, client: Client, js: JetStreamContext, consumer: Consumer) -> None:
        """Ends the session when the connection has ended; looks at the lag and for a namesake now and then."""
        looks = 0
        while True:
            if client.is_closed:
                raise ConnectionLost(_said(client.last_error) if client.last_error else "the connection was closed")
            if looks % _LOOK_EVERY == 0:
                info = await js.consumer_info(self._settings.stream, consumer.name)
                self._lag = info.num_pending or 0
                self._note_namesake(info.config.description or "")
                await self._note_mark()
            looks += 1
            await asyncio.sleep(_WATCH_S)

    def _note_namesake(self, reader: str) -> None:
        warning = ""
        if reader != self._corpus.instance:
            warning = f"another service has the node name {self._settings.node} too: each gets a part of the documents"
        if warning and warning != self._warning:
            log.error("node_name_is_taken", node=self._settings.node, run=reader[:64])
        self._warning = warning

    async def _note_mark(self) -> None:
        if self._mark is None:
            return
        oldest_us = self._outbox.oldest_us()
        until_us = self._corpus.clock.now_us() if oldest_us is None else oldest_us
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._mark.write, until_us)
        except OSError as error:
            self.counts.errors += 1
            log.warning("replication_mark_not_written", reason=error.strerror)


def _said(error: Exception) -> str:
    """An error in words; those of Python's time-outs have none."""
    if isinstance(error, ssl.SSLError):
        return f"the server's certificate or TLS: {getattr(error, 'verify_message', '') or error.reason}"
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        # Addresses are left out: the words are in /readyz, which everybody may read.
        return os.strerror(error.errno) if error.errno else type(error).__name__
    return str(error) or ("NATS does not answer" if isinstance(error, TimeoutError) else type(error).__name__)
