"""How long to fuzz: DRAFTD_FUZZ_S seconds for calls that run by the clock, and as many times more examples for hypothesis."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.server.harness import REFRAIN, VOCAB, RunningService

FUZZ_S = float(os.environ.get("DRAFTD_FUZZ_S", "8"))
fuzz_settings = settings(
    max_examples=max(20, int(20 * FUZZ_S)), deadline=None, suppress_health_check=list(HealthCheck), derandomize=FUZZ_S <= 8
)
"""Without DRAFTD_FUZZ_S the same examples each time: a change fails only for what it changed."""


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    """A service with small limits; it serves the pages of its HTTP side. No hostile value names its namespace "sentinel"."""
    running = RunningService(
        max_k=32, max_rows=8, max_length=512, max_batch=16, max_namespaces=8, max_attachments=8, lease_ms=1000, http_docs=True
    )
    running.ingest("refrain", REFRAIN, namespace="sentinel", complete=True, wait_visible=True, vocab_size=VOCAB)
    yield running
    running.close()
