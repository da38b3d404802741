"""A real service for the client's tests, and drafters that are attached to it."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from draftd.client import Drafter
from draftd.server.replay.service import PrivateService

VOCAB_SIZE = 1000
ATTACH_TIMEOUT_S = 60
_numbers = count()


@pytest.fixture(scope="session")
def service() -> Iterator[PrivateService]:
    """A service that tests share; each uses a namespace of its own."""
    with PrivateService(["--policy", "tree"]) as running:
        yield running


@pytest.fixture
def own_service() -> Iterator[PrivateService]:
    """A service that one test may stop, kill and restart."""
    with PrivateService(["--policy", "tree"], http=False) as running:
        yield running


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Fails unless a condition comes to hold."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to hold"
            time.sleep(0.01)

    return wait


@pytest.fixture
def attach(service: PrivateService, namespace: str) -> Iterator[Callable[..., Drafter]]:
    """Makes attached drafters: `attach(transport, **more)`."""
    made: list[Drafter] = []

    def make(transport: str = "mapped", *, wait: bool = True, endpoint: str | None = None, **more: object) -> Drafter:
        arguments = {"vocab_size": VOCAB_SIZE, "max_rows": 8, "max_length": 2048, "namespace": namespace, "timeout_ms": 2000.0} | more
        drafter = Drafter(endpoint or service.endpoint, engine=f"engine-{next(_numbers)}", transport=transport, **arguments)  # type: ignore[arg-type]
        made.append(drafter)
        assert not wait or drafter.wait_attached(ATTACH_TIMEOUT_S)
        return drafter

    yield make
    for drafter in made:
        drafter.detach()
