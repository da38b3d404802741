"""A service to measure: filled with documents over its API; the id of its process, and the memory that it has on a GPU."""

from __future__ import annotations

import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import numpy as np
from numpy.typing import NDArray

from bench.workload import VOCABULARY
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc

DOCUMENTS_A_CALL = 256


@contextmanager
def channel(endpoint: str) -> Iterator[grpc.Channel]:
    """A channel to a service on a Unix socket, or anywhere else."""
    with grpc.insecure_channel(endpoint, options=[("grpc.default_authority", "localhost")]) as opened:
        yield opened


def fill(endpoint: str, documents: Sequence[NDArray[np.int32]], first: int = 0) -> None:
    """Ingests whole documents into the namespace "default"; returns when all can be drafted from.

    Args:
        first: Number of the first document, from which ids are made.
    """
    with channel(endpoint) as opened:
        stub = draftd_pb2_grpc.DrafterServiceStub(opened)
        for start in range(0, len(documents), DOCUMENTS_A_CALL):
            batch = [
                pb.IngestDocument(document_id=f"document-{first + start + i}", packed_tokens=d.astype("<i4").tobytes(), complete=True)
                for i, d in enumerate(documents[start : start + DOCUMENTS_A_CALL])
            ]
            stub.Ingest(pb.IngestRequest(documents=batch, vocab_size=VOCABULARY, wait_visible=True), timeout=60)


def process_id(endpoint: str) -> int:
    """Id of the process that listens on `unix:PATH`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(endpoint.removeprefix("unix:"))
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def device_mib(pid: int) -> int:
    """MiB of GPU memory that a process has; those of all processes together where the driver knows them by other ids."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    by_pid = {int(line.split(",")[0]): int(line.split(",")[1]) for line in out.splitlines() if line.strip()}
    return by_pid.get(pid, sum(by_pid.values()))
