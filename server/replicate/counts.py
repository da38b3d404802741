"""What replication has done since the service started, and how far it is. Needs no NATS library."""

from collections import Counter
from dataclasses import dataclass, field

AT_STREAM = "stream"
AT_CORPUS = "corpus"
TOO_LARGE = "too large"
EVICTED = "evicted"


@dataclass(slots=True)
class ReplicationCounts:
    """Counts since the start.

    Attributes:
        duplicates: Documents that were there already, by who noticed: the stream, or this corpus.
        renamed: Documents taken under a longer id, since another document has theirs.
        refused: Messages that do not fit, by reason; see draftd.server.replicate.message.REASONS.
        too_large: Documents that NATS takes no message for.
        connections: Times that a connection was made.
        errors: Connections that could not be made or were lost, and writes of the mark that failed.
    """

    published_documents: int = 0
    published_bytes: int = 0
    consumed_documents: int = 0
    consumed_tokens: int = 0
    consumed_bytes: int = 0
    own_messages: int = 0
    duplicates: Counter[str] = field(default_factory=Counter)
    renamed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    connections: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class ReplicationState:
    """How far replication is.

    Attributes:
        failure: Why it is not connected; empty while it is.
        warning: What is wrong though it is connected; empty if nothing is.
        lag_messages: Messages in the stream that are not in the corpus, as far as is known.
        outbox_documents: Committed documents that are not in the stream.
        outbox_age_s: How long the oldest of them has been waiting, in seconds.
    """

    stream: str
    node: str
    connected: bool
    failure: str
    warning: str
    lag_messages: int
    outbox_documents: int
    outbox_age_s: float
    unsent_documents: dict[str, int]
    counts: ReplicationCounts
