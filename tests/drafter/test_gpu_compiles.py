"""Every GPU kernel compiles to sm_90 machine code, on a machine without a GPU."""

from __future__ import annotations

import json
import os
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
        for line in path.read_text().splitlines():
            name, bracket, _ = line.strip().partition("[(")
            if bracket and name.isidentifier():
                launched.add(name)
    return launched


def test_every_kernel_compiles_to_sm_90(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_sm90"], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert set(sizes) >= _kernels() - {"_"}, "a kernel is launched that this test does not compile"
    assert min(sizes.values()) > 0
