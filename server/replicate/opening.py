"""Replication as the configuration asks for it, where the NATS library is installed."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import FailedPrecondition
from draftd.server.config import ServerConfig
from draftd.server.replicate.outbox import Outbox
from draftd.server.replicate.settings import ReplicationSettings, node_name, servers_of
from draftd.server.store.sleep import Sleepers
from draftd.server.store.store import Store

if TYPE_CHECKING:
    from draftd.server.replicate.replicator import Replicator


def replication_settings(config: ServerConfig) -> ReplicationSettings | None:
    """What to replicate; None if nothing is."""
    servers = servers_of(config.replicate)
    if not servers:
        return None
    return ReplicationSettings(
        servers=tuple(servers),
        stream=config.replicate_stream,
        node=node_name(config.node_name),
        namespaces=tuple(filter(None, (part.strip() for part in config.replicate_namespaces.split(",")))),
        max_bytes=config.replicate_max_bytes,
        max_age_s=config.replicate_max_age_s,
        max_tokens=config.max_length,
        credentials=config.replicate_credentials,
        tls_ca=config.replicate_tls_ca,
        tls_cert=config.replicate_tls_cert,
        tls_key=config.replicate_tls_key,
    )


def open_replicator(
    settings: ReplicationSettings, corpus: Corpus, outbox: Outbox, store: Store | None, sleepers: Sleepers | None
) -> "Replicator":
    """What replicates.

    Raises:
        FailedPrecondition: The NATS library, or the one that signs with an NKey, is not installed.
        FileRefused: The credentials or certificates cannot be used.
    """
    try:
        from draftd.server.replicate.replicator import Replicator
    except ModuleNotFoundError as error:
        raise FailedPrecondition(f"replicate: {error.name} is not installed: pip install 'draftd[nats]'", "replicate") from None
    # Read again at each connection; what is wrong from the start is said at the start.
    secrets = settings.secrets()
    if {"nkey", "creds"} & set(secrets) and find_spec("nkeys") is None:
        raise FailedPrecondition("replicate_credentials: nkeys is not installed: pip install 'draftd[nats]'", "replicate_credentials")
    settings.tls()
    return Replicator(settings, corpus, outbox, store, sleepers)
