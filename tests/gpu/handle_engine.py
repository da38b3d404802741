"""An engine process that shares tensors with a service, for tests that kill it: `python -m tests.gpu.handle_engine ENDPOINT NAME`.

It says `attached`; for each line that it reads it leaves a draft pending behind long GPU work and says `pending`.
"""

from __future__ import annotations

import sys
import time

import torch

from draftd.client.device_handle import DeviceHandle
from draftd.drafter.params import DraftParams

_LONG_CYCLES = 20_000_000_000
"""About ten seconds of GPU work."""


def main() -> None:
    """Runs until it is killed."""
    endpoint, name = sys.argv[1:]
    tokens = torch.zeros((2, 64), dtype=torch.int32, device="cuda")
    lengths = torch.full((2,), 8, dtype=torch.int32, device="cuda")
    params = DraftParams(k=8, max_depth=24, policy="tree")
    handle = DeviceHandle(
        endpoint, engine=name, vocab_size=1000, tokens=tokens, lengths=lengths, k=8, max_batch=2, params=params, timeout_ms=50
    )
    while not handle.attached:
        time.sleep(0.01)
    order = torch.arange(2, device="cuda")
    handle.propose(order)
    torch.cuda.synchronize()
    print("attached", flush=True)
    for _ in sys.stdin:
        torch.cuda._sleep(_LONG_CYCLES)
        handle.propose(order)
        print("pending", flush=True)


if __name__ == "__main__":
    main()
