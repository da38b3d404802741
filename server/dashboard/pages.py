"""The dashboard's routes: files for the browser, which hold no data, and what they ask for.

The files load nothing from elsewhere and run nothing inline, and the policy sent with them holds the browser to it.
"""

from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import JSONResponse

from draftd.server.dashboard.history import History

_FILES = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PATHS = {"/" if file.suffix == ".html" else f"/dashboard/{file.name}": file for file in _FILES.iterdir() if file.suffix in _TYPES}
OPEN_PATHS = frozenset(_PATHS)
"""Need no token: whoever has one gives it to the page."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
NOT_KEPT = {"Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
"""Headers of answers with data."""


def add_dashboard(app: FastAPI, history: History) -> None:
    """Adds the page and /v1/history to the application."""
    for path, file in _PATHS.items():
        _add_file(app, path, file)

    @app.get("/v1/history")
    def v1_history(after: Annotated[int, Query(ge=0, description="Number of the answer before; 0 for all.")] = 0) -> JSONResponse:
        """Samples and events of the last quarter of an hour that are newer than `after`."""
        # Not a coroutine: a whole quarter of an hour takes milliseconds to write, during which others are served.
        return JSONResponse(history.answer(after), headers=NOT_KEPT)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    content, kind = file.read_bytes(), f"{_TYPES[file.suffix]}; charset=utf-8"

    async def answer() -> Any:
        return Response(content, media_type=kind, headers=_HEADERS)

    app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
