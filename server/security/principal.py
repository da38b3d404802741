"""A principal: whoever holds one token, what it may do and how fast; and the principal behind the call that is being answered."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from draftd.drafter.errors import DraftdError
from draftd.server.security.rates import Rates

Right = Literal["read", "write", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)
EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class Quotas:
    """How many attachments a principal may hold, and how many namespaces that its patterns fit may exist for it to make one; 0: any."""

    attachments: int = 0
    namespaces: int = 0


class PermissionDenied(DraftdError):
    """The caller is known, and may not do this."""

    code = "PERMISSION_DENIED"


class Unauthenticated(DraftdError):
    """The caller gave no valid token."""

    code = "UNAUTHENTICATED"


@dataclass(frozen=True, slots=True, eq=False)
class Principal:
    """Whoever holds one token.

    Attributes:
        name: Its name in the token file; it keeps its attachments when its token is replaced.
        rights: What it may do, in the namespaces that match one of `namespaces`.
        namespaces: Patterns as the shell's: `*` stands for any characters, also for `/`.
        rates: How fast it may do it.
        quotas: How much of the service's it may hold.
        token_hash: SHA-256 of its token; empty without one.
        registry: The principals in force, by the hash of their token; None for one that needs no token.
    """

    name: str
    rights: frozenset[Right]
    namespaces: tuple[str, ...]
    rates: Rates
    token_hash: bytes = field(default=b"", repr=False)
    registry: Mapping[bytes, "Principal"] | None = field(default=None, repr=False)
    quotas: Quotas = Quotas()
    _matches: Callable[[str], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pattern = "|".join(fnmatch.translate(glob) for glob in self.namespaces) or r"(?!)"
        object.__setattr__(self, "_matches", re.compile(pattern).match)

    def renewed(self) -> "Principal":
        """This principal as the token file has it now; Unauthenticated if its token is no longer there."""
        if self.registry is None:
            return self
        now = self.registry.get(self.token_hash)
        if now is None:
            raise Unauthenticated(f"the token of {self.name!r} is no longer valid")
        return now

    def may(self, right: Right, namespace: str) -> bool:
        """It has the right in that namespace."""
        return right in self.rights and self.covers(namespace)

    def covers(self, namespace: str) -> bool:
        """One of its patterns fits the namespace."""
        return self._matches(namespace) is not None

    def may_everywhere(self, right: Right) -> bool:
        """It has the right in every namespace there may ever be."""
        return right in self.rights and EVERYTHING in self.namespaces

    def check(self, rights: Iterable[Right], namespaces: Iterable[str]) -> None:
        """Raises PermissionDenied with the first right that it lacks, whether the namespace exists or not."""
        rights = tuple(rights)
        for right in rights:
            if right not in self.rights:
                raise PermissionDenied(f"the token of {self.name!r} lacks the right {right!r}")
        for namespace in namespaces:
            if not self.covers(namespace):
                wanted = " and ".join(repr(right) for right in rights) or "any right"
                raise PermissionDenied(f"the token of {self.name!r} lacks {wanted} in namespace {namespace[:128]!r}", "namespace")


CALLER: ContextVar[Principal | None] = ContextVar("caller", default=None)
"""The principal behind the call that is being answered; None for a caller who needs no token and may do everything."""
