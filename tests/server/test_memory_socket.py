"""Who gets device memory from the memory socket, and what: with files in place of device memory."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.device_indexes import DeviceIndexes, SharedIndexes
from draftd.drafter.device_memory import Exported
from draftd.drafter.errors import InvalidArgument
from draftd.server.memory_socket import LENGTH, MemorySocket


def _file(content: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def _content(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    return os.read(fd, 100)


class Indexes:
    """Hands out one file as the head and one a namespace."""

    def __init__(self) -> None:
        self.uuid = "0" * 32
        self.memory = SimpleNamespace(head_bytes=4096)
        self.pins: dict[str, bytes] = {}
        self.gone: list[str] = []

    def share(self, reader: str, names: Sequence[str], pin: int) -> SharedIndexes:
        content = _content(pin)
        os.close(pin)
        if content != b"pin":
            raise InvalidArgument("pin: it is not memory", "pin")
        self.pins[reader] = content
        pieces = [Exported(0, 4096, _file(b"head"))]
        pieces += [Exported(4096 * (i + 1), 4096, _file(name.encode())) for i, name in enumerate(names)]
        return SharedIndexes({name: i for i, name in enumerate(names)}, pieces)

    def unshare(self, reader: str) -> None:
        self.gone.append(reader)


@pytest.fixture
def indexes() -> Indexes:
    return Indexes()


@pytest.fixture
def place(tmp_path: Path, indexes: Indexes) -> Iterator[MemorySocket]:
    made = MemorySocket(tmp_path, [cast(DeviceIndexes, indexes)])
    yield made
    made.close()


def _ask(place: MemorySocket, body: bytes, fds: list[int]) -> tuple[dict[str, Any], list[bytes]]:
    """What is answered; nothing at all if the connection is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(place.path))
        if fds:
            socket.send_fds(connection, [body], fds)
            for fd in fds:
                os.close(fd)
        else:
            connection.sendall(body)
        head = connection.recv(LENGTH.size, socket.MSG_WAITALL)
        if not head:
            return {}, []
        about: dict[str, Any] = json.loads(connection.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL))
        got: list[int] = []
        while len(got) < len(about["pieces"]):
            got += socket.recv_fds(connection, 1, 250)[1]
    contents = [_content(fd) for fd in got]
    for fd in got:
        os.close(fd)
    return about, contents


def _body(ticket: str) -> bytes:
    return LENGTH.pack(len(ticket)) + ticket.encode()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ticket_gets_the_namespaces_of_its_attachment(place: MemorySocket, indexes: Indexes) -> None:
    namespaces = ["a"]
    ticket = place.grant("one", "0" * 32, namespaces)
    place.grant("two", "0" * 32, ["secret"])
    about, contents = _ask(place, _body(ticket), [_file(b"pin")])
    assert (about["headers"], about["head_bytes"], contents) == ({"a": 0}, 4096, [b"head", b"a"])
    assert about["pieces"] == [[0, 4096], [4096, 4096]]
    assert indexes.pins == {"one": b"pin"}
    namespaces.append("b")
    assert _ask(place, _body(ticket), [_file(b"pin")])[1] == [b"head", b"a", b"b"]


def test_ticket_is_for_the_gpu_that_it_was_made_for(tmp_path: Path) -> None:
    one, other = Indexes(), Indexes()
    other.uuid = "1" * 32
    place = MemorySocket(tmp_path, [cast(DeviceIndexes, one), cast(DeviceIndexes, other)])
    try:
        _ask(place, _body(place.grant("first", one.uuid, ["a"])), [_file(b"pin")])
        ticket = place.grant("second", other.uuid, ["a"])
        _ask(place, _body(ticket), [_file(b"pin")])
        assert (set(one.pins), set(other.pins)) == ({"first"}, {"second"})
        place.revoke(ticket, "second")
        assert (one.gone, other.gone) == ([], ["second"])
    finally:
        place.close()


def test_more_pieces_than_one_message_takes_arrive_in_order(place: MemorySocket) -> None:
    names = [f"n{i}" for i in range(450)]
    about, contents = _ask(place, _body(place.grant("many", "0" * 32, names)), [_file(b"pin")])
    assert contents == [b"head", *(name.encode() for name in names)]
    assert len(about["pieces"]) == 451


@pytest.mark.parametrize("what", ["unknown", "revoked", "garbage", "no pin", "two pins", "wrong pin"])
def test_nobody_else_gets_anything_and_nothing_leaks(place: MemorySocket, indexes: Indexes, what: str) -> None:
    ticket = place.grant("one", "0" * 32, ["a"])
    before = _open_files()
    body, fds = _body(ticket), [_file(b"pin")]
    if what == "unknown":
        body = _body("0" * len(ticket))
    elif what == "revoked":
        place.revoke(ticket, "one")
        assert indexes.gone == ["one"]
    elif what == "garbage":
        body = os.urandom(300)
    elif what == "no pin":
        os.close(fds.pop())
    elif what == "two pins":
        fds.append(_file(b"pin"))
    else:
        os.close(fds.pop())
        fds.append(_file(b"something else"))
    try:
        answer = _ask(place, body, fds)
    except ConnectionResetError:
        answer = ({}, [])
    assert answer == ({}, [])
    assert _open_files() == before
    assert place.refused == 1
    if what != "revoked":
        assert _ask(place, _body(ticket), [_file(b"pin")])[1] == [b"head", b"a"], "the next one is served"


def test_who_says_nothing_holds_up_nobody_for_long(place: MemorySocket) -> None:
    ticket = place.grant("one", "0" * 32, ["a"])
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(place.path))
        assert _ask(place, _body(ticket), [_file(b"pin")])[1] == [b"head", b"a"]


def test_socket_is_the_owners_and_goes_with_the_service(tmp_path: Path, indexes: Indexes) -> None:
    made = MemorySocket(tmp_path, [cast(DeviceIndexes, indexes)])
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    made.close()
    assert not made.path.exists()
