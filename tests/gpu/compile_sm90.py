"""Compiles every kernel that the host code launches to sm_90, on a machine without a GPU: `python -m tests.gpu.compile_sm90`.

The host code runs on tensors of the CPU with a stand-in for the driver, so that kernels are specialized as in real launches.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from draftd.client.vllm.kernels import pick_rows, spread_drafts
from draftd.drafter import compiling
from draftd.drafter.device import DeviceDrafter, DeviceDrafts
from draftd.drafter.device_calibrated import DeviceCalibrated, DeviceLessons
from draftd.drafter.device_index import DeviceIndex, DeviceShape
from draftd.drafter.ops.collect.gpu import collect_rows
from draftd.drafter.ops.merge.gpu import fill_buckets, merge
from draftd.drafter.ops.sort.gpu import sort_positions
from draftd.drafter.params import DraftParams

BATCHES = (1, 128, 256, 512)
"""One for each way in which a batch is spread; see Launch.of."""

DOUBLED = 1 << 18
"""So many suffixes are sorted by doubling ranks."""


class NoGpu:
    """Answers what compilation asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        """An H100 or H200."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def compile_only() -> list[tuple[str, Any]]:
    """From now on launches only compile. Answers each kernel's name and what it is compiled to; filled as they come."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    driver.set_active(NoGpu())
    JITFunction.run = warm_up
    return compiled


def main() -> None:
    """Prints the kernels and the size of their largest code, in bytes, as JSON."""
    compiled = compile_only()
    with compiling.together():
        launch_all()
    sizes: dict[str, int] = {}
    for name, kernel in compiled:
        sizes[name] = max(sizes.get(name, 0), len(kernel.asm["cubin"]))
    print(json.dumps(sizes))


def launch_all() -> None:
    """Launches every kernel, in each way that it is specialized."""
    shape = DeviceShape(4096, 1024, 1024, 128_256, 64)
    index = DeviceIndex(shape, "cpu")
    for batch in BATCHES:
        params = DraftParams(k=16, max_depth=24, policy="tree")
        drafter = DeviceDrafter(index.arena, index.headers, max_batch=batch, max_row_tokens=4096, params=params)
        tokens = torch.zeros((batch, 4096), dtype=torch.int32)
        words = torch.ones((3, batch), dtype=torch.int32)
        drafter.propose(tokens, words[0], words[1], words[2], DeviceDrafts.empty(batch, params.k, "cpu"))
        memory = index.memory
        pins = torch.zeros(64, dtype=torch.int64)
        shared = DeviceDrafter(
            index.arena, index.headers, max_batch=batch, max_row_tokens=4096, params=params, control=memory.control, pins=pins
        )
        shared.propose(tokens, words[0], words[1], words[2], DeviceDrafts.empty(batch, params.k, "cpu"))
    for lessons in (None, DeviceLessons.empty(1, 16, "cpu")):
        calibrated = DeviceCalibrated(
            index.arena, index.headers, max_batch=1, max_row_tokens=4096, params=DraftParams(k=16),
            control=None if lessons is None else index.memory.control, pins=torch.zeros(64, dtype=torch.int64),
        )  # fmt: skip
        row, words, out = torch.zeros((1, 4096), dtype=torch.int32), torch.ones(1, dtype=torch.int32), DeviceDrafts.empty(1, 16, "cpu")
        calibrated.propose(row, words, words, words, out, lessons)
    positions = torch.from_numpy(np.arange(2048, dtype=np.int32))
    for count in (64, 2048):
        sort_positions(index.text, positions[:count], 64, 128_256)
    many = torch.zeros(DOUBLED + 65, dtype=torch.int32)
    sort_positions(many, torch.arange(DOUBLED, dtype=torch.int32), 64, 128_256, span=(0, DOUBLED))
    for evict in (0, 100):
        merge(
            index.text, positions[:1000], positions[:100], index.main[0], depth=64, buckets=index.buckets[0, 0], shift=shape.shift,
            evict_start=0, evict_length=evict, ring=4096,
        )  # fmt: skip
    fill_buckets(index.text, positions, shape.shift, index.buckets[0, 1])
    index.sign(0, 0, positions)
    slots, words = torch.zeros((3, 16), dtype=torch.int64), torch.zeros((4, 16), dtype=torch.int32)
    pick_rows[(1,)](slots[0], words[0], words[1], 3, 16, words[2], words[3], BLOCK=128, num_warps=1)
    drafts = DeviceDrafts.empty(2, 5, "cpu")
    spread_drafts[(2,)](
        drafts.tokens,
        drafts.probabilities,
        drafts.counts,
        words[0],
        slots[0],
        128_256,
        slots[1],
        drafts.probabilities,
        K=5,
        LANES=8,
        num_warps=1,
    )
    rows = torch.arange(32, dtype=torch.int32).view(2, 16)
    ring = (torch.zeros(2, dtype=torch.int64), torch.zeros(4096, dtype=torch.int32), torch.zeros((256, 2), dtype=torch.int64))
    for teaching in (False, True):
        collect_rows[(2,)](
            rows, 16, 2, 16, words[0], words[1], words[2:], drafts.tokens, drafts.counts, drafts.source, drafts.match_length,
            drafts.occurrences, 5, *ring, 2, words[3], words[3], 228, words[3], 162, words[3], K=8, TEACHING=teaching, num_warps=1,
        )  # fmt: skip


if __name__ == "__main__":
    main()
