"""What does a token of corpus cost in memory? Bytes in shared memory and in the service's own memory, beside arctic-inference.

Documents come over the API, and the index is settled before it is measured. Exits 1 if both together are above 24 bytes a token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from bench import peers, service
from bench.machine import parser, report
from bench.workload import make
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

LIMIT = 24.0
DEPTH = 64
_SETTLE_S = 5.0
_SMALL = 262_144
"""Tokens with which the service is warmed, a merge into `main` included, before its own memory is first read."""


def private_bytes(pid: int) -> int:
    """Resident memory of a process that is not shared memory."""
    info = psutil.Process(pid).memory_info()
    return int(info.rss - info.shared)


def block_bytes(root: Path) -> int:
    """Bytes of the pages in use of all index blocks below a shared-memory root."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def main() -> int:
    """Prints the table; 1 if a token costs too much."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 2_000_000, 4_000_000], help="sizes of the corpus")
    given = arguments.parse_args()
    workload = make(max(given.tokens), 1)
    rows: list[tuple[object, ...]] = []
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="draftd-bench-", dir="/dev/shm") as root, PrivateService(["--shm-root", root]) as running:
        pid = service.process_id(running.endpoint)
        done = held = base_tokens = base = 0
        for goal in [_SMALL, *sorted(given.tokens)]:
            batch: list[NDArray[np.int32]] = []
            while held < goal:
                batch.append(workload.documents[done + len(batch)])
                held += len(batch[-1])
            service.fill(running.endpoint, batch, first=done)
            done += len(batch)
            time.sleep(_SETTLE_S)
            if not base:
                base, base_tokens = private_bytes(pid), held
                continue
            with service.channel(running.endpoint) as opened:
                request = pb.GetNamespaceRequest()
                namespace = draftd_pb2_grpc.CorpusServiceStub(opened).GetNamespace(request, timeout=10).namespace
            shared = block_bytes(Path(root)) / namespace.tokens
            private = max(0, private_bytes(pid) - base) / (held - base_tokens)
            worst = max(worst, shared + private)
            rows.append(("draftd", namespace.tokens, namespace.bytes / namespace.tokens, shared, private, shared + private))
    smallest = make(min(given.tokens), 1)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        smallest.save(Path(file.name))
        peer = peers.arctic("memory", file.name, DEPTH)
    if peer:
        rows.append((f"arctic, depth {DEPTH}", smallest.tokens, None, None, peer["bytes_per_token"], peer["bytes_per_token"]))
    columns = ("drafter", "tokens", "reported B/token", "shared B/token", "own B/token", "total B/token")
    report("Memory a token of corpus and index, in bytes", columns, rows, given.json, [] if peer else [peers.MISSING])
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
