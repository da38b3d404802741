"""Triton kernels run in its interpreter where there is no GPU: to be decided before any of them is imported."""

import os

try:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
except ImportError:
    # The tests that need it skip, and say so.
    pass
