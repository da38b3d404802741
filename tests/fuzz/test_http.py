"""The HTTP side by its own OpenAPI schema: every path and method, with hostile headers, queries and bodies, and bytes that are no HTTP."""

import http.client
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import fuzz_settings
from tests.server.harness import RunningService

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X" * 100)
LATIN = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=200)
HEADER_NAMES = st.sampled_from(
    ["Authorization", "Content-Length", "Transfer-Encoding", "Host", "Cookie", "Range", "Expect", "Accept", "Upgrade", "X-Forwarded-For"]
)
PATH_PARTS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=100)


@pytest.fixture(scope="module")
def paths(service: RunningService) -> dict[str, Any]:
    """The schema's paths."""
    schema: dict[str, Any] = json.loads(service.get("/openapi.json"))["paths"]
    return schema


def _request(service: RunningService, method: str, path: str, headers: list[tuple[str, str]], body: bytes, ends: bool = False) -> int:
    """The status of the answer; 0 if the connection was closed instead, which is an answer too.

    Args:
        ends: Say that nothing more will come, which the headers may promise.
    """
    connection = http.client.HTTPConnection("127.0.0.1", service.service.http_port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(body or None)
        if ends:
            connection.sock.shutdown(socket.SHUT_WR)
        return connection.getresponse().status
    except TimeoutError:
        raise
    except (http.client.HTTPException, OSError):
        return 0
    finally:
        connection.close()


def test_schema_has_every_page(paths: dict[str, Any]) -> None:
    assert set(paths) >= {"/healthz", "/readyz", "/metrics", "/v1/status"}


def test_every_operation_answers_as_its_schema_says(service: RunningService, paths: dict[str, Any]) -> None:
    for path, operations in paths.items():
        assert "{" not in path, "a path with parameters needs values here"
        for method in METHODS:
            status = _request(service, method, path, [("Host", "localhost")], b"")
            if method.lower() in operations:
                assert str(status) in operations[method.lower()]["responses"], (method, path)
            else:
                assert status in (400, 404, 405), (method, path)


@fuzz_settings
@given(
    method=st.sampled_from(METHODS),
    page=st.sampled_from(["/healthz", "/readyz", "/metrics", "/v1/status", "/v1/history", "/openapi.json", "/docs", "/"]),
    tail=PATH_PARTS,
    headers=st.lists(st.tuples(HEADER_NAMES, LATIN), max_size=6),
    body=st.binary(max_size=2000),
)
def test_any_request(service: RunningService, method: str, page: str, tail: str, headers: list[tuple[str, str]], body: bytes) -> None:
    status = _request(service, method, page + tail, [("Host", "localhost"), *headers], body, ends=True)
    assert status < 500, status
    assert service.get("/readyz") == "ready\n"


@fuzz_settings
@given(data=st.binary(min_size=1, max_size=3000), begun=st.booleans())
def test_any_bytes(service: RunningService, data: bytes, begun: bool) -> None:
    with socket.create_connection(("127.0.0.1", service.service.http_port), 10) as connection:
        connection.sendall((b"GET /metrics HTTP/1.1\r\n" if begun else b"") + data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := connection.recv(65_536):
                answer += part
        except ConnectionError:
            pass
    assert not answer.startswith(b"HTTP/1.1 5"), answer[:200]
    assert service.get("/healthz") == "ok\n"


def test_endless_headers_and_open_connections_cost_nobody_else(service: RunningService) -> None:
    opened = [socket.create_connection(("127.0.0.1", service.service.http_port), 10) for _ in range(50)]
    try:
        for connection in opened:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ")
        opened[0].settimeout(10)
        with pytest.raises(ConnectionError):  # noqa: PT012 - it may take several writes until the other side's close is seen
            for _ in range(1000):
                opened[0].sendall(b"a" * 65_536)
        assert service.get("/readyz") == "ready\n"
    finally:
        for connection in opened:
            connection.close()
