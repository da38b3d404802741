"""Sequence words on plain memory: who may open a page, how numbers wrap, and that a wait is ended when, and only when, it is too long."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from draftd.drafter.stream_words import DONE, PAGE_BYTES, READY, Watchdog, WordPage


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


@pytest.fixture
def page() -> WordPage:
    return WordPage.create()


def test_another_process_sees_and_writes_the_words(page: WordPage) -> None:
    page.write(READY, 7)
    script = (
        "import sys; from draftd.drafter.stream_words import *\n"
        "page = WordPage.open(sys.argv[1]); assert page.read(READY) == 7; page.write(DONE, 2**32 - 1)"
    )
    subprocess.run([sys.executable, "-c", script, page.path], check=True, timeout=60)
    assert page.read(DONE) == 2**32 - 1


def test_page_cannot_be_truncated(page: WordPage) -> None:
    fd = os.open(page.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert page.read(READY) == 0


def test_only_a_sealed_page_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(ValueError, match="no page"):
        WordPage.open(str(file))
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE_BYTES)
    with pytest.raises(ValueError, match="no page"):
        WordPage.open(f"/proc/{os.getpid()}/fd/{unsealed}")
    os.close(unsealed)
    with pytest.raises(FileNotFoundError):
        WordPage.open(str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("word", "sequence", "reached"),
    [(5, 5, True), (4, 5, False), (6, 5, True), (1, 2**32 - 1, True), (2**32 - 1, 1, False), (2**31 + 5, 5, False), (2**31 + 4, 5, True)],
)
def test_numbers_count_on_over_the_end(page: WordPage, word: int, sequence: int, reached: bool) -> None:
    page.write(READY, word)
    assert page.reached(READY, sequence) is reached


def test_watchdog_ends_a_wait_that_nobody_answers(page: WordPage) -> None:
    watchdog = Watchdog(page, 2000)
    page.write(READY, 9)
    _wait(lambda: page.reached(DONE, 9))
    _wait(lambda: watchdog.given_up == 1)
    watchdog.close()
    assert page.read(DONE) == 9


def test_watchdog_leaves_answered_waits_alone(page: WordPage) -> None:
    watchdog = Watchdog(page, 10_000_000)
    for sequence in range(1, 50):
        page.write(READY, sequence)
        page.write(DONE, sequence)
    # A stream that has come to 50 has had little time yet.
    page.write(READY, 50)
    time.sleep(0.02)
    assert (watchdog.given_up, page.read(DONE)) == (0, 49)
    watchdog.close()
    assert page.read(DONE) == 50


def test_watchdog_times_each_wait_anew(page: WordPage) -> None:
    watchdog = Watchdog(page, 2000)
    for sequence in (2**32 - 2, 2**32 - 1, 0, 1):
        page.write(DONE, sequence - 1)
        page.write(READY, sequence)
        _wait(lambda s=sequence: page.reached(DONE, s))  # type: ignore[misc]
    _wait(lambda: watchdog.given_up == 4)
    watchdog.close()


def test_watchdog_that_nobody_holds_keeps_the_page_that_its_thread_reads() -> None:
    watchdog = Watchdog(WordPage.create(), 2000)
    held = weakref.ref(watchdog)
    del watchdog
    gc.collect()
    left = held()
    assert left is not None
    left.close()
