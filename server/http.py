"""The HTTP side: health, readiness, metrics, status and the dashboard, for kubelets, Prometheus and people."""

import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from draftd.server.config import parse_address
from draftd.server.dashboard.history import History
from draftd.server.dashboard.pages import NOT_KEPT, add_dashboard
from draftd.server.metrics import Metrics

App = Callable[..., Awaitable[None]]
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EndpointError(Exception):
    """An endpoint cannot be served; the message says which and why."""


def build_app(
    ready: Callable[[], bool],
    warnings: Callable[[], list[str]],
    update: Callable[[], None],
    status: Callable[[], dict[str, Any]],
    metrics: Metrics,
    history: History,
    docs: bool,
) -> FastAPI:
    """The application; `update` brings the metrics up to date before a scrape, `warnings` are lines for whoever asks if it is ready."""
    app = FastAPI(title="draftd", docs_url="/docs" if docs else None, redoc_url=None, openapi_url="/openapi.json" if docs else None)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """200 while the process answers."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """200 while the service can draft, else 503; it can also while its store cannot be written."""
        return PlainTextResponse("\n".join(["ready", *warnings(), ""])) if ready() else PlainTextResponse("not ready\n", status_code=503)

    @app.get("/metrics")
    async def exposition() -> Response:
        """Prometheus metrics."""
        update()
        return Response(metrics.exposition(), media_type=METRICS_TYPE)

    @app.get("/v1/status")
    async def v1_status() -> JSONResponse:
        """What the service is and holds."""
        return JSONResponse(status(), headers=NOT_KEPT)

    add_dashboard(app, history)
    return app


class HttpServer(uvicorn.Server):
    """uvicorn in the service's own event loop; the service handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to the service."""
        yield


def bind(address: str) -> socket.socket:
    """A listening socket for host:port; EndpointError if it is taken."""
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        raise EndpointError(f"http {address}: {error.strerror or error}; choose another --http, or --http off") from None
    return listener


def build_server(app: App, tls: ssl.SSLContext | None) -> HttpServer:
    """A uvicorn server without logs of its own."""
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2)
    config.load()
    config.ssl = tls
    return HttpServer(config)
