"""Waiting until what was committed is on disk, without a thread for whoever waits."""

import asyncio

from draftd.drafter.errors import DraftdError, FailedPrecondition
from draftd.server.rpc.errors import Context, DeadlineExceeded
from draftd.server.store.store import Store


class NotDurable(DraftdError):
    """What was sent is kept in memory, but the disk refuses it for now."""

    code = "UNAVAILABLE"


class Durability:
    """Made and used in the service's event loop; `store` is None where the service keeps nothing."""

    def __init__(self, store: Store | None, timeout_ms: int) -> None:
        self._store = store
        self._timeout_ms = timeout_ms
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        if store is not None:
            loop = asyncio.get_running_loop()
            store.listener = lambda: loop.call_soon_threadsafe(self._settle)

    def check(self, wanted: bool) -> None:
        """Raises FailedPrecondition if a caller wants what this service cannot give."""
        if wanted and self._store is None:
            raise FailedPrecondition("wait_durable: the service has no store; it needs data_dir", "wait_durable")

    async def wait(self, context: Context) -> bool:
        """Returns when everything committed until now is on disk; False where there is no store.

        Raises:
            NotDurable: The disk refuses it; it stays in memory and is tried again.
            DeadlineExceeded: It took longer than the configured time, or than the caller's deadline.
        """
        if self._store is None:
            return False
        ticket = self._store.backlog.told
        if self._store.told_on_disk >= ticket:
            return True
        timeout_s = self._timeout_ms / 1000
        remaining = context.time_remaining()
        if remaining is not None:
            timeout_s = min(timeout_s, remaining)
        entry = (ticket, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._store.hurry()
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
        except TimeoutError:
            raise DeadlineExceeded(f"not on disk within {timeout_s * 1000:.0f} ms; what was sent is kept", "wait_durable") from None
        finally:
            self._waiting = [other for other in self._waiting if other is not entry]
        return True

    def _settle(self) -> None:
        store = self._store
        assert store is not None
        for ticket, future in self._waiting:
            if future.done():
                continue
            if store.told_on_disk >= ticket:
                future.set_result(None)
            elif store.failure and store.told_when_it_failed >= ticket:
                future.set_exception(NotDurable(f"not on disk ({store.failure}); what was sent is kept in memory", "wait_durable"))
