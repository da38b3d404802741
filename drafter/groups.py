"""Groups: requests that sample one prompt, and what they have generated, for the others of the group to draft from.

Kept where drafting happens, by one thread; nothing of it is shared, stored or indexed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.policy import GROUP_TOKENS

MAX_GROUP_BYTES = 128
"""Longest label, in bytes of UTF-8."""
MOST_IDLE = 256
"""Groups of which no request is in flight that are remembered; beyond that the one idle for longest is forgotten."""
MOST_ENDED = 256
"""Requests of a group that have ended and are remembered, the last of them."""
_ROOM = 256


class GroupTexts(NamedTuple):
    """What the groups of n rows have generated, as kernels take it; valid until a request of a group starts, grows or ends.

    Attributes:
        members: int64 [m, 2]; address and tokens of the output of each request of these groups, the newest of a group last.
        places: int64 [n, 3]; of each row: its group's first entry in `members`, the one after its last, and its own; 0, 0, -1 without one.
    """

    members: NDArray[np.int64]
    places: NDArray[np.int64]

    def of(self, rows: NDArray[np.int64]) -> GroupTexts:
        """Those of some of the rows."""
        return GroupTexts(self.members, self.places[rows])


NO_GROUPS = GroupTexts(np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int64))
"""For rows of which none has a group."""


def check_group(label: str, field: str = "group") -> None:
    """Raises InvalidArgument if a label is too long; an empty one is none."""
    size = len(label.encode())
    if size > MAX_GROUP_BYTES:
        raise InvalidArgument(f"{field} has {size} bytes; it must have 1 to {MAX_GROUP_BYTES}, or be empty for none", field)


class _Member:
    """A request's output, of which the last GROUP_TOKENS tokens are kept."""

    __slots__ = ("_tokens", "address", "group", "in_flight", "length", "place", "start")

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.in_flight = True
        self.place = 0
        self.clear()

    def clear(self) -> None:
        self.start = self.length = 0
        self._hold(np.empty(_ROOM, np.int32))

    def extend(self, tokens: NDArray[np.int32]) -> None:
        tokens = tokens[-GROUP_TOKENS:]
        end = self.start + self.length
        if end + len(tokens) > len(self._tokens):
            kept = self._tokens[self.start : end][max(0, self.length + len(tokens) - GROUP_TOKENS) :]
            self._hold(np.empty(min(2 * (len(kept) + len(tokens)), 2 * GROUP_TOKENS) + _ROOM, np.int32))
            self._tokens[: len(kept)] = kept
            self.start, self.length = 0, len(kept)
            end = len(kept)
        self._tokens[end : end + len(tokens)] = tokens
        self.length += len(tokens)
        self.keep(GROUP_TOKENS)

    def keep(self, most: int) -> None:
        """Forgets all but the last `most` tokens."""
        surplus = max(0, self.length - most)
        self.start += surplus
        self.length -= surplus

    def end(self) -> None:
        """No more is generated: takes no more memory than is needed."""
        self.in_flight = False
        self._hold(self._tokens[self.start : self.start + self.length].copy())
        self.start = 0

    def entry(self) -> tuple[int, int]:
        return self.address + 4 * self.start, self.length

    def _hold(self, tokens: NDArray[np.int32]) -> None:
        self._tokens = tokens
        self.address = int(tokens.__array_interface__["data"][0])


class _Group:
    """The members of a group, in the order in which they started."""

    __slots__ = ("in_flight", "key", "members")

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.members: list[_Member] = []
        self.in_flight = 0

    def forget_surplus(self) -> None:
        """Forgets what no request can reach: of requests that have ended, all but the last GROUP_TOKENS tokens; and very many of them."""
        left, ended = GROUP_TOKENS, 0
        for member in reversed(self.members):
            if not member.in_flight:
                ended += 1
                member.keep(left if ended <= MOST_ENDED else 0)
                left -= member.length
        self.members = [member for member in self.members if member.in_flight or member.length]


class Groups:
    """The groups of one engine's requests. Not thread-safe.

    Requests of one namespace and label are a group. A request is named by any hashable `key` while it is in flight. Appending takes time
    for the new tokens only. Memory is bounded: 2 x GROUP_TOKENS tokens a request in flight, and as many of all requests that have ended
    of each group that has any in flight, and of MOST_IDLE others.
    """

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._idle: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        """How many groups are remembered."""
        return len(self._groups)

    def start(self, key: Hashable, namespace: str, label: str, output: NDArray[np.int32]) -> None:
        """A request joins a group with what it has generated so far, int32 [n]; one that has joined before is told anew."""
        member = self._members.get(key)
        if member is None:
            group = self._groups.setdefault((namespace, label), _Group((namespace, label)))
            member = self._members[key] = _Member(group)
            group.members.append(member)
            group.in_flight += 1
            self._idle.pop(group.key, None)
        else:
            member.clear()
        member.extend(output)

    def append(self, key: Hashable, tokens: NDArray[np.int32]) -> None:
        """A request has generated more, int32 [n]; nothing happens if it is in no group."""
        member = self._members.get(key)
        if member is not None:
            member.extend(tokens)

    def finish(self, key: Hashable, discard: bool) -> None:
        """A request ends; the others draft from its output on, unless it is discarded. Nothing happens if it is in no group."""
        member = self._members.pop(key, None)
        if member is None:
            return
        group = member.group
        if discard:
            member.keep(0)
        member.end()
        group.forget_surplus()
        group.in_flight -= 1
        if group.in_flight:
            return
        self._idle[group.key] = None
        if not group.members or len(self._idle) > MOST_IDLE:
            oldest = next(iter(self._idle)) if group.members else group.key
            del self._idle[oldest], self._groups[oldest]

    def texts(self, keys: Sequence[Hashable]) -> GroupTexts:
        """What the groups of some requests have generated, for drafting for them in this order; requests in no group have none."""
        members = self._members
        if not members or members.keys().isdisjoint(keys):
            return NO_GROUPS
        entries: list[tuple[int, int]] = []
        spans: dict[_Group, tuple[int, int]] = {}
        places = np.zeros((len(keys), 3), np.int64)
        places[:, 2] = -1
        for i, key in enumerate(keys):
            member = members.get(key)
            if member is None:
                continue
            group = member.group
            if group not in spans:
                first = len(entries)
                for at, other in enumerate(group.members, first):
                    other.place = at
                entries += [other.entry() for other in group.members]
                spans[group] = (first, len(entries))
            places[i] = (*spans[group], member.place)
        return GroupTexts(np.array(entries, np.int64).reshape(-1, 2), places)
