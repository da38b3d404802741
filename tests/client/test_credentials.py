"""What a client checks before it says anything: whose socket it is, where a token may go, and its own files."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from draftd.client import Credentials, Drafter
from draftd.client.channel import check_endpoint, open_channel, socket_path
from draftd.client.connection import Connection
from draftd.client.credentials import check_socket
from draftd.client.failopen import reason_of
from draftd.drafter.errors import InvalidArgument
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from tests.server.harness import short_directory, wait_until

ENGINE: dict[str, Any] = {"engine": "e", "vocab_size": 100, "max_rows": 2, "max_length": 64}
root_only = pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user needs root")


@pytest.fixture
def listening() -> Iterator[Path]:
    """A Unix socket that somebody listens on."""
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as server:
        path = directory / "d.sock"
        server.bind(str(path))
        server.listen(1)
        yield path


def _secret(directory: Path, content: bytes = b"token\n", mode: int = 0o600) -> Path:
    path = directory / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("/a/b", "/a/b"), ("unix:/a/b", "/a/b"), ("unix:///a/b", "/a/b"), ("unix:b", "b"), ("host:1", None), ("dns:///host:1", None)],
)
def test_endpoints(endpoint: str, path: str | None) -> None:
    assert socket_path(endpoint) == (Path(path) if path else None)


def test_own_socket_is_trusted_and_one_that_is_not_there_is_left_alone(listening: Path) -> None:
    check_socket(listening, None)
    check_socket(listening.with_name("none"), None)
    check_socket(listening.parent / "none" / "none", None)


@root_only
def test_socket_of_another_user_is_refused_unless_meant(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(listening, 12345, -1)
    with pytest.raises(PermissionError, match=r"d\.sock belongs to user 12345"):
        check_socket(listening, None)
    with pytest.raises(PermissionError):
        check_socket(listening, 12346)
    check_socket(listening, 12345)
    # Who links to a trusted name does not make it trusted.
    link = listening.with_name("link")
    link.symlink_to(listening)
    with pytest.raises(PermissionError):
        check_socket(link, None)
    os.chown(listening, 0, -1)
    os.chown(listening.parent, 12345, -1)
    with pytest.raises(PermissionError, match="the directory of socket"):
        check_socket(listening, None)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    check_socket(listening, None)


def test_directory_that_everybody_can_write_to_is_refused_unless_sticky(listening: Path) -> None:
    listening.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="everybody can write"):
        check_socket(listening, None)
    listening.parent.chmod(0o1777)
    check_socket(listening, None)


@root_only
def test_engine_fails_open_before_it_says_a_word_to_a_foreign_socket(listening: Path) -> None:
    os.chown(listening, 12345, -1)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(listening))
    with Drafter(f"unix:{listening}", **ENGINE) as drafter:
        session = drafter._connection.session
        wait_until(lambda: session.trouble[0] == "refused", 60)
        assert "belongs to user 12345" in session.trouble[1]
        assert not session._channels
        assert drafter.propose([0]).counts.tolist() == [0]


def test_token_goes_over_tls_or_to_this_host_only(tmp_path: Path) -> None:
    secret = Credentials(token_file=_secret(tmp_path))
    for near in ("localhost:1", "127.0.0.1:1", "[::1]:1", "127.1.2.3:1", "ipv4:127.0.0.1:1", "unix:/a", "/a"):
        check_endpoint(near, secret)
    for far in ("host:1", "10.0.0.1:1", "localhost.evil:1", "[2001:db8::1]:1", "dns:///host:1", "unix-abstract:x"):
        with pytest.raises(InvalidArgument, match="over TLS only"):
            check_endpoint(far, secret)
        with pytest.raises(InvalidArgument, match="over TLS only"):
            Drafter(far, **ENGINE, credentials=secret)
        check_endpoint(far, Credentials(tls=True, token_file=secret.token_file))
        check_endpoint(far, Credentials())


def test_tls_is_not_for_unix_sockets() -> None:
    for given in ({"tls": True}, {"tls_ca": Path("x")}, {"tls_server_name": "x"}):
        with pytest.raises(InvalidArgument, match="host:port"):
            check_endpoint("/a", Credentials(**given))
    with pytest.raises(InvalidArgument, match="go together"):
        Credentials(tls_key=Path("x"))


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"a\nb", b"\xff\xfe", b"x" * 5000, b"a\x00b"])
def test_file_without_one_token_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidArgument, match="one token and nothing else"):
        Credentials(token_file=_secret(tmp_path, content)).token()


def test_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    assert Credentials(token_file=_secret(tmp_path, mode=0o640)).token() == "token"
    for mode in (0o644, 0o604, 0o660):
        with pytest.raises(InvalidArgument, match="chmod 600"):
            Credentials(token_file=_secret(tmp_path, mode=mode)).token()
    with pytest.raises(InvalidArgument, match="No such file"):
        Drafter("localhost:1", **ENGINE, credentials=Credentials(token_file=tmp_path / "none"))


def test_file_of_tls_that_is_not_there(tmp_path: Path) -> None:
    none = tmp_path / "none"
    for given in (Credentials(tls_ca=none), Credentials(tls_cert=none, tls_key=none)):
        with pytest.raises(InvalidArgument, match="No such file"):
            open_channel("host:1", given)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TLS": "true", "TLS_CA": "/ca", "TLS_CERT": "/c", "TLS_KEY": "/k", "TLS_SERVER_NAME": "n", "TOKEN_FILE": "/t"}
    for name in (*values, "SOCKET_OWNER"):
        monkeypatch.delenv(f"DRAFTD_CLIENT_{name}", raising=False)
    assert Credentials.from_environment() == Credentials()
    for name, value in (*values.items(), ("SOCKET_OWNER", "12")):
        monkeypatch.setenv(f"DRAFTD_CLIENT_{name}", value)
    assert Credentials.from_environment() == Credentials(True, Path("/ca"), Path("/c"), Path("/k"), "n", Path("/t"), 12)
    for name in ("TLS", "SOCKET_OWNER"):
        with monkeypatch.context() as patch:
            patch.setenv(f"DRAFTD_CLIENT_{name}", "maybe")
            with pytest.raises(InvalidArgument, match=f"DRAFTD_CLIENT_{name}"):
                Credentials.from_environment()


def test_file_of_another_host_is_not_mapped() -> None:
    class Far:
        endpoint = "host:1"
        timeout_ms = 1.0

    connection = Connection.__new__(Connection)
    connection._config = Far()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="another host"):
        connection._open_transport(None, pb.AttachResponse(transport=pb.TRANSPORT_MAPPED))  # type: ignore[arg-type]


def test_rate_limit_is_waited_for_and_costs_no_document() -> None:
    def answer(details: str) -> Any:
        error = mock.Mock(spec=grpc.Call)
        error.code.return_value = grpc.StatusCode.RESOURCE_EXHAUSTED
        error.details.return_value = details
        return error

    assert reason_of(answer("rate limit: 3 requests a second; try again in 10 ms"))[0] == "timeout"
    assert reason_of(answer("rows: 9 unfinished rows"))[0] == "refused"
