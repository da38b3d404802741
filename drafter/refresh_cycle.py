"""The thread that refreshes at an interval, or sooner when somebody waits for what it makes visible."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from threading import Condition, Event, Thread


class RefreshCycle(ABC):
    """Calls `refresh_all` again and again, and tells callers when a call that began after they asked has ended.

    Args:
        interval_s: Pause between refreshes.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._thread: Thread | None = None
        self._wake = Event()
        self._stop = False
        self._cycle = Condition()
        self._cycles_started = 0
        self._cycles_done = 0

    @abstractmethod
    def refresh_all(self) -> None:
        """Makes everything that has come until now visible. Must not raise."""

    def refresh(self) -> None:
        """One refresh; called by the thread, or by whoever has started none."""
        with self._cycle:
            self._cycles_started += 1
            cycle = self._cycles_started
        self.refresh_all()
        with self._cycle:
            self._cycles_done = cycle
            self._cycle.notify_all()

    def refresh_soon(self) -> None:
        """The next refresh begins without waiting for the interval to end."""
        self._wake.set()

    def ticket(self) -> int:
        """Names a refresh that has not begun yet: what was given before is visible once it has ended (see wait_visible)."""
        with self._cycle:
            return self._cycles_started + 1

    def wait_visible(self, ticket: int, timeout_s: float) -> bool:
        """Waits until the refresh that `ticket` names has ended; False if that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._cycle:
            while self._cycles_done < ticket:
                self._wake.set()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._cycle.wait(min(left, 0.05))
        return True

    def _start_refreshing(self) -> None:
        self._thread = Thread(target=self._run, name="draftd-refresh", daemon=True)
        self._thread.start()

    def _stop_refreshing(self) -> None:
        """Ends the thread after a last refresh."""
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            stopping = self._stop
            self.refresh()
