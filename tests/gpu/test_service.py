"""`draftd serve --device cuda` and `draftd replay --device cuda`: the same figures as on the CPU, to the last token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


def _replay(device: str, trace: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "draftd.server.main", "replay", str(SAMPLES / trace), "--device", device]
    done = subprocess.run([*command, "--visibility", "step", "--json", *flags], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("trace", ["specbench_math_reasoning.jsonl.gz", "taubench.jsonl.gz"])
def test_replay_drafts_as_on_the_cpu(trace: str) -> None:
    flags = ("--policy", "tree", "--transport", "inline", "--spec-factor", "4", "--max-depth", "24", "--limit-sessions", "40")
    cpu, gpu = _replay("cpu", trace, *flags), _replay("cuda", trace, *flags)
    assert gpu["outputs_exact"]
    for name in ("steps", "tokens", "drafted_per_step", "tokens_per_step", "acceptance"):
        assert gpu[name] == cpu[name], name


def test_mapped_engine_falls_back_with_the_reason() -> None:
    figures = _replay("cuda", "specbench_math_reasoning.jsonl.gz", "--limit-sessions", "4")
    assert figures["transport"] == "inline"


def test_device_that_is_not_there_is_refused_in_one_line() -> None:
    command = [
        sys.executable,
        "-m",
        "draftd.server.main",
        "serve",
        "--device",
        "cuda:99",
        "--http",
        "off",
        "--socket",
        "/tmp/draftd-gpu.sock",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "there are" in done.stderr
    assert "Traceback" not in done.stderr


_FAULT = """
import torch
from draftd.drafter.cuda_memory import device_failure
gpu = torch.device("cuda", 0)
torch.zeros(4, device=gpu)
print(repr(device_failure(gpu)))
try:
    torch.zeros(4, device=gpu)[torch.tensor([10**6], device=gpu)].cpu()
except RuntimeError:
    print(device_failure(gpu))
"""


def test_gpu_that_does_nothing_more_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULT], capture_output=True, text=True, timeout=120, check=False)
    before, after = done.stdout.splitlines()
    assert (before, "CUDA error" in after) == ("''", True), done.stdout
