"""Triton kernels run in its interpreter where there is no GPU, decided before one is imported; logs are not on standard output."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.logs import log_to_stderr

try:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
except ImportError:
    # The tests that need it skip, and say so.
    pass

log_to_stderr()
