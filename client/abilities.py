"""What this process can do here, and why not: shared memory, the service's socket, the namespaces of containers.

`draftd selftest` shows all of it; a client that would map an index and cannot logs what stands in the way. Nothing here needs a service.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from draftd.client.channel import socket_path
from draftd.client.credentials import check_socket

MAPPED_CPU = "mapped on the CPU"
HANDLE_CPU = "handle on the CPU"
ON_CPU = (MAPPED_CPU, HANDLE_CPU)
EVERYWHERE = ("mapped", "handle")

_HOST_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""Inodes that Linux gives to the namespaces of the host; see include/linux/proc_ns.h."""
_SMALL_BYTES = 128 * 2**20
_LEAST_BYTES = 8 * 2**20
_CONNECT_TIMEOUT_S = 2.0
_OTHER_PIDS = "not that of the service: classic IPC of device memory needs it to be (shareProcessNamespace, --pid)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at, the same on every machine.
        ok: It is as it should be; None where it is for information only.
        text: What was found and, where it is not as it should be, what to do.
        needed_for: Abilities that are missing where it is not ok; `mapped` and `handle` stand for those of every device.
    """

    name: str
    ok: bool | None
    text: str
    needed_for: tuple[str, ...] = ()


def reasons_against(ability: str, findings: Iterable[Finding]) -> list[str]:
    """Why an ability is missing; empty if it is there."""
    names = {ability, ability.partition(" ")[0]}
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.ok is False and names.intersection(finding.needed_for)]


def shared_memory(root: Path) -> list[Finding]:
    """Whether blocks can be made and mapped below `root`, by default /dev/shm/draftd-UID, or where its nearest parent is."""
    place = next((path for path in (root, *root.parents) if path.exists()), Path("/"))
    try:
        if place == root and place.stat().st_uid != os.geteuid():
            raise PermissionError(0, f"it belongs to user {place.stat().st_uid}, this process is user {os.geteuid()}")
        sizes = os.statvfs(place)
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[0] = 1
    except OSError as error:
        return [Finding("shared memory", False, f"{place}: {error.strerror}; give shm_root, or mount a tmpfs that may be written", ON_CPU)]
    total, free = sizes.f_frsize * sizes.f_blocks, sizes.f_frsize * sizes.f_bavail
    text = f"{place} can be written and mapped; {free / 2**20:,.0f} of {total / 2**20:,.0f} MiB are free"
    if free < _LEAST_BYTES:
        return [Finding("shared memory", False, f"{text}: too little for an index", ON_CPU)]
    hint = "; containers have 64 MiB unless --shm-size or an emptyDir of medium Memory says more" if total < _SMALL_BYTES else ""
    return [Finding("shared memory", True, text + hint, ON_CPU)]


def container() -> list[Finding]:
    """In which namespaces of PIDs and IPC this process is, and whether that is a container."""
    signs = [path for path in ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io") if os.path.exists(path)]
    said = f"yes, by {signs[0]}" if signs else "no sign of one"
    kinds = [
        f"{kind} {number}{' (the host)' * (number == _HOST_NAMESPACES[kind])}" for kind in ("pid", "ipc") if (number := _namespace(kind))
    ]
    return [Finding("container", None, said), Finding("namespaces", None, ", ".join(kinds) or "/proc does not tell")]


def service(endpoint: str, owner: int | None, root: Path) -> list[Finding]:
    """Whether a service of this host answers at `endpoint`, whose it is, and whether it is in the same namespaces.

    Args:
        endpoint: `unix:PATH`, an absolute path, or `host:port`.
        owner: Also trust a socket of this user; see Credentials.
        root: Directory of the service's blocks.
    """
    path = socket_path(endpoint)
    if path is None:
        text = f"{endpoint} is not a Unix socket: whoever shares memory with a service must be on its host"
        return [Finding("service", False, text, EVERYWHERE)]
    try:
        check_socket(path, owner)
        pid, user = _peer(path)
    except FileNotFoundError:
        return [Finding("service", None, f"none at {path}")]
    except ConnectionRefusedError:
        return [Finding("service", None, f"none at {path}: one that died left its socket there")]
    except OSError as error:
        return [Finding("service", False, f"{path}: {error.strerror or error}", EVERYWHERE)]
    who = f"process {pid}" if pid else "a process of another PID namespace"
    findings = [Finding("service", True, f"{who} answers at {path}", EVERYWHERE)]
    mine = user == os.geteuid() or not os.geteuid()
    text = f"user {user}" if mine else f"user {user}, this process is user {os.geteuid()}: blocks are open to their owner alone"
    return [*findings, Finding("service's user", mine, text, EVERYWHERE), *_shared_with(pid, root)]


def explain(error: Exception, endpoint: str, owner: int | None, root: Path) -> str:
    """Why an index could not be mapped, in one line: what stands in the way on this machine, else what went wrong."""
    found = [*service(endpoint, owner, root), *shared_memory(root)]
    return "; ".join([*reasons_against(MAPPED_CPU, found), str(error) or type(error).__name__])


def _peer(path: Path) -> tuple[int, int]:
    """Process, 0 if it cannot be seen from here, and user of whoever listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        probe.connect(str(path))
        pid, user, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, user


def _shared_with(pid: int, root: Path) -> list[Finding]:
    """What this process and that one have in common."""
    if not pid:
        return [Finding("PID namespace", None, _OTHER_PIDS)]
    findings = []
    for kind, name in (("pid", "PID namespace"), ("ipc", "IPC namespace")):
        theirs = _namespace(kind, pid)
        other = _OTHER_PIDS if kind == "pid" else "not that of the service, which does no harm"
        text = "cannot be seen" if not theirs else "that of the service" if theirs == _namespace(kind) else other
        findings.append(Finding(name, None, text))
    return [*findings, _directory(pid, root)]


def _directory(pid: int, root: Path) -> Finding:
    """Whether the directory of the service's blocks is the same here, be it of one /dev/shm or mounted into another."""
    name = "service's blocks"
    try:
        theirs = os.stat(f"/proc/{pid}/root{root}")
    except FileNotFoundError:
        return Finding(name, None, f"the service has no {root}: give its shm_root")
    except OSError:
        return Finding(name, None, f"whether {root} is the service's cannot be seen")
    try:
        ours = os.stat(root)
    except OSError as error:
        return Finding(name, False, f"{root} is the service's, and here: {error.strerror}; mount it in both containers", ON_CPU)
    same = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
    text = f"{root} is the service's" if same else f"{root} is not the service's: mount the same one in both containers"
    return Finding(name, same, text, ON_CPU)


def _namespace(kind: str, pid: int | str = "self") -> int:
    """The inode of a process's namespace; 0 if it cannot be seen."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:
        return 0
