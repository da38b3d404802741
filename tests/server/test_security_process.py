"""`draftd serve` and its security settings: what it does not start with, signals, and stops that nothing holds up."""

import errno
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftd.server.config import ConfigError, load_config
from tests.server.harness import Process, RunningService, Stubs, draftd, short_directory, wait_until
from tests.server.test_security_rpc import PRINCIPALS, token_file

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for a process, with shared memory of the same name."""
    with short_directory() as made:
        yield made
        shutil.rmtree(f"/dev/shm/{made.name}", ignore_errors=True)


def _process(directory: Path, *flags: str, environment: dict[str, str] | None = None) -> Process:
    return Process(directory, "--http", "off", "--shm-root", f"/dev/shm/{directory.name}", *flags, environment=environment)


def _refused(directory: Path, *flags: str) -> str:
    path = directory / "sub" / "d.sock"
    result = draftd("serve", "--socket", str(path), "--http", "off", "--shm-root", str(directory / "shm"), *flags)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1), result.stderr
    assert not path.exists()
    return result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"listen": "127.0.0.1:1", "insecure": True, "tls_client_ca": "c"}, "tls_client_ca: needs tls_cert and tls_key"),
        ({"http_tls": True}, "http_tls: needs tls_cert and tls_key"),
        ({"require_token": True}, "require_token: needs token_file"),
        ({"rate_requests": -1}, "rate_requests (from flag)"),
        ({"rate_tokens": float("inf")}, "rate_tokens (from flag)"),
    ],
)
def test_settings_that_do_not_go_together(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(flags)
    assert said in str(error.value)


def test_token_file_that_others_can_read_is_refused(directory: Path) -> None:
    path = token_file(directory, PRINCIPALS)
    path.chmod(0o644)
    assert "others must have no access to it: chmod 600" in _refused(directory, "--token-file", str(path))
    assert "No such file" in _refused(directory, "--token-file", str(directory / "none"))


def test_socket_directory_that_everybody_can_write_to_is_refused(directory: Path) -> None:
    (directory / "sub").mkdir()
    (directory / "sub").chmod(0o777)
    assert "everybody can write to it" in _refused(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_connect_wherever_the_socket_is(directory: Path) -> None:
    """What stands for looking at the peer's credentials: the kernel does it, by the socket's mode."""
    directory.chmod(0o755)
    (directory / "sub").mkdir()
    (directory / "sub").chmod(0o1777)
    process = Process(directory / "sub", "--http", "off", "--shm-root", f"/dev/shm/{directory.name}").wait_ready()
    try:
        errors = []
        for user in (0, 65534):
            child = os.fork()
            if child == 0:
                os.setgid(user)
                os.setuid(user)
                with socket.socket(socket.AF_UNIX) as connection:
                    os._exit(connection.connect_ex(str(process.socket)))
            errors.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert errors == [0, errno.EACCES]
    finally:
        process.stop()


def test_sighup_reads_tokens_again(directory: Path) -> None:
    path = token_file(directory, {"a": PRINCIPALS["reader"]})
    process = _process(directory, "--token-file", str(path), "--log-format", "json").wait_ready()
    try:
        process.process.send_signal(signal.SIGHUP)
        wait_until(lambda: '"file": "tokens", "event": "reloaded"' in process.log.read_text())
        assert Stubs(process.target).draft([1, 2, 1], k=1) == [2]
    finally:
        assert process.stop() == 0


def test_open_watch_does_not_hold_up_the_stop(directory: Path) -> None:
    process = _process(directory, "--stop-grace-ms", "600000").wait_ready()
    watch = health_pb2_grpc.HealthStub(Stubs(process.target).channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    process.process.terminate()
    assert [state.status for state in watch] == [NOT_SERVING]
    assert process.process.wait(60) == 0


def test_sigterm_while_kernels_are_compiled_ends_the_service(directory: Path, tmp_path: Path) -> None:
    process = _process(directory, "--log-format", "json", environment={"NUMBA_CACHE_DIR": str(tmp_path)})
    shm = Path(f"/dev/shm/{directory.name}")
    # The block of the namespace that the kernels are tried on is there: it is compiling, which takes a minute.
    wait_until(lambda: any(shm.glob("*/index-*")), 60)
    process.process.terminate()
    assert process.process.wait(60) == 0
    log = process.log.read_text()
    assert '"while_starting": true' in log
    assert "is ready" not in log
    assert not process.socket.exists()
    assert not any(path for path in shm.iterdir() if path.is_dir())


def test_watcher_that_leaves_takes_nothing_from_the_others() -> None:
    running = RunningService()
    stub = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest(service="draftd.v1.CorpusService")
    leaving, staying, unknown = stub.Watch(request), stub.Watch(request), stub.Watch(health_pb2.HealthCheckRequest(service="none"))
    assert [next(watch).status for watch in (leaving, staying)] == [SERVING, SERVING]
    assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    leaving.cancel()
    wait_until(lambda: not leaving.is_active())
    running.on_loop(lambda: running.service._set_serving(False))
    assert next(staying).status == NOT_SERVING
    running.on_loop(lambda: running.service._set_serving(True))
    assert next(staying).status == SERVING
    running.close()
