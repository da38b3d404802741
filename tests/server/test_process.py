"""`draftd serve` as a process: its socket and ports, what is refused, and how it stops."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import VOCAB, Process, Stubs, draftd, error_of, short_directory

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts services that end with the test."""
    started: list[Process] = []
    with short_directory() as directory:
        shm = Path(f"/dev/shm/{directory.name}")

        def begin(*flags: str, environment: dict[str, str] | None = None, http: str = "off") -> Process:
            process = Process(directory, "--http", http, "--shm-root", str(shm), *flags, environment=environment)
            started.append(process)
            return process

        yield begin
        for process in started:
            process.stop()
        shutil.rmtree(shm, ignore_errors=True)


def _refused(process: Process) -> str:
    """The one line that a service that cannot start leaves."""
    assert process.process.wait(60) == 1
    lines = process.log.read_text().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("draftd: ")
    return lines[0]


def test_start_block_and_socket_mode(start: Start) -> None:
    process = start(http="127.0.0.1:0").wait_ready()
    info = process.socket.lstat()
    assert stat.S_ISSOCK(info.st_mode)
    assert stat.S_IMODE(info.st_mode) == 0o600
    block = process.log.read_text()
    for word in (f"unix:{process.socket}", "http://127.0.0.1:", "data", "limits", "memory"):
        assert word in block
    assert process.stop() == 0
    assert not process.socket.exists()


def test_sigterm_answers_what_is_in_flight_and_says_not_serving_meanwhile(start: Start) -> None:
    process = start("--stop-grace-ms", "2000", http="127.0.0.1:0").wait_ready()
    stubs = Stubs(process.target)
    stubs.ingest("seed", [1], vocab_size=VOCAB)
    states: list[int] = []

    def watch() -> None:
        try:
            request = health_pb2.HealthCheckRequest(service="draftd.v1.DrafterService")
            states.extend(answer.status for answer in health_pb2_grpc.HealthStub(stubs.channel).Watch(request))
        except grpc.RpcError:
            pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    inputs: list[pb.ProposeStreamRequest | None] = [
        pb.ProposeStreamRequest(sequence=1, request=pb.ProposeRequest(rows=[pb.Row(tokens=[1])]))
    ]
    arrived = threading.Event()

    def requests() -> Iterator[pb.ProposeStreamRequest]:
        yield inputs[0]  # type: ignore[misc]
        arrived.wait(10)
        yield pb.ProposeStreamRequest(sequence=2, request=pb.ProposeRequest(rows=[pb.Row(tokens=[1])]))

    answers = stubs.drafter.ProposeStream(requests())
    assert next(answers).sequence == 1
    process.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while health_pb2.HealthCheckResponse.NOT_SERVING not in states and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{process.http_port()}/readyz", timeout=5)
    # The stream that was open is still answered.
    arrived.set()
    assert next(answers).sequence == 2
    assert process.process.wait(20) == 0
    watcher.join(10)
    assert not process.socket.exists()
    assert not any((Path("/dev/shm") / process.socket.parent.name).iterdir())


def test_service_killed_leaves_a_socket_that_the_next_one_replaces(start: Start) -> None:
    first = start().wait_ready()
    first.process.kill()
    first.process.wait(10)
    assert first.socket.exists()
    first.log.unlink()
    second = start().wait_ready()
    assert Stubs(second.target).drafter.Propose(pb.ProposeRequest(rows=[pb.Row(tokens=[1])])).drafts
    assert len([path for path in (Path("/dev/shm") / first.socket.parent.name).iterdir() if path.is_dir()]) == 1


def test_second_service_on_the_same_socket_is_refused(start: Start) -> None:
    first = start().wait_ready()
    first.log.unlink()
    second = start()
    assert f"socket {first.socket}: a service is running there" in _refused(second)
    assert Stubs(first.target).drafter.Propose(pb.ProposeRequest(rows=[pb.Row(tokens=[1])])).drafts


def test_socket_of_another_program_that_answers_is_not_touched(start: Start) -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as other:
        path = directory / "other.sock"
        other.bind(str(path))
        other.listen(1)
        assert "a service is running there" in _refused(start("--socket", str(path)))
        assert path.exists()


def test_file_in_the_place_of_the_socket_is_not_removed(start: Start) -> None:
    with short_directory() as directory:
        path = directory / "precious"
        path.write_text("data")
        assert "a file that is not a socket is in the way" in _refused(start("--socket", str(path)))
        assert path.read_text() == "data"


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory to another user needs root")
def test_directory_of_another_user_is_refused(start: Start) -> None:
    with short_directory() as directory:
        os.chown(directory, 12345, 12345)
        assert "belongs to user 12345" in _refused(start("--socket", str(directory / "d.sock")))


def test_directory_of_the_default_socket_is_private(start: Start) -> None:
    with short_directory() as directory:
        nested = directory / "made" / "d.sock"
        process = start("--socket", str(nested)).wait_ready()
        assert stat.S_IMODE(nested.parent.stat().st_mode) == 0o700
        process.stop()


def test_http_port_that_is_taken(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        assert f"http 127.0.0.1:{port}: Address already in use" in _refused(start(http=f"127.0.0.1:{port}"))
        assert f"listen 127.0.0.1:{port}: the address is taken" in _refused(
            _restarted(start, "--listen", f"127.0.0.1:{port}", "--insecure")
        )


def _restarted(start: Start, *flags: str) -> Process:
    process = start(*flags)
    process.log.write_text("")
    return process


def test_tcp_needs_tls_or_consent() -> None:
    result = draftd("serve", "--listen", "127.0.0.1:0")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "needs tls_cert and tls_key, or insecure" in result.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tcp_with_tls(start: Start) -> None:
    with short_directory() as directory:
        key, certificate = directory / "key.pem", directory / "cert.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]  # noqa: RUF005
            + ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
            check=True,
            capture_output=True,
        )
        process = start("--listen", "localhost:0", "--tls-cert", str(certificate), "--tls-key", str(key)).wait_ready()
        line = next(line for line in process.log.read_text().splitlines() if "localhost:" in line)
        target = line.split()[-1]
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(target, credentials) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        code, _ = error_of(lambda: Stubs(target).draft([1]))
        assert code == "UNAVAILABLE"


def test_tls_file_that_is_not_there(start: Start) -> None:
    said = _refused(start("--listen", "localhost:0", "--tls-cert", "/none/cert", "--tls-key", "/none/key"))
    assert "listen localhost:0" in said


def test_logs_are_json_where_there_is_no_terminal(start: Start) -> None:
    import json

    process = start().wait_ready()
    process.stop()
    events = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
    assert [event["event"] for event in events] == ["stopping", "stopped"]
    assert all({"level", "timestamp"} <= set(event) for event in events)
