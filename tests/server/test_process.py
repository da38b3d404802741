"""`draftd serve` as a process: its socket and ports, what is refused, and how it stops."""

import json
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
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService
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


def _refused(*flags: str) -> str:
    """The one line of a service that cannot start."""
    with short_directory() as directory:
        defaults = ["--socket", str(directory / "d.sock"), "--http", "off", "--shm-root", str(directory / "shm"), "--log-format", "json"]
        result = draftd("serve", *defaults, *flags)
        assert result.returncode == 1
        # Services of other tests in this process log of their attachments meanwhile.
        lines = [line for line in result.stderr.splitlines() if '"attachment": ' not in line]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("draftd: ")
        assert not list((directory / "shm").glob("*"))
        assert not (directory / "d.sock").exists()
        return result.stderr


def test_start_block_socket_mode_and_logs(start: Start) -> None:
    process = start("--refresh-interval-ms", "5", http="127.0.0.1:0").wait_ready()
    assert stat.S_IMODE(process.socket.parent.stat().st_mode) == 0o700
    info = process.socket.lstat()
    assert stat.S_ISSOCK(info.st_mode)
    assert stat.S_IMODE(info.st_mode) == 0o600
    block = process.log.read_text()
    for word in (f"unix:{process.socket}", "http://127.0.0.1:", "data", "limits", "memory"):
        assert word in block
    assert process.stop() == 0
    assert not process.socket.exists()
    # Where standard error is no terminal, logs are JSON.
    events = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
    assert [event["event"] for event in events] == ["stopping", "stopped"]
    assert all({"level", "timestamp"} <= set(event) for event in events)


def test_sigterm_answers_what_is_in_flight_and_says_not_serving_meanwhile(start: Start) -> None:
    process = start("--stop-grace-ms", "30000", http="127.0.0.1:0").wait_ready()
    stubs = Stubs(process.target)
    stubs.ingest("seed", [1], vocab_size=VOCAB)
    states: list[int] = []

    watch = health_pb2_grpc.HealthStub(stubs.channel).Watch(health_pb2.HealthCheckRequest(service="draftd.v1.DrafterService"))
    states.append(next(watch).status)
    proposal = pb.ProposeRequest(rows=[pb.Row(tokens=[1])])
    arrived = threading.Event()

    def requests() -> Iterator[pb.ProposeStreamRequest]:
        yield pb.ProposeStreamRequest(sequence=1, request=proposal)
        arrived.wait(30)
        yield pb.ProposeStreamRequest(sequence=2, request=proposal)

    answers = stubs.drafter.ProposeStream(requests())
    assert next(answers).sequence == 1
    process.process.send_signal(signal.SIGTERM)
    states.append(next(watch).status)
    watch.cancel()
    assert states == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{process.http_port()}/readyz", timeout=5)
    # The stream that was open is still answered.
    arrived.set()
    assert next(answers).sequence == 2
    assert process.process.wait(60) == 0
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


def test_second_service_on_the_same_socket_is_refused(process: Process) -> None:
    assert f"socket {process.socket}: a service is running there" in _refused("--socket", str(process.socket))
    assert Stubs(process.target).drafter.Propose(pb.ProposeRequest(rows=[pb.Row(tokens=[1])])).drafts


def test_socket_of_another_program_that_answers_is_not_touched() -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as other:
        path = directory / "other.sock"
        other.bind(str(path))
        other.listen(1)
        assert "a service is running there" in _refused("--socket", str(path))
        assert path.exists()


def test_file_in_the_place_of_the_socket_is_not_removed() -> None:
    with short_directory() as directory:
        path = directory / "precious"
        path.write_text("data")
        assert "a file that is not a socket is in the way" in _refused("--socket", str(path))
        assert path.read_text() == "data"


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory to another user needs root")
def test_directory_of_another_user_is_refused() -> None:
    with short_directory() as directory:
        os.chown(directory, 12345, 12345)
        assert "belongs to user 12345" in _refused("--socket", str(directory / "d.sock"))


def test_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        assert f"http 127.0.0.1:{port}: Address already in use" in _refused("--http", f"127.0.0.1:{port}")
        assert f"listen 127.0.0.1:{port}: the address is taken" in _refused("--listen", f"127.0.0.1:{port}", "--insecure")


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


def test_tls_file_that_is_not_there() -> None:
    said = _refused("--listen", "localhost:0", "--tls-cert", "/none/cert", "--tls-key", "/none/key")
    assert "/none/key: No such file or directory" in said


def test_service_whose_gpu_is_lost_keeps_what_it_has_and_ends(start: Start, tmp_path: Path) -> None:
    """The driver answers every call with the same error then, and whoever watches the service starts another."""
    lost = tmp_path / "lost"
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib\nfrom draftd.drafter.corpus import Corpus\n"
        f"Corpus.device_failure = property(lambda _: 'an illegal memory access' if pathlib.Path({str(lost)!r}).exists() else '')\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    flags = ("--data-dir", str(tmp_path / "data"), "--store-lag-ms", "10000", "--log-format", "json")
    process = start(*flags, environment=environment).wait_ready()
    documents = [pb.IngestDocument(document_id=f"d{i}", tokens=range(100), complete=True) for i in range(5)]
    Stubs(process.target).drafter.Ingest(pb.IngestRequest(documents=documents, vocab_size=VOCAB), timeout=10)
    lost.touch()
    assert process.process.wait(30) == 1
    last = json.loads(process.log.read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("gpu_lost", "an illegal memory access")
    assert not process.socket.exists()
    lost.unlink()
    process.log.write_text("")
    again = start(*flags, environment=environment).wait_ready()
    assert "(5 documents, 500 tokens restored" in again.log.read_text()


def test_service_outlives_exports_that_are_broken_off() -> None:
    """gRPC frees a call that is cancelled before its stream is closed."""
    document = pb.IngestDocument(packed_tokens=np.arange(100_000, dtype="<i4").tobytes(), complete=True)
    with PrivateService(http=False) as service, grpc.insecure_channel(service.endpoint) as opened:
        drafter, corpus = draftd_pb2_grpc.DrafterServiceStub(opened), draftd_pb2_grpc.CorpusServiceStub(opened)
        for number in range(10):
            document.document_id = f"{number}"
            drafter.Ingest(pb.IngestRequest(namespace="large", vocab_size=100_000, documents=[document]), timeout=60)
        for number in range(30):
            answers = corpus.Export(pb.ExportRequest(namespace="large"), timeout=60)
            next(answers)
            answers.cancel()
            if number % 3:
                time.sleep(0.02)
        assert corpus.GetNamespace(pb.GetNamespaceRequest(namespace="large"), timeout=60).namespace.documents == 10
        assert service.exit_code is None
