"""One running service: the corpus, the gRPC server and the HTTP server in one event loop, from start to graceful stop."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
import uvloop
from grpc import aio

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.keeper import Keepers
from draftd.server.attachments import Attachment, Attachments
from draftd.server.config import OFF, ServerConfig, parse_address
from draftd.server.dashboard.history import History
from draftd.server.endpoint import SocketPlace
from draftd.server.health import Health
from draftd.server.http import EndpointError, HttpServer, bind, build_app, build_server
from draftd.server.metrics import Metrics
from draftd.server.replicate.opening import open_replicator, replication_settings
from draftd.server.replicate.outbox import Outbox
from draftd.server.rpc.corpus import CorpusRpc
from draftd.server.rpc.drafter import Drafter
from draftd.server.rpc.durability import Durability
from draftd.server.rpc.gate import Gate
from draftd.server.rpc.server import SERVICES, bind_socket, bind_tcp, build_grpc
from draftd.server.rpc.visibility import Visibility
from draftd.server.security.guard import Guard
from draftd.server.security.hosts import HostGuard, hosts_of
from draftd.server.security.http import HttpGuard
from draftd.server.security.principal import Quotas
from draftd.server.security.rates import Rates
from draftd.server.security.reload import Reloadable, reload_files
from draftd.server.security.tls import Certificates
from draftd.server.security.tokens import Tokens
from draftd.server.status import attachment_json, namespace_json, replication_json, store_json
from draftd.server.store.opening import open_store
from draftd.server.store.restore import restore_all
from draftd.server.store.sleep import Sleepers
from draftd.server.store.store import Store
from draftd.server.telemetry import Telemetry
from draftd.server.version import version

if TYPE_CHECKING:
    from draftd.server.memory_socket import MemorySocket
    from draftd.server.replicate.replicator import Replicator
    from draftd.server.tracing import Tracing

log = structlog.get_logger()

_GIVE_UP_S = 20.0


class Service:
    """A service of one configuration. `start` and `stop` are called once each, in the loop that serves.

    Attributes:
        listen_port: TCP port of gRPC, 0 without TCP.
        http_port: Port of HTTP, 0 without HTTP.
        gpu_lost: Set when a GPU does nothing more for this process, which can only end then.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.max_namespaces)
        self.listen_port = 0
        self.http_port = 0
        self.gpu_lost = asyncio.Event()
        self._started = time.time()
        self._ready = False
        self._place: SocketPlace | None = None
        self._http: HttpServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._housekeeping_task: asyncio.Task[None] | None = None
        self._visibility: Visibility | None = None
        self._tracing: Tracing | None = None
        self._replicator: Replicator | None = None
        self._corpus: Corpus | None = None
        self._memory_socket: MemorySocket | None = None
        self._store: Store | None = None
        self._gate = Gate()
        self._servers: list[aio.Server] = []
        self._health = Health(("", *SERVICES))
        self._tokens: Tokens | None = None
        self._quotas = Quotas(config.quota_attachments, config.quota_namespaces)
        self._certificates: Certificates | None = None
        self._reloadable: dict[str, Reloadable] = {}

    async def start(self) -> None:
        """Binds the endpoints and starts to serve; ready when it returns.

        Raises:
            EndpointError: An endpoint is taken or may not be used.
            FileRefused: The token file or a certificate cannot be used.
            StoreError: The data directory or the store in it cannot be used.
            OSError: The shared memory cannot be made.
        """
        try:
            await self._start()
        except BaseException:
            await self._release()
            raise

    async def _start(self) -> None:
        config = self.config
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._background_error(context.get("exception")))
        self._read_secrets()
        http_socket = bind(config.http) if config.http != OFF else None
        path = config.socket_path()
        self._place = SocketPlace(path) if path else None
        self._store = open_store(config.data_dir, config.store_lag_ms) if config.data_dir else None
        replication = replication_settings(config)
        outbox = Outbox(replication.wants) if replication else None
        keepers = [keeper for keeper in (self._store.backlog if self._store else None, outbox) if keeper is not None]
        self.corpus = self._corpus = Corpus(corpus_config(config), Keepers(*keepers) if keepers else None)
        self._memory_socket = open_memory_socket(self.corpus)
        if self.corpus.device_indexes:
            mps = any(part.memory.under_mps for part in self.corpus.device_indexes)
            self.metrics.set("draftd_mps", int(mps))
            if mps:
                log.warning("mps", meaning="an engine that is killed while its GPU work is under way takes every process on the GPU down")
        self.attachments = Attachments(self.corpus, config.lease_ms, config.max_attachments, self._memory_socket)
        if self._store is not None:
            sleepers = Sleepers(self.corpus, self._store, config.idle_namespace_s, self.attachments.users)
            self._gate.sleepers = sleepers
            self.attachments.asleep = sleepers.names
        if replication and outbox is not None:
            self._replicator = open_replicator(replication, self.corpus, outbox, self._store, self._gate.sleepers)
        self._history = History(self.corpus.instance, self.metrics, self.attachments)
        self.telemetry = Telemetry(
            self.metrics, self.corpus, self.attachments, self._history.events, self._store, self._gate.sleepers, self._replicator
        )
        self._visibility = Visibility(self.corpus, config.visible_timeout_ms)
        self.metrics.set("draftd_build_info", 1, version(), self.corpus.instance)
        self._tracing = open_tracing(config, self.corpus.instance, self.attachments) if config.otlp_endpoint else None
        # Binding comes before the kernels are compiled, which takes seconds: a wrong endpoint is refused at once.
        self._bind_grpc(self._visibility)
        if http_socket is not None:
            self.http_port = http_socket.getsockname()[1]
            app = build_app(
                lambda: self._ready,
                self._warnings,
                self.telemetry.update,
                self.status,
                self.metrics,
                self._history,
                config.http_docs,
            )
            guarded = HttpGuard(app, self._tokens, self.metrics) if self._tokens is not None else app
            named = HostGuard(guarded, hosts_of(config.http_hosts, parse_address(config.http)[0]), self.metrics)
            self._http = build_server(named, self._certificates.context if self._certificates and config.http_tls else None)
            self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]))
        for server in self._servers:
            await server.start()
        await asyncio.get_running_loop().run_in_executor(None, self._fill_corpus)
        self._housekeeping_task = asyncio.create_task(self._housekeeping())
        self._set_serving(True)
        if self._replicator is not None:
            self._replicator.start()
        self._history.events.note("start", "", "ready" + self.restored())

    def _fill_corpus(self) -> None:
        """Compiles the kernels and restores what the store has."""
        self.corpus.start()
        if self._store is not None and self._gate.sleepers is not None:
            for kept, documents in restore_all(self._store, self.corpus):
                self._gate.sleepers.add(kept, documents)
            self._store.start(self.corpus.read_committed)

    def _read_secrets(self) -> None:
        """Certificates and tokens; FileRefused if one cannot be used."""
        config = self.config
        if config.tls_cert and config.tls_key:
            self._certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
            self._reloadable["certificates"] = self._certificates
        if config.token_file:
            self._tokens = Tokens(config.token_file, config.rate_requests, config.rate_tokens, self._quotas)
            self._reloadable["tokens"] = self._tokens

    def _bind_grpc(self, visibility: Visibility) -> None:
        config = self.config
        durability = Durability(self._store, config.durable_timeout_ms)
        drafter = Drafter(config, self.corpus, self.attachments, self.metrics, self.telemetry, visibility, durability, self._gate)
        corpus = CorpusRpc(config, self.corpus, self.attachments, self.metrics, self._store, durability, self._gate, self._replicator)

        def server(guarded: bool) -> aio.Server:
            rates = Rates.of(config.rate_requests, config.rate_tokens)
            guards = [Guard(self._tokens, rates, self.metrics, self._quotas)] if guarded else []
            interceptors = [*([self._tracing] if self._tracing else []), *guards]
            self._servers.append(build_grpc(drafter, corpus, self._health, interceptors, config.max_message_bytes))
            return self._servers[-1]

        if self._place is not None:
            bind_socket(server(config.require_token), self._place)
        if config.listen:
            limited = config.rate_requests or config.rate_tokens or self._quotas != Quotas()
            guarded = bool(self._tokens is not None or limited)
            credentials = self._certificates.credentials() if self._certificates else None
            self.listen_port = bind_tcp(server(guarded), config.listen, credentials)

    def reload(self) -> None:
        """Reads tokens and certificates again; for SIGHUP."""
        reload_files(self._reloadable, self.metrics, force=True)

    async def stop(self) -> None:
        """Turns health to NOT_SERVING, answers what is in flight, commits what attachments hold open, and closes the corpus."""
        self._set_serving(False, last=True)
        log.info("stopping", attachments=len(self.attachments))
        await asyncio.gather(*(server.stop(self.config.stop_grace_ms / 1000) for server in self._servers))
        for attachment in self.attachments:
            await self.attachments.detach(attachment)
            self.telemetry.detached(attachment)
        if self.attachments.sharing is not None:
            self.attachments.sharing.close()
        await self._release()
        log.info("stopped")

    async def give_up(self) -> None:
        """Writes what the store has not got yet and ends, without the GPU; the process must end then."""
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        if self._replicator is not None:
            await self._replicator.close()
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._store.close)
        self.abandon()

    def abandon(self) -> None:
        """Removes what would outlive the process, which ends now."""
        if self._corpus is not None:
            self._corpus.abandon()
        if self._place is not None:
            self._place.close()

    async def _release(self) -> None:
        """Gives back whatever has been taken, in the reverse order."""
        if self._housekeeping_task is not None:
            self._housekeeping_task.cancel()
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await asyncio.wait([self._http_task])
        if self._visibility is not None:
            self._visibility.close()
        if self._tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._tracing.close)
        if self._replicator is not None:
            await self._replicator.close()
        if self._memory_socket is not None:
            self._memory_socket.close()
        if self._corpus is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._corpus.close)
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._store.close)
        if self._place is not None:
            self._place.close()

    def status(self) -> dict[str, Any]:
        """What /v1/status answers."""
        self.telemetry.update()
        return {
            "version": version(),
            "instance": self.corpus.instance,
            "ready": self._ready,
            "uptime_s": round(time.time() - self._started, 3),
            "endpoints": self.endpoints(),
            "limits": {name: getattr(self.config, name) for name in ("max_k", "max_rows", "max_length", "max_batch", "max_attachments")},
            "lease_ms": self.config.lease_ms,
            "totals": self._history.totals(),
            "attachments": [attachment_json(attachment, self._rows_in_use(attachment)) for attachment in self.attachments],
            "store": store_json(self._store),
            "replication": replication_json(self._replicator.state() if self._replicator else None),
            "namespaces": [namespace_json(info, self.attachments.users(info.name)) for info in self.corpus.namespaces()],
            "asleep": [
                {"name": info.name, "documents": info.documents, "tokens": info.tokens, "generation": info.generation}
                for info in (self._gate.sleepers.infos() if self._gate.sleepers else ())
            ],
        }

    def _warnings(self) -> list[str]:
        warnings = []
        if self._store and self._store.failure:
            warnings.append(f"the store cannot be written: {self._store.failure}")
        if self._replicator:
            state = self._replicator.state()
            if not state.connected:
                warnings.append(f"replication is not connected: {state.failure}")
            if state.warning:
                warnings.append(f"replication: {state.warning}")
        return warnings

    def _rows_in_use(self, attachment: Attachment) -> int:
        return len(attachment.rows) if attachment.rows is not None else self.corpus.rows.in_use(attachment.id)

    def restored(self) -> str:
        """What the start brought back, for people; empty if it was nothing."""
        counts = self._store.counts if self._store else None
        if counts is None or not counts.restored_documents:
            return ""
        return f" ({counts.restored_documents:,} documents, {counts.restored_tokens:,} tokens restored in {counts.restore_s:.1f} s)"

    def endpoints(self) -> dict[str, str]:
        """The bound endpoints, by kind: grpc_unix, grpc_tcp, http."""
        endpoints = {}
        if self._place is not None:
            endpoints["grpc_unix"] = f"unix:{self._place.path}"
        if self.listen_port:
            endpoints["grpc_tcp"] = f"{parse_address(self.config.listen)[0]}:{self.listen_port}"
        if self.http_port:
            endpoints["http"] = f"{'https' if self.config.http_tls else 'http'}://{parse_address(self.config.http)[0]}:{self.http_port}"
        return endpoints

    def _set_serving(self, serving: bool, last: bool = False) -> None:
        self._ready = serving
        # While stopping, what is in flight is still answered.
        self._gate.ready |= serving
        self.metrics.set("draftd_ready", int(serving))
        self._health.set(serving, last)

    async def _housekeeping(self) -> None:
        """Ends attachments whose lease has run out, and keeps the metrics' sources drained."""
        tick_s = min(1.0, self.config.lease_ms / 4000)
        while True:
            slept_from = time.monotonic()
            await asyncio.sleep(tick_s)
            held_up_s = time.monotonic() - slept_from - tick_s
            if held_up_s > tick_s:
                # The service was stopped or starved: heartbeats that came meanwhile are still waiting to be read.
                log.warning("event_loop_was_held_up", seconds=round(held_up_s, 3))
                self._history.events.note("held up", "", f"the service did nothing for {held_up_s:.1f} s", level="warning")
                self.attachments.forgive(held_up_s)
            if failure := self.corpus.device_failure:
                self._set_serving(False, last=True)
                log.error("gpu_lost", reason=failure, meaning="the process ends, since only another one can use the GPU again")
                self.gpu_lost.set()
                return
            try:
                await self._end_lost_leases()
                self.telemetry.update()
                if self._tracing is not None:
                    self.metrics.advance("draftd_spans_sent_total", self._tracing.queue.sent)
                    self.metrics.advance("draftd_spans_dropped_total", self._tracing.queue.dropped)
                self._history.sample()
                if self._gate.sleepers is not None:
                    self._gate.sleepers.put_idle_to_sleep()
                reload_files(self._reloadable, self.metrics, force=False)
            except Exception as error:  # noqa: BLE001 - counted and logged; the next tick tries again
                self._background_error(error)

    async def _end_lost_leases(self) -> None:
        for attachment in self.attachments.expired():
            committed = await self.attachments.detach(attachment)
            self.telemetry.detached(attachment, lost=True)
            self.metrics.count("draftd_lease_losses_total")
            log.warning("lease_lost", engine=attachment.engine.name, attachment=attachment.id, committed_documents=committed)

    def _background_error(self, error: BaseException | None) -> None:
        """Counts and logs a defect that no caller was waiting on."""
        self.metrics.count("draftd_background_errors_total")
        log.error("background_work_failed", exc_info=error)


