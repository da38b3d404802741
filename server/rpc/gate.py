"""What a call has to wait for before its method sees it: the service to be ready, and the namespaces it names to be awake."""

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from draftd.drafter.errors import DraftdError
from draftd.server.store.sleep import Sleepers

_DO_NOT_WAKE = frozenset({"GetNamespace", "DropNamespace"})


class NotReady(DraftdError):
    """The service is starting."""

    code = "UNAVAILABLE"


class Gate:
    """Shut until `ready` is set.

    Attributes:
        ready: The corpus is restored.
        sleepers: Namespaces that are asleep; None without a store.
    """

    def __init__(self) -> None:
        self.ready = False
        self.sleepers: Sleepers | None = None

    @property
    def is_open(self) -> bool:
        """No call has to wait."""
        return self.ready and not self.sleepers

    async def enter(self, method: str, namespaces: Callable[[Any], Iterable[str]], request: Any) -> None:
        """Returns when the method may see the request; the messages of a stream are not looked at.

        Raises:
            NotReady: The service is starting.
            CannotWake: A namespace that the request names is asleep and cannot be restored.
        """
        if not self.ready:
            raise NotReady("the service is starting and restores its corpus; try again")
        if self.sleepers and method not in _DO_NOT_WAKE and isinstance(request, Message):
            await self.sleepers.wake(namespaces(request))
