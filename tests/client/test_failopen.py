"""A decode loop goes on whatever happens: no service, a silent one, a refusing one, and wrong calls; all of it counted."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftd.client import Drafter, FailOpen
from draftd.drafter.errors import DraftdError, InvalidArgument
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import FAIL_OPEN_REASONS
from draftd.server.replay.service import PrivateService

Attach = Callable[..., Drafter]
Eventually = Callable[[Callable[[], bool]], None]
TRANSPORTS = ("mapped", "handle", "inline")


def fail_opens(drafter: Drafter) -> dict[str, int]:
    """Fail-opens by reason, without those that did not happen."""
    return {reason: int(n) for reason, n in zip(FAIL_OPEN_REASONS, drafter.stats.fail_opens, strict=True) if n}


def decode(drafter: Drafter, steps: int) -> None:
    """A decode loop over one request."""
    drafter.start(0, [1, 2, 3])
    for step in range(steps):
        drafts = drafter.propose([0])
        assert drafts.tokens.shape == (1, 16)
        drafter.append(0, [10 + step])
    drafter.finish(0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_service(attach: Attach, tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "draftd.client")
    drafter = attach(transport, endpoint=f"unix:{tmp_path}/nobody", wait=False)
    decode(drafter, 20)
    assert sum(fail_opens(drafter).values()) == 20
    assert set(fail_opens(drafter)) <= {"unavailable", "unattached"}
    assert not drafter.attached
    assert drafter.transport == "none"
    assert not drafter.wait_visible(0.01)
    drafter.detach()
    assert drafter.stats.lost_tokens[0] == 20
    assert 1 <= len(caplog.records) <= 2
    assert "drafts without the service" in caplog.text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_service_that_does_not_answer(own_service: PrivateService, attach: Attach, transport: str) -> None:
    drafter = attach(transport, endpoint=own_service.endpoint, timeout_ms=2.0)
    own_service.signal(signal.SIGSTOP)
    try:
        decode(drafter, 50)
        if transport == "mapped":
            # The mapped index does not need its writer; the session finds out a little later.
            assert set(fail_opens(drafter)) <= {"timeout"}
        else:
            assert fail_opens(drafter) == {"timeout": 50}
    finally:
        own_service.signal(signal.SIGCONT)
    assert drafter.wait_attached(30)
    assert drafter.wait_visible(30)
    assert drafter.stats.lost_tokens[0] == 0


def test_refused_attachments_are_counted_and_tried_again(attach: Attach, eventually: Eventually) -> None:
    first = attach("inline")
    other = attach("inline", wait=False, vocab_size=77)
    decode(other, 3)

    def refused() -> bool:
        decode(other, 1)
        return "refused" in fail_opens(other)

    eventually(refused)
    assert first.attached


def test_mapped_over_tcp_is_served_inline() -> None:
    with PrivateService(["--listen", "127.0.0.1:0", "--insecure"], http=False) as service:
        line = next(line for line in service.log().splitlines() if "127.0.0.1:" in line)
        with Drafter(line.split()[-1], engine="far", vocab_size=10, max_rows=1, max_length=100, transport="auto") as drafter:
            assert drafter.wait_attached(30)
            assert drafter.transport == "inline"


def _comes_back_changed(drafter: Drafter) -> None:
    drafter.preempt(0)
    drafter.start(0, [7, 7, 7, 7], "known")


def _finishes_twice(drafter: Drafter) -> None:
    drafter.finish(0)
    drafter.finish(0)


WRONG: dict[str, Callable[[Drafter], Any]] = {
    "row below 0": lambda d: d.start(-1, [1]),
    "row not below max_rows": lambda d: d.start(8, [1]),
    "row of the wrong type": lambda d: d.start("0", [1]),  # type: ignore[arg-type]
    "prompt token negative": lambda d: d.start(1, [-1]),
    "prompt token not below vocab_size": lambda d: d.start(1, [1000]),
    "prompt too long": lambda d: d.start(1, [1] * 2049),
    "prompt of floats": lambda d: d.start(1, [1.5]),
    "prompt of two dimensions": lambda d: d.start(1, [[1]]),
    "prompt ragged": lambda d: d.start(1, [[1], [2, 3]]),
    "prompt_length above the tokens": lambda d: d.start(1, [1], prompt_length=2),
    "document_id too long": lambda d: d.start(1, [1], "x" * 129),
    "namespace not attached": lambda d: d.start(1, [1], namespace="elsewhere"),
    "preempted request with other tokens": _comes_back_changed,
    "propose for a row never started": lambda d: d.propose([0, 5]),
    "propose for a row out of range": lambda d: d.propose([0, 99]),
    "propose for a row twice": lambda d: d.propose([0, 0]),
    "propose for floats": lambda d: d.propose([0.5]),
    "propose for more than k": lambda d: d.propose([0], DraftParams(k=17)),
    "append to a row never started": lambda d: d.append(5, [1]),
    "append a token not below vocab_size": lambda d: d.append(0, [1, 1000]),
    "append too much": lambda d: d.append(0, [1] * 2048),
    "finish a row never started": lambda d: d.finish(5),
    "finish twice": _finishes_twice,
    "preempt a row never started": lambda d: d.preempt(5),
}


@pytest.mark.parametrize("transport", ["mapped", "inline"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_fail_open(attach: Attach, transport: str, wrong: Callable[[Drafter], Any]) -> None:
    drafter = attach(transport)
    drafter.start(0, [3, 4, 5], "known")
    drafter.start(2, [3, 4, 5])
    answer = wrong(drafter)
    assert fail_opens(drafter) == {"refused": 1}
    if answer is not None:
        assert answer.tokens.shape[1] == 16
        assert not answer.counts.any()
    # The other rows, and a new request in the wrong one, go on.
    drafter.append(2, [6, 7])
    drafter.start(0, [3, 4, 5])
    drafter.start(1, [5, 6])
    drafter.propose([0, 1, 2])
    assert fail_opens(drafter) == {"refused": 1}
    assert drafter.wait_visible(20)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_calls_raise_when_strict(attach: Attach, wrong: Callable[[Drafter], Any]) -> None:
    drafter = attach("mapped", strict=True)
    drafter.start(0, [3, 4, 5], "known")
    with pytest.raises((DraftdError, FailOpen, ValueError)):
        wrong(drafter)


def test_strict_raises_without_a_service(attach: Attach, tmp_path: Path) -> None:
    drafter = attach("inline", endpoint=f"unix:{tmp_path}/nobody", wait=False, strict=True)
    drafter.start(0, [1])
    with pytest.raises(FailOpen):
        drafter.propose([0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"k": 0},
        {"k": 65},
        {"max_rows": 0},
        {"max_length": 0},
        {"vocab_size": 2**21},
        {"timeout_ms": 0},
        {"transport": "carrier pigeon"},
        {"engine": "no spaces"},
        {"namespace": ""},
        {"extra_namespaces": ["a b"]},
        {"k": 4, "params": DraftParams(k=5)},
    ],
)
def test_a_wrong_configuration_raises_at_once(arguments: dict[str, Any]) -> None:
    right: dict[str, Any] = {"engine": "e", "vocab_size": 10, "max_rows": 1, "max_length": 10}
    with pytest.raises(InvalidArgument):
        Drafter(**right | arguments)


def test_a_detached_drafter_only_fails_open(attach: Attach) -> None:
    drafter = attach("mapped")
    drafter.detach()
    drafter.detach()
    decode(drafter, 2)
    assert fail_opens(drafter) == {"unattached": 2}
    assert not drafter.wait_visible(1)


@pytest.mark.parametrize("rows", [[], np.array([], np.int64)])
def test_proposing_for_no_rows(attach: Attach, rows: Any) -> None:
    drafter = attach("inline")
    assert drafter.propose(rows).tokens.shape == (0, 16)
    assert fail_opens(drafter) == {}
