"""One running service: the corpus, the gRPC server and the HTTP server in one event loop, from start to graceful stop."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
import uvloop
from grpc import aio
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.attachments import Attachments
from draftd.server.config import OFF, ServerConfig, parse_address
from draftd.server.endpoint import SocketPlace
from draftd.server.http import EndpointError, HttpServer, bind, build_app, build_server
from draftd.server.metrics import Metrics
from draftd.server.rpc.corpus import CorpusRpc
from draftd.server.rpc.drafter import Drafter
from draftd.server.rpc.visibility import Visibility
from draftd.server.telemetry import Telemetry
from draftd.server.version import version

log = structlog.get_logger()

SERVICES = ("draftd.v1.DrafterService", "draftd.v1.CorpusService")


class Service:
    """A service of one configuration. `start` and `stop` are called once each, in the loop that serves.

    Attributes:
        listen_port: TCP port of gRPC, 0 without TCP.
        http_port: Port of HTTP, 0 without HTTP.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.max_namespaces)
        self.listen_port = 0
        self.http_port = 0
        self._started = time.time()
        self._ready = False
        self._place: SocketPlace | None = None
        self._http: HttpServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._housekeeping_task: asyncio.Task[None] | None = None
        self._visibility: Visibility | None = None
        self._corpus: Corpus | None = None

    async def start(self) -> None:
        """Binds the endpoints and starts to serve; ready when it returns.

        Raises:
            EndpointError: An endpoint is taken or may not be used.
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
        http_socket = bind(config.http) if config.http != OFF else None
        path = config.socket_path()
        self._place = SocketPlace(path) if path else None
        self.corpus = self._corpus = Corpus(corpus_config(config))
        self.attachments = Attachments(self.corpus, config.lease_ms, config.max_attachments)
        self.telemetry = Telemetry(self.metrics, self.corpus, self.attachments)
        self._visibility = Visibility(self.corpus, config.visible_timeout_ms)
        self.metrics.set("draftd_build_info", 1, version(), self.corpus.instance)
        # Binding comes before the kernels are compiled, which takes seconds: a wrong endpoint is refused at once.
        await self._bind_grpc()
        if http_socket is not None:
            self.http_port = http_socket.getsockname()[1]
            app = build_app(lambda: self._ready, self.telemetry.update, self.status, self.metrics, config.http_docs)
            self._http = build_server(app)
            self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]))
        await asyncio.get_running_loop().run_in_executor(None, self.corpus.start)
        await self._grpc.start()
        self._housekeeping_task = asyncio.create_task(self._housekeeping())
        await self._set_serving(True)

    async def _bind_grpc(self) -> None:
        config = self.config
        assert self._visibility is not None
        self._grpc = aio.server(
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.enable_channelz", 1),
            ]
        )
        draftd_pb2_grpc.add_DrafterServiceServicer_to_server(
            Drafter(config, self.corpus, self.attachments, self.metrics, self.telemetry, self._visibility), self._grpc
        )
        draftd_pb2_grpc.add_CorpusServiceServicer_to_server(CorpusRpc(config, self.corpus, self.attachments, self.metrics), self._grpc)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        channelz.add_channelz_servicer(self._grpc)
        names = (*SERVICES, health.SERVICE_NAME, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        await self._set_serving(False)
        if self._place is not None:
            mask = os.umask(0o177)
            try:
                self._grpc.add_insecure_port(f"unix:{self._place.path}")
            except RuntimeError:
                raise EndpointError(f"socket {self._place.path}: cannot be bound") from None
            finally:
                os.umask(mask)
            self._place.verify()
        if config.listen:
            self._listen_tcp()

    def _listen_tcp(self) -> None:
        config = self.config
        try:
            if config.tls_cert and config.tls_key:
                pair = (config.tls_key.read_bytes(), config.tls_cert.read_bytes())
                self.listen_port = self._grpc.add_secure_port(config.listen, grpc.ssl_server_credentials([pair]))
            else:
                self.listen_port = self._grpc.add_insecure_port(config.listen)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the address is taken or cannot be bound"
            raise EndpointError(f"listen {config.listen}: {reason}; choose another --listen") from None

    async def stop(self) -> None:
        """Turns health to NOT_SERVING, answers what is in flight, commits what attachments hold open, and closes the corpus."""
        await self._set_serving(False)
        log.info("stopping", attachments=len(self.attachments))
        await self._grpc.stop(self.config.stop_grace_ms / 1000)
        for attachment in self.attachments:
            await self.attachments.detach(attachment)
            self.telemetry.detached(attachment)
        await self._release()
        log.info("stopped")

    async def _release(self) -> None:
        """Gives back whatever has been taken, in the reverse order."""
        if self._housekeeping_task is not None:
            self._housekeeping_task.cancel()
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await asyncio.wait([self._http_task])
        if self._visibility is not None:
            self._visibility.close()
        if self._corpus is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._corpus.close)
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
            "attachments": [
                {
                    "engine": attachment.engine.name,
                    "transport": attachment.transport,
                    "namespaces": attachment.namespaces,
                    "rows": len(attachment.rows) if attachment.rows is not None else None,
                    "lease_left_ms": round(1000 * (attachment.deadline - time.monotonic())),
                    "proposals": int(attachment.stats.proposals[0]),
                    "drafted_tokens": int(attachment.stats.drafted.sum()),
                    "accepted_tokens": int(attachment.stats.accepted.sum()),
                }
                for attachment in self.attachments
            ],
            "namespaces": [
                {
                    "name": info.name,
                    "vocab_size": info.vocab_size,
                    "tokens": info.tokens,
                    "quota_tokens": info.quota_tokens,
                    "documents": info.documents,
                    "open_documents": info.open_documents,
                    "evicted_tokens": info.evicted_tokens,
                    "generation": info.generation,
                    "version": info.version,
                    "bytes": info.bytes,
                    "attachments": self.attachments.users(info.name),
                }
                for info in self.corpus.namespaces()
            ],
        }

    def endpoints(self) -> dict[str, str]:
        """The bound endpoints, by kind: grpc_unix, grpc_tcp, http."""
        endpoints = {}
        if self._place is not None:
            endpoints["grpc_unix"] = f"unix:{self._place.path}"
        if self.listen_port:
            endpoints["grpc_tcp"] = f"{parse_address(self.config.listen)[0]}:{self.listen_port}"
        if self.http_port:
            endpoints["http"] = f"http://{parse_address(self.config.http)[0]}:{self.http_port}"
        return endpoints

    async def _set_serving(self, serving: bool) -> None:
        self._ready = serving
        self.metrics.set("draftd_ready", int(serving))
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, state)

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
                self.attachments.forgive(held_up_s)
            try:
                await self._end_lost_leases()
                self.telemetry.update()
            except Exception as error:  # noqa: BLE001 - counted and logged; the next tick tries again
                self._background_error(error)

    async def _end_lost_leases(self) -> None:
        for attachment in self.attachments.expired():
            committed = await self.attachments.detach(attachment)
            self.telemetry.detached(attachment)
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
    )


async def _serve(config: ServerConfig, announce: Callable[[Service], None]) -> None:
    service = Service(config)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await service.start()
    announce(service)
    await stopped.wait()
    await service.stop()


def serve(config: ServerConfig, announce: Callable[[Service], None]) -> None:
    """Runs a service until SIGTERM or SIGINT; `announce` is called with it once it is ready. Raises EndpointError."""
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(config, announce))
    sys.stderr.flush()
