"""Why an engine that would map drafts over another transport: in a sentence for people, and in a word to count it by."""

from typing import Literal, NamedTuple

from draftd.drafter.errors import InvalidArgument

MAX_REASON_BYTES = 512

FallbackKind = Literal["host", "layout", "device", "client"]
"""Another host; another layout of the index; an index that other processes cannot map; the engine's client, which could not."""


class Fallback(NamedTuple):
    """One attachment's reason."""

    kind: FallbackKind
    text: str


def of_client(reason: str) -> Fallback | None:
    """What a client said when it asked for less than it would have; None if it said nothing.

    Raises:
        InvalidArgument: It said too much.
    """
    if len(reason.encode()) > MAX_REASON_BYTES:
        raise InvalidArgument(f"unmapped_reason has more than {MAX_REASON_BYTES} bytes", "unmapped_reason")
    return Fallback("client", reason) if reason else None
