"""What each call of draftd.v1 needs: the rights, in which namespaces, and how many corpus tokens it carries.

A method that is not in the table is refused to every token.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from draftd.server.names import DEFAULT_NAMESPACE
from draftd.server.security.principal import CALLER, Principal, Right


@dataclass(frozen=True, slots=True)
class Access:
    """What one method needs.

    Attributes:
        rights: The rights, in every namespace of the request; empty: any token.
        namespaces: Namespaces that a request names, "default" where it means that by leaving the name out.
        tokens: Corpus tokens that a request carries.
        once: A stream is about what its first message names.
        audited: Each call is written to the audit log.
    """

    rights: tuple[Right, ...] = ()
    namespaces: Callable[[Any], Iterable[str]] = lambda _: ()
    tokens: Callable[[Any], int] = lambda _: 0
    once: bool = False
    audited: bool = False

    def admit(self, caller: Principal, request: Any) -> None:
        """Lets one request message of `caller` through.

        Raises:
            PermissionDenied: It is beyond the caller's scope.
            RateExceeded: It is beyond the caller's rate.
        """
        caller.check(self.rights, self.namespaces(request))
        caller.rates.charge(self.tokens(request))

    async def admitted(self, caller: Principal, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The messages of a stream, each let through when it comes, if the caller then still may."""
        first = True
        async for request in requests:
            caller = caller.renewed()
            if self.once and not first:
                caller.rates.charge(self.tokens(request))
            else:
                self.admit(caller, request)
            first = False
            yield request


def admit(access: Access, request: Any) -> Any:
    """A request, or a stream of them, let through for whoever makes the call that is being answered; see Access.admit."""
    caller = CALLER.get()
    if caller is None:
        return request
    if isinstance(request, Message):
        access.admit(caller, request)
        return request
    return access.admitted(caller, request)


def _named(request: Any) -> Iterable[str]:
    return (request.namespace or DEFAULT_NAMESPACE,)


def _of_attach(request: Any) -> Iterable[str]:
    return (request.namespace or DEFAULT_NAMESPACE, *request.extra_namespaces)


def _of_heartbeat(request: Any) -> Iterable[str]:
    return tuple(request.extra_namespaces)


def _of_propose(request: Any) -> Iterable[str]:
    # A row of an attachment that names no namespace uses the attachment's own, which was checked when it attached.
    default = "" if request.attachment_id else DEFAULT_NAMESPACE
    return {name for row in request.rows if (name := row.namespace or default)}


def _of_ingest(request: Any) -> Iterable[str]:
    name = request.namespace or ("" if request.attachment_id else DEFAULT_NAMESPACE)
    return (name,) if name else ()


def _carried(items: Iterable[Any]) -> int:
    return sum(len(item.packed_tokens) // 4 + len(item.tokens) for item in items)


def _of_stream(request: Any) -> Iterable[str]:
    return _of_propose(request.request)


ACCESS: dict[str, Access] = {
    "Attach": Access(("read", "write"), _of_attach),
    "Detach": Access(),
    "Heartbeat": Access(("read", "write"), _of_heartbeat),
    "Propose": Access(("read",), _of_propose, lambda request: _carried(request.rows)),
    "ProposeStream": Access(("read",), _of_stream, lambda request: _carried(request.request.rows)),
    "Ingest": Access(("write",), _of_ingest, lambda request: _carried(request.documents)),
    "Harvest": Access(("write",), tokens=lambda request: _carried(request.rows)),
    # It lists what the caller may read, which may be nothing.
    "ListNamespaces": Access(("read",)),
    "GetNamespace": Access(("read",), _named),
    "DropNamespace": Access(("admin",), _named, audited=True),
    "AdvanceGeneration": Access(("admin",), _named, audited=True),
    "Explain": Access(("read",), _named, lambda request: _carried([request])),
    "Export": Access(("read",), _named, audited=True),
    "Import": Access(
        ("write",), _named, lambda request: sum(len(d.packed_tokens) // 4 for d in request.documents), once=True, audited=True
    ),
}
"""By the method's name, which both services of draftd.v1 use once."""
