"""Runs benchmarks by name, one process each, or all of them: `python -m bench [--json-dir DIR] [NAME...]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = ("quality", "propose_cpu", "visibility", "memory", "rpc", "restore", "replication", "chaos", "transformers_cpu")
GPU_NAMES = ("handle", "drafter", "refresh_gpu", "sharing", "vllm_replicas")
"""Need torch, triton and a CUDA GPU, the last one vLLM too; run only by name."""
LONG_NAMES = ("hostile", "soak", "policy")
"""Take up to an hour unless told otherwise; run only by name."""


def main() -> int:
    """Exit status 1 if a benchmark failed or missed what it must reach."""
    arguments = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)} (all of them by default), or {', '.join(GPU_NAMES)} on a GPU"
    )
    arguments.add_argument("--json-dir", type=Path, metavar="DIR", help="write NAME.json here")
    given = arguments.parse_args()
    unknown = set(given.names) - {*NAMES, *GPU_NAMES, *LONG_NAMES}
    if unknown:
        arguments.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    missed = []
    for name in given.names or NAMES:
        print(flush=True)
        command = [sys.executable, "-m", f"bench.{name}"]
        if given.json_dir:
            given.json_dir.mkdir(parents=True, exist_ok=True)
            command += ["--json", str(given.json_dir / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            missed.append(name)
    if missed:
        print(f"\nmissed: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
