"""What a machine can do and why not: shared memory, the service's socket, namespaces; and what a client says that cannot map."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftd.client import Drafter, abilities
from draftd.client.abilities import HANDLE_CPU, MAPPED_CPU, Finding, explain, reasons_against, service, shared_memory
from draftd.client.transports.mapped import MappedTransport
from draftd.server.replay.service import PrivateService

Attach = Callable[..., Drafter]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """The socket of something that listens, in a directory of this user."""
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def _one(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_a_reason_counts_for_what_it_is_needed_for() -> None:
    findings = [
        Finding("a", False, "is not", (MAPPED_CPU,)),
        Finding("b", False, "neither", ("handle",)),
        Finding("c", None, "so", ("mapped",)),
    ]
    assert reasons_against(MAPPED_CPU, findings) == ["a: is not"]
    assert reasons_against(HANDLE_CPU, findings) == ["b: neither"]
    assert reasons_against("handle on cuda:0", findings) == ["b: neither"]
    assert not reasons_against("mapped on cuda:0", findings)


def test_shared_memory_that_can_be_used_leaves_nothing_behind(tmp_path: Path) -> None:
    (finding,) = shared_memory(tmp_path / "not" / "made" / "yet")
    assert finding.ok
    assert str(tmp_path) in finding.text
    assert not list(tmp_path.iterdir())


def test_shared_memory_of_another_user_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    (finding,) = shared_memory(tmp_path)
    assert finding.ok is False
    assert "belongs to user" in reasons_against(MAPPED_CPU, [finding])[0]


def test_shared_memory_that_is_full_is_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 2**14, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    (finding,) = shared_memory(tmp_path)
    assert (finding.ok, "too little" in finding.text) == (False, True)


def test_the_64_mib_of_a_container_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = os.statvfs_result((4096, 4096, 2**14, 2**14, 2**14, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    (finding,) = shared_memory(tmp_path)
    assert (finding.ok, "--shm-size" in finding.text) == (True, True)


def test_a_service_of_this_process_shares_everything(listening: Path) -> None:
    found = service(f"unix:{listening}", None, listening.parent)
    assert f"process {os.getpid()}" in _one(found, "service").text
    assert _one(found, "service's user").ok
    assert _one(found, "service's blocks").ok
    assert _one(found, "PID namespace").text == "that of the service"
    assert not reasons_against(MAPPED_CPU, found)


def test_no_service_is_no_fault_of_the_machine(tmp_path: Path, listening: Path) -> None:
    (nobody,) = service(f"unix:{tmp_path}/nobody", None, tmp_path)
    assert nobody.ok is None
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    (dead,) = service(f"unix:{tmp_path}/left", None, tmp_path)
    assert (dead.ok, "died" in dead.text) == (None, True)


def test_a_service_of_another_host_shares_no_memory() -> None:
    assert "must be on its host" in reasons_against(MAPPED_CPU, service("draftd.example:9500", None, Path("/dev/shm")))[0]


def test_a_socket_that_everybody_can_replace_is_not_trusted(listening: Path) -> None:
    listening.parent.chmod(0o777)
    (finding,) = service(f"unix:{listening}", None, listening.parent)
    assert (finding.ok, "everybody can write" in finding.text) == (False, True)


def test_a_service_of_another_user_keeps_its_blocks_to_itself(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(abilities, "_peer", lambda _: (os.getpid(), 4712))
    found = service(f"unix:{listening}", listening.stat().st_uid, listening.parent)
    assert "open to their owner alone" in reasons_against(HANDLE_CPU, found)[0]


def test_a_directory_that_is_not_the_services_is_found_out(listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat
    others = f"/proc/{os.getpid()}/root{tmp_path}"
    elsewhere = real("/")

    monkeypatch.setattr(os, "stat", lambda path, **more: elsewhere if str(path) == others else real(path, **more))
    assert "mount the same one" in reasons_against(MAPPED_CPU, service(f"unix:{listening}", None, tmp_path))[0]


def test_a_directory_that_only_the_service_has_is_found_out(listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat
    missing = tmp_path / "blocks"
    there = real("/")
    monkeypatch.setattr(os, "stat", lambda path, **more: there if str(path) == f"/proc/{os.getpid()}/root{missing}" else real(path, **more))
    assert "mount it in both containers" in reasons_against(HANDLE_CPU, service(f"unix:{listening}", None, missing))[0]


def test_a_directory_that_the_service_does_not_have_may_be_the_wrong_one(listening: Path, tmp_path: Path) -> None:
    found = _one(service(f"unix:{listening}", None, tmp_path / "blocks"), "service's blocks")
    assert (found.ok, "give its shm_root" in found.text) == (None, True)


def test_a_service_that_cannot_be_seen_is_in_another_pid_namespace(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities, "_peer", lambda _: (0, os.geteuid()))
    found = service(f"unix:{listening}", None, listening.parent)
    assert "shareProcessNamespace" in _one(found, "PID namespace").text
    assert not reasons_against(MAPPED_CPU, found)


def test_an_explanation_has_what_stands_in_the_way_before_the_error(listening: Path, tmp_path: Path) -> None:
    assert explain(OSError("no such file"), f"unix:{listening}", None, tmp_path) == "no such file"
    assert explain(ValueError(), f"unix:{listening}", None, tmp_path) == "ValueError"
    listening.parent.chmod(0o777)
    said = explain(OSError("no such file"), f"unix:{listening}", None, tmp_path)
    assert said.index("everybody can write") < said.index("no such file")


def test_a_client_that_cannot_map_says_why_and_is_counted(
    own_service: PrivateService,
    attach: Attach,
    eventually: Callable[[Callable[[], bool]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unmappable(self: MappedTransport, params: object) -> None:
        raise OSError("the block is in another /dev/shm " + "x" * 600)

    monkeypatch.setattr(MappedTransport, "warm_up", unmappable)
    caplog.set_level(logging.WARNING, "draftd.client")
    drafter = attach("auto", endpoint=own_service.endpoint)
    assert (drafter.transport, drafter.fallbacks) == ("inline", 1)
    assert drafter.fallback.startswith("the block is in another /dev/shm")
    assert len(drafter.fallback) == 512
    assert [record for record in caplog.records if "does not map: the block is in another" in record.getMessage()]
    monkeypatch.undo()
    # A service that comes back may be where the engine can map: it is tried anew.
    own_service.kill()
    own_service.start()
    eventually(lambda: drafter.transport == "mapped" and drafter.attached)
    assert (drafter.fallback, drafter.fallbacks) == ("", 1)
