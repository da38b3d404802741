"""What does drafting add to a call? Inline Propose of one row beside an empty unary call of the same size on the same server.

The empty call is the health check, its request padded to the same bytes with a field that the server skips. Blocks of both alternate.
Exits 1 if the median of Propose is above 1.5 times the empty call's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import cast

import numpy as np
from grpc_health.v1 import health_pb2

from bench import service
from bench.machine import parser, report
from bench.workload import make
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.replay.service import PrivateService

LIMIT = 1.5
BLOCK = 100
_PAD_FIELD = 1000


def padded_check(size: int) -> bytes:
    """A HealthCheckRequest of `size` bytes, its bytes in a length-delimited field that it does not have."""
    tag = (_PAD_FIELD << 3) | 2
    head = bytes([tag & 0x7F | 0x80, tag >> 7])
    for length_bytes in (1, 2, 3):
        payload = size - len(head) - length_bytes
        varint = _varint(payload)
        if len(varint) == length_bytes:
            message = head + varint + bytes(payload)
            health_pb2.HealthCheckRequest.FromString(message)
            return message
    raise ValueError(f"no padded message has {size} bytes")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block_us(call: Callable[[bytes], bytes], messages: list[bytes]) -> list[float]:
    """Time of each call, in microseconds."""
    times = []
    for message in messages:
        started = time.perf_counter_ns()
        call(message)
        times.append((time.perf_counter_ns() - started) / 1000)
    return times


def main() -> int:
    """Prints the table; 1 if Propose is too slow."""
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=5000, help="calls of each kind (default 5000)")
    arguments.add_argument("--context", type=int, default=256, metavar="TOKENS", help="tokens of the row (default 256, 1 KiB)")
    given = arguments.parse_args()
    workload = make(1_000_000, 512, max_context=given.context)
    contexts = [c for c in workload.contexts if len(c) == given.context]
    requests = [
        pb.ProposeRequest(rows=[pb.Row(packed_tokens=c.astype("<i4").tobytes())], packed=True).SerializeToString() for c in contexts
    ]
    with PrivateService(http=False) as running:
        service.fill(running.endpoint, workload.documents)
        with service.channel(running.endpoint) as opened:
            # Bytes in, bytes out: the client's own parsing is not the question.
            propose = cast(Callable[[bytes], bytes], opened.unary_unary("/draftd.v1.DrafterService/Propose"))
            empty = cast(Callable[[bytes], bytes], opened.unary_unary("/grpc.health.v1.Health/Check"))
            drafted = sum(len(pb.ProposeResponse.FromString(propose(r)).drafts[0].packed_tokens) // 4 for r in requests) / len(requests)
            times: dict[str, list[float]] = {"empty": [], "Propose": []}
            for number in range(-5, given.calls // BLOCK):
                batch = [requests[(max(number, 0) * BLOCK + i) % len(requests)] for i in range(BLOCK)]
                measured = {"empty": block_us(empty, [padded_check(len(b)) for b in batch]), "Propose": block_us(propose, batch)}
                if number >= 0:
                    for name, values in measured.items():
                        times[name] += values
    p50 = {name: float(np.percentile(values, 50)) for name, values in times.items()}
    ratio = p50["Propose"] / p50["empty"]
    rows = [(name, len(requests[0]), p50[name], float(np.percentile(times[name], 99)), p50[name] / p50["empty"]) for name in p50]
    title = f"Inline Propose over a Unix socket, one row of {given.context} tokens, {workload.tokens:,} tokens of corpus"
    columns = ("call", "request bytes", "p50 µs", "p99 µs", "of empty (p50)")
    report(title, columns, rows, given.json, [f"{drafted:.1f} tokens drafted a call"])
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
