"""What drafting over HANDLE costs an engine's stream on a GPU: from the end of its decode step until the drafts are there.

`python -m bench.handle`; with MPS, start it under the control daemon. The decode step is a kernel that does nothing for 5 ms.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from bench.machine import parser, report
from bench.service import channel
from draftd.client.device_handle import DeviceHandle
from draftd.drafter import cuda_memory
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

_FLAGS = (
    *("--device", "cuda", "--quota-tokens", "262144", "--recent-tokens", "16384", "--live-tokens", "16384", "--device-memory", "256"),
    *("--policy", "tree", "--log-level", "warning"),
)
_VOCAB, _LENGTH = 1000, 2048
_STEP_CYCLES = 8_500_000
"""About 5 ms."""


def measure(endpoint: str, batch: int, steps: int = 200) -> tuple[float, float, float, int, int]:
    """Attaches an engine of `batch` rows and answers figures in microseconds: median and p99 of the stream's time for drafting, and median
    of the host's time for asking; the steps that got no drafts in time; and the tokens drafted in the last one."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy((rng.zipf(1.5, (batch, _LENGTH)) % 200).astype(np.int32)).cuda()
    lengths = torch.from_numpy(rng.integers(200, _LENGTH, batch).astype(np.int32)).cuda()
    params = DraftParams(k=16, max_depth=24, policy="tree")
    with DeviceHandle(
        endpoint, engine=f"bench-{batch}", vocab_size=_VOCAB, tokens=tokens, lengths=lengths, max_batch=batch, params=params, timeout_ms=20
    ) as handle:  # fmt: skip
        deadline = time.monotonic() + 60
        while not handle.attached:
            if time.monotonic() > deadline:
                raise TimeoutError(str(handle.trouble))
            time.sleep(0.01)
        rows = torch.arange(batch, device="cuda")
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)]
        host = []
        for before, after in events:
            torch.cuda._sleep(_STEP_CYCLES)
            before.record()
            started = time.perf_counter()
            drafts = handle.propose(rows)
            host.append(1e6 * (time.perf_counter() - started))
            after.record()
            while not after.query():
                time.sleep(0.0005)
        stream = [1000 * before.elapsed_time(after) for before, after in events][steps // 10 :]
        drafted = int(drafts.counts.sum())
        return float(np.median(stream)), float(np.percentile(stream, 99)), float(np.median(host)), handle.given_up, drafted


def main() -> None:
    """Measures batches of 1, 32 and 256 rows."""
    arguments = parser(__doc__).parse_args()
    torch.cuda.init()
    mps = cuda_memory.under_mps(torch.device("cuda", 0))
    rng = np.random.default_rng(1)
    with PrivateService(_FLAGS, http=False) as service:
        texts = [(rng.zipf(1.5, 1000) % 200).tolist() for _ in range(100)]
        documents = [pb.IngestDocument(document_id=f"d{i}", tokens=text, complete=True) for i, text in enumerate(texts)]
        with channel(service.endpoint) as open_channel:
            stub = draftd_pb2_grpc.DrafterServiceStub(open_channel)
            stub.Ingest(pb.IngestRequest(documents=documents, vocab_size=_VOCAB, wait_visible=True))
        rows = [(batch, *measure(service.endpoint, batch)) for batch in (1, 32, 256)]
    columns = ("batch", "stream us", "stream p99 us", "host us", "given up", "tokens drafted")
    report(f"HANDLE {'with' if mps else 'without'} MPS", columns, rows, arguments.json)


if __name__ == "__main__":
    main()
