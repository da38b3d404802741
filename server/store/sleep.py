"""Namespaces that nobody uses: their memory is given back, and the next call that names one restores it from the store.

The service's event loop is the only caller.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import DraftdError
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.records import NamespaceInfo
from draftd.server.store.restore import restore_one
from draftd.server.store.store import Store

log = structlog.get_logger()


class CannotWake(DraftdError):
    """A namespace that is asleep cannot be restored now."""

    code = "UNAVAILABLE"


class Sleepers:
    """The namespaces of a service that are asleep.

    Args:
        idle_s: Seconds without use after which a namespace is put to sleep; 0: never.
        users: Attachments that use a namespace; it is not idle while there are any.
    """

    def __init__(self, corpus: Corpus, store: Store, idle_s: float, users: Callable[[str], int]) -> None:
        self._corpus = corpus
        self._store = store
        self._idle_s = idle_s
        self._users = users
        self._asleep: dict[str, tuple[KeptNamespace, NamespaceInfo]] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._attached_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._asleep)

    def add(self, kept: KeptNamespace, documents: int) -> None:
        """Notes a namespace of the store for which there was no room."""
        quota = self._corpus.config.quota_of(kept.name)
        info = NamespaceInfo(
            kept.name, kept.vocab_size, kept.fingerprint, 0, quota, documents, 0, 0, kept.generation, 0, main=0, recent=0, live=0, bytes=0
        )
        self._asleep[kept.name] = (kept, info)

    def names(self) -> list[str]:
        """Names of all that are asleep."""
        return list(self._asleep)

    def infos(self) -> list[NamespaceInfo]:
        """State of every namespace that is asleep, as it was when it fell asleep."""
        return [info for _, info in self._asleep.values()]

    def info(self, name: str) -> NamespaceInfo | None:
        """State of one; None if it is not asleep."""
        entry = self._asleep.get(name)
        return entry[1] if entry else None

    def put_idle_to_sleep(self) -> None:
        """Puts namespaces to sleep that were not used for long enough; not while the store lacks something."""
        if not self._idle_s:
            return
        now = time.monotonic()
        for info in self._corpus.namespaces():
            name = info.name
            if self._users(name):
                self._attached_at[name] = now
                continue
            idle = min(self._corpus.idle_for_s(name), now - self._attached_at.get(name, -self._idle_s))
            if idle >= self._idle_s and self._store.settled:
                kept, last = self._corpus.put_to_sleep(name)
                self._asleep[name] = (kept, replace(last, main=0, recent=0, live=0, bytes=0))
                self._attached_at.pop(name, None)
                log.info("namespace_sleeps", namespace=name, documents=last.documents, bytes=last.bytes)

    async def wake(self, names: Iterable[str]) -> None:
        """Returns when none of the namespaces is asleep.

        Raises:
            CannotWake: One cannot be restored.
        """
        for name in names:
            if name in self._asleep:
                if name not in self._waking:
                    self._waking[name] = asyncio.create_task(self._wake(name))
                # A caller that goes away does not stop it for the others.
                await asyncio.shield(self._waking[name])

    async def _wake(self, name: str) -> None:
        kept, _ = self._asleep[name]
        started = time.perf_counter()
        try:
            info = await asyncio.get_running_loop().run_in_executor(None, restore_one, self._store, self._corpus, kept)
        except (DraftdError, sqlite3.Error, OSError) as error:
            log.error("namespace_cannot_wake", namespace=name, reason=str(error))
            raise CannotWake(f"namespace {name!r} is asleep and cannot be restored now", "namespace") from None
        finally:
            del self._waking[name]
        del self._asleep[name]
        log.info("namespace_woke", namespace=name, documents=info.documents, seconds=round(time.perf_counter() - started, 3))

    def drop(self, name: str) -> NamespaceInfo | None:
        """Forgets a namespace that is asleep, and answers what it was; None if it is not asleep."""
        if name in self._waking or name not in self._asleep:
            return None
        kept, info = self._asleep.pop(name)
        self._store.backlog.namespace_dropped(kept.key)
        return info
