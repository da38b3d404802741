"""Skips what needs a GPU where there is none."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder as skipped without CUDA, and says why."""
    try:
        import torch

        reason = "" if torch.cuda.is_available() else "there is no CUDA GPU"
    except ImportError:
        reason = "torch is not installed"
    if reason:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
