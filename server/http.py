"""The HTTP side: health, readiness, metrics and status, for kubelets, Prometheus and people with curl."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from draftd.server.config import parse_address
from draftd.server.metrics import Metrics

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EndpointError(Exception):
    """An endpoint cannot be served; the message says which and why."""


def build_app(
    ready: Callable[[], bool], update: Callable[[], None], status: Callable[[], dict[str, Any]], metrics: Metrics, docs: bool
) -> FastAPI:
    """The application; `update` brings the metrics up to date before a scrape."""
    app = FastAPI(title="draftd", docs_url="/docs" if docs else None, redoc_url=None, openapi_url="/openapi.json" if docs else None)

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """200 while the process answers."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """200 while the service can draft, else 503."""
        return PlainTextResponse("ready\n") if ready() else PlainTextResponse("not ready\n", status_code=503)

    @app.get("/metrics")
    async def exposition() -> Response:
        """Prometheus metrics."""
        update()
        return Response(metrics.exposition(), media_type=METRICS_TYPE)

    @app.get("/v1/status")
    async def v1_status() -> JSONResponse:
        """What the service is and holds."""
        return JSONResponse(status())

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


def build_server(app: FastAPI) -> HttpServer:
    """A uvicorn server without logs of its own."""
    return HttpServer(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2))
