"""`draftd top`: what a service does, in a terminal, over its HTTP endpoint."""

import contextlib
import json
import os
import select
import ssl
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from draftd.client.channel import check_endpoint
from draftd.client.credentials import ENV_PREFIX, Credentials
from draftd.drafter.errors import DraftdError
from draftd.server.cli.channel import JsonOption, wide_console
from draftd.server.cli.failure import Failure, UsageFailure
from draftd.server.cli.top_screen import COLUMNS, KEYS, View, screen
from draftd.server.dashboard.window import summarize

REFRESH_S = 1.0
TIMEOUT_S = 3.0
WINDOWS_S = (10, 60, 300, 900)
_KEPT_S = 960
_LISTS = {"e": "engine", "n": "namespace"}
_EVENTS_KEPT = 100
_SILENT_AFTER_S = 2.5


class Unreachable(Exception):
    """The service did not answer, or not with what was asked for."""


class ByChoice(StrEnum):
    """--by"""

    engine = "engine"
    namespace = "namespace"


class Service:
    """A service's HTTP endpoint, and what it has said so far.

    Attributes:
        status: Its last /v1/status.
        answer: Its last /v1/history.
        samples: Oldest first.
        events: By id.
    """

    def __init__(self, url: str, credentials: Credentials) -> None:
        """Raises UsageFailure if the URL is none, or the credentials do not fit it."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageFailure(f"--http {url}: is no http:// or https:// URL")
        self._tls: ssl.SSLContext | None = None
        try:
            if parts.scheme == "https":
                self._tls = ssl.create_default_context(cafile=str(credentials.tls_ca) if credentials.tls_ca else None)
            else:
                check_endpoint(f"{parts.netloc}" if parts.port else f"{parts.netloc}:80", Credentials(token_file=credentials.token_file))
            token = credentials.token()
        except DraftdError as error:
            raise UsageFailure(str(error)) from None
        except OSError as error:
            raise UsageFailure(f"--tls-ca {credentials.tls_ca}: {error.strerror or error}") from None
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.status: dict[str, Any] = {}
        self.answer: dict[str, Any] = {"run": "", "number": 0}
        self.samples: list[dict[str, Any]] = []
        self.events: dict[int, dict[str, Any]] = {}

    def ask(self) -> None:
        """Asks for what is new; raises Unreachable, and Failure if it is refused."""
        self.status = self._get("/v1/status")
        answer = self._get(f"/v1/history?after={self.answer['number']}")
        if answer["run"] != self.answer["run"]:
            self.samples, self.events = [], {}
            answer = self._get("/v1/history?after=0")
        self.answer = answer
        self.samples = [s for s in (*self.samples, *answer["samples"]) if s["at_s"] > answer["now_s"] - _KEPT_S]
        self.events |= {event["id"]: event for event in answer["events"]}
        for old in sorted(self.events, key=lambda number: self.events[number]["last_s"])[:-_EVENTS_KEPT]:
            del self.events[old]

    def newest_events(self) -> list[dict[str, Any]]:
        """Newest first."""
        return sorted(self.events.values(), key=lambda event: -float(event["last_s"]))

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise Failure(f"{self.url}: {error.read().decode(errors='replace').strip()} (see --token-file)") from None
            if error.code == 421:
                raise Failure(f"{self.url}: {error.read().decode(errors='replace').strip()}") from None
            raise Unreachable(f"{self.url}{path} answers {error.code}") from None
        except urllib.error.URLError as error:
            raise Unreachable(str(error.reason)) from None
        except (OSError, ValueError) as error:
            raise Unreachable(str(error)) from None


def top(
    http: Annotated[
        str, typer.Option("--http", envvar=ENV_PREFIX + "HTTP", help="The service's HTTP endpoint, a URL.")
    ] = "http://127.0.0.1:9464",
    by: Annotated[ByChoice, typer.Option(help="List engines or namespaces.")] = ByChoice.engine,
    sort: Annotated[
        str, typer.Option(help="Column to sort by, as --json names it: the largest first, names from a to z.", show_default=False)
    ] = "",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    window: Annotated[int, typer.Option(help="Seconds that rates and ratios are of.", min=2, max=900)] = 60,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as when the output is no terminal.")] = False,
    as_json: JsonOption = False,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar=ENV_PREFIX + "TOKEN_FILE", help="File with a token, of mode 0600.", metavar="FILE", show_default=False),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar=ENV_PREFIX + "TLS_CA", help="PEM certificates of the authorities to believe.", metavar="FILE", show_default=False
        ),
    ] = None,
) -> None:
    """Watch a running service: acceptance, latency, engines, namespaces, events. Press q to leave.

    --once and --json (which is once, too) are for scripts.
    """
    view = View(by.value, sort, reverse, window)
    keys = [column.key for column in COLUMNS[view.by]]
    if sort and sort not in keys:
        raise UsageFailure(f"--sort {sort}: is none of {', '.join(keys)}")
    service = Service(http, Credentials(token_file=token_file, tls_ca=tls_ca))
    try:
        service.ask()
    except Unreachable as error:
        raise Failure(f"no service answers at {service.url} ({error}); start one with `draftd serve`, or give --http") from None
    console = wide_console()
    if as_json:
        events = service.newest_events()
        typer.echo(json.dumps(_figures(service, view) | {"events": events}, indent=2))
    elif once or not console.is_terminal:
        console.print(screen(_figures(service, view), service.newest_events(), view, 0, None))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(console, service, view)


def _figures(service: Service, view: View) -> dict[str, Any]:
    figures = summarize(service.status, service.answer, service.samples, view.window_s)
    rows = "engines" if view.by == "engine" else "namespaces"
    return figures | {rows: view.sorted(figures[rows])}


def _watch(console: Console, service: Service, view: View) -> None:
    """Asks each second and shows what comes, until q is pressed."""
    heard = time.monotonic()
    with _single_keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            silent_s = time.monotonic() - heard
            shown = screen(
                _figures(service, view), service.newest_events(), view, console.height, silent_s if silent_s > _SILENT_AFTER_S else None
            )
            live.update(Group(shown, Text(KEYS, style="dim", no_wrap=True)), refresh=True)
            if _pressed(keyboard, view):
                return
            try:
                service.ask()
                heard = time.monotonic()
            except Unreachable:
                # Shown as the time since the last answer; it is asked again in a second.
                continue


def _pressed(keyboard: int | None, view: View) -> bool:
    """Waits for the next second or a key, and does what the key is for; True for q."""
    ready = select.select([keyboard] if keyboard is not None else [], [], [], REFRESH_S)[0]
    keys = os.read(keyboard, 64).decode(errors="replace").lower() if ready and keyboard is not None else ""
    for key in keys:
        if key in _LISTS:
            view.by, view.sort = _LISTS[key], ""
        elif key == "s":
            view.next_sort()
        elif key == "r":
            view.reverse = not view.reverse
        elif key == "w":
            view.window_s = next((s for s in WINDOWS_S if s > view.window_s), WINDOWS_S[0])
    return "q" in keys


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """The keyboard, each key at once and not shown; None where there is none."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