def corpus_config(config: ServerConfig) -> CorpusConfig:
    """The part of the configuration that the drafting core reads."""
    return CorpusConfig(
        shm_root=config.shm_root,
        quota_tokens=config.quota_tokens,
        depth=config.depth,
        max_namespaces=config.max_namespaces,
        refresh_interval_ms=config.refresh_interval_ms,
        recent_tokens=config.recent_tokens,
        live_tokens=config.live_tokens,
        keep_generations=config.keep_generations,
        device=config.device,
        device_memory_bytes=config.device_memory * 2**20,
        quotas=config.quotas(),
    )


def open_memory_socket(corpus: Corpus) -> "MemorySocket | None":
    """What hands out device memory; None where the indexes are not in any, or it cannot be shared."""
    indexes = [part for part in corpus.device_indexes if not part.memory.sharing_failure]
    if not indexes:
        return None
    from draftd.server.memory_socket import MemorySocket

    return MemorySocket(corpus.directory, indexes)


def open_tracing(config: ServerConfig, run: str, attachments: Attachments) -> "Tracing":
    """What traces calls; EndpointError without OpenTelemetry."""
    try:
        from draftd.server.tracing import Attached, Tracing
    except ModuleNotFoundError as error:
        raise EndpointError(f"otlp_endpoint: {error.name} is not installed: pip install 'draftd[otel]'") from None

    def attached(attachment_id: str) -> Attached | None:
        attachment = attachments.find(attachment_id)
        return Attached(attachment.namespace, attachment.transport) if attachment else None

    attributes = {"service.name": "draftd", "service.version": version(), "service.instance.id": run}
    return Tracing(config.otlp_endpoint, config.otlp_sample_ratio, attributes, attached)


async def _serve(config: ServerConfig, announce: Callable[[Service], None]) -> None:
    service = Service(config)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    stop = asyncio.create_task(stopped.wait())
    start = asyncio.create_task(service.start())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        # A kernel that is being compiled cannot be stopped, and its thread would hold up the end of the loop.
        service.abandon()
        log.info("stopped", while_starting=True)
        sys.stderr.flush()
        os._exit(0)
    await start
    announce(service)
    lost = asyncio.create_task(service.gpu_lost.wait())
    await asyncio.wait((lost, stop), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        await service.stop()
        return
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(service.give_up(), _GIVE_UP_S)
    sys.stderr.flush()
    # Whatever still waits for the GPU would hold up the end of the loop.
    os._exit(1)


def serve(config: ServerConfig, announce: Callable[[Service], None]) -> None:
    """Runs a service until SIGTERM or SIGINT; `announce` is called with it once it is ready. Raises as Service.start does."""
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(config, announce))
    sys.stderr.flush()
