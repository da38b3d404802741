"""Waiting until what was ingested can be drafted from, without holding up the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from draftd.drafter.corpus import Corpus
from draftd.server.rpc.errors import Context, DeadlineExceeded


class Visibility:
    """Waits in threads of its own, so that waiting callers never take the threads of anybody else."""

    def __init__(self, corpus: Corpus, timeout_ms: int) -> None:
        self._corpus = corpus
        self._timeout_ms = timeout_ms
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="visible")

    async def wait(self, context: Context) -> None:
        """Returns when everything ingested until now is visible.

        Raises:
            DeadlineExceeded: It took longer than the configured time, or than the caller's deadline.
        """
        timeout_s = self._timeout_ms / 1000
        remaining = context.time_remaining()
        if remaining is not None:
            timeout_s = min(timeout_s, remaining)
        ticket = self._corpus.ticket()
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._threads, self._corpus.wait_visible, ticket, timeout_s):
            raise DeadlineExceeded(f"wait_visible: not visible within {timeout_s * 1000:.0f} ms; what was sent is kept", "wait_visible")

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
