"""The Host header of HTTP: addresses, localhost and the service's own names, and nothing that a web page can have point here."""

import http.client
import json
import socket

import pytest

from draftd.server.config import ConfigError, load_config
from draftd.server.metrics import Metrics
from draftd.server.security.hosts import HostGuard, hosts_of
from tests.server.harness import RunningService, draftd


def _guard(*names: str) -> HostGuard:
    async def nothing(*_: object) -> None:
        raise AssertionError("not called here")

    return HostGuard(nothing, names, Metrics(1))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:9464",
        "10.0.3.7:80",
        "[::1]",
        "[::1]:9464",
        "[fe80::1%eth0]:9464",
        "localhost",
        "LocalHost:9464",
        "x.localhost:1",
        "draftd.inference.svc:9464",
        "Draftd.Inference.svc.",
        "a.example.com",
        "b.a.example.com:443",
    ],
)
def test_names_of_the_service(host: str) -> None:
    assert _guard("draftd.inference.svc", ".example.com").allows(host.encode())


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "example.com",
        "evilexample.com",
        "svc",
        "",
        "[::1].evil:80",
        "1.2.3",
        "é",
    ],
)
def test_names_of_others(host: str) -> None:
    assert not _guard("draftd.inference.svc", ".example.com").allows(host.encode("latin-1"))
    assert _guard("*").allows(host.encode("latin-1"))


def test_the_name_in_http_is_one_of_them() -> None:
    assert hosts_of(" a.b , .c", "gpu-node-7") == ["gpu-node-7", socket.gethostname(), "a.b", ".c"]


@pytest.mark.parametrize("hosts", ["http://a", "a b", "*.example.com", "a:9464", "a,,/"])
def test_a_setting_that_is_no_name_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="http_hosts"):
        load_config({"http_hosts": hosts})


def _status(service: RunningService, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", service.service.http_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_a_page_that_points_its_name_here_reads_nothing(service: RunningService) -> None:
    before = service.metric('draftd_refused_calls_total{reason="host"}')
    for path in ("/", "/metrics", "/v1/status", "/v1/history", "/healthz", "/nothing"):
        status, body = _status(service, path, Host=f"evil.example:{service.service.http_port}")
        assert (status, "http_hosts" in body) == (421, True)
    assert service.metric('draftd_refused_calls_total{reason="host"}') == before + 6
    assert json.loads(_status(service, "/v1/status", Host="localhost:80")[1])["ready"]


def test_top_says_what_is_wrong(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: looked_up("127.0.0.1", *rest, **more))
    result = draftd("top", "--once", "--http", f"http://node-7.example:{service.service.http_port}")
    assert (result.returncode, "see http_hosts" in result.stderr) == (1, True), result.stderr


def test_a_name_that_is_given_is_answered() -> None:
    running = RunningService(http_hosts="draftd.example, .svc")
    try:
        assert _status(running, "/healthz", Host="draftd.example")[0] == 200
        assert _status(running, "/healthz", Host="draftd.inference.svc:9464")[0] == 200
        assert _status(running, "/healthz", Host="evil.example")[0] == 421
    finally:
        running.close()
