"""Makes the repository's root importable, so that tests can share the bench beside them."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# The first call of a kernel compiles it: no deadline.
settings.register_profile(
    "drafter", deadline=None, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("drafter")


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compiles every kernel before the first test, so that no test waits for it alone."""
    from draftd.drafter.corpus import Corpus

    corpus = Corpus()
    corpus.start()
    corpus.close()
