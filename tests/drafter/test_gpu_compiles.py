"""Every GPU kernel compiles to sm_90 machine code, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


def _kernels() -> set[str]:
    """Names of the kernels that the host code launches."""
    launched = set()
    for path in [*(ROOT / "drafter").rglob("*.py"), *(ROOT / "client").rglob("*.py")]:
        text = path.read_text()
        launched.update(re.findall(r"^\s*(\w+)\[\(", text, re.MULTILINE))
        launched.update(re.findall(r"compiling\.launch\(\s*(\w+),", text))
    return launched


def test_every_kernel_compiles_to_sm_90(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_sm90"], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert {"match_rows", "merge_runs"} < _kernels()
    assert set(sizes) >= _kernels(), "a kernel is launched that this test does not compile"
    assert min(sizes.values()) > 0


_TOGETHER = """
import torch
from triton.runtime import driver
from draftd.client.vllm.kernels import pick_rows
from draftd.drafter import compiling
from tests.gpu.compile_sm90 import NoGpu
driver.set_active(NoGpu())
slots, words = torch.ones((1, 16), dtype=torch.int64), torch.ones((4, 16), dtype=torch.int32)
kernels = pick_rows.device_caches[0][0]
with compiling.together():
    for block in (32, 64):
        for _ in range(2):
            compiling.launch(pick_rows, (1,), slots[0], words[0], words[1], 3, 16, words[2], words[3], BLOCK=block, num_warps=1)
print(len(kernels), min(len(kernel.asm["cubin"]) for kernel in kernels.values()) > 0, bool((words == 1).all()))
"""


def test_kernels_compile_together_and_do_not_run(tmp_path: Path) -> None:
    """Each once, and whatever is launched afterwards finds it."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _TOGETHER], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=env)
    assert done.stdout.split() == ["2", "True", "True"], done.stderr[-2000:]
