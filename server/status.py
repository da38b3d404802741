"""The parts of what /v1/status answers, as JSON values: an attachment, a namespace, the store, replication."""

import time
from typing import Any

from draftd.drafter.records import NamespaceInfo
from draftd.server.attachments import MAPPED, Attachment
from draftd.server.replicate.counts import ReplicationState
from draftd.server.rpc.convert import replication_message, store_message
from draftd.server.store.store import Store


def attachment_json(attachment: Attachment, rows: int) -> dict[str, Any]:
    """An engine and what it has counted; never the id of its attachment, which lets its holder act as the engine.

    Args:
        rows: Rows in use.
    """
    stats = attachment.stats
    return {
        "engine": attachment.engine.name,
        "transport": attachment.transport,
        "namespaces": attachment.namespaces,
        "rows": rows,
        "max_rows": attachment.engine.max_rows,
        "lease_left_ms": round(1000 * (attachment.deadline - time.monotonic())),
        "proposals": int(stats.proposals[0]),
        "drafts": int(stats.acceptance_length.sum()),
        "drafted_tokens": int(stats.drafted.sum()),
        "accepted_tokens": int(stats.accepted.sum()),
        "committed_tokens": int(stats.committed_tokens[0]),
        # Other engines count theirs in their own process: the service cannot see a call that never reached it.
        "fail_opens": int(stats.fail_opens.sum()) if attachment.transport == MAPPED else None,
    }


def namespace_json(info: NamespaceInfo, attachments: int) -> dict[str, Any]:
    """A namespace, with the number of attachments that use it."""
    return {
        "name": info.name,
        "vocab_size": info.vocab_size,
        "tokens": info.tokens,
        "quota_tokens": info.quota_tokens,
        "documents": info.documents,
        "open_documents": info.open_documents,
        "evicted_tokens": info.evicted_tokens,
        "generation": info.generation,
        "version": info.version,
        "bytes": info.bytes,
        "attachments": attachments,
    }


def store_json(store: Store | None) -> dict[str, Any] | None:
    """The store; None where there is none."""
    if store is None:
        return None
    message = store_message(store)
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def replication_json(state: ReplicationState | None) -> dict[str, Any] | None:
    """Replication; None where there is none."""
    if state is None:
        return None
    message = replication_message(state)
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
