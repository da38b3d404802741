"""`draftd serve`: runs the service until SIGTERM."""

import sys
from typing import TYPE_CHECKING

from draftd.drafter.layout import index_block_spec
from draftd.server.cli.failure import Failure
from draftd.server.cli.flags import with_config
from draftd.server.config import LoadedConfig, ServerConfig
from draftd.server.version import version

if TYPE_CHECKING:
    from draftd.server.service import Service


@with_config
def serve(loaded: LoadedConfig) -> None:
    """Run the service until SIGTERM or SIGINT.

    Settings come from flags, DRAFTD_* environment variables, a TOML file (--config) and defaults, in this order of precedence.
    """
    # The service is loaded here, since the other commands do without it and should start at once.
    from draftd.server.http import EndpointError
    from draftd.server.logging import configure_logging
    from draftd.server.service import serve as run

    config = loaded.config
    configure_logging(config.log_level, config.log_format)
    try:
        run(config, _announce)
    except (EndpointError, PermissionError) as error:
        raise Failure(str(error)) from None


def _announce(running: "Service") -> None:
    """Prints where the service answers and what it may take."""
    config = running.config
    endpoints = running.endpoints()
    lines = [
        f"draftd {version()} is ready (instance {running.corpus.instance})",
        *(f"  {'grpc' if kind.startswith('grpc') else kind:<7} {address}" for kind, address in endpoints.items()),
        f"  data    {config.shm_directory()} (shared memory; nothing is kept after a stop)",
        f"  limits  {config.max_attachments} attachments, {config.max_rows} rows of {config.max_length:,} tokens each, k <= {config.max_k},"
        f" lease {config.lease_ms} ms",
        f"  memory  up to {_namespace_bytes(config) / 2**20:.0f} MiB a namespace ({config.quota_tokens:,} tokens),"
        f" at most {config.max_namespaces} namespaces",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _namespace_bytes(config: ServerConfig) -> int:
    """Most bytes that the index block of one namespace takes; a page of it costs memory only once it is used."""
    return index_block_spec(
        "",
        quota_tokens=config.quota_tokens,
        recent_tokens=min(config.recent_tokens, config.quota_tokens),
        live_tokens=config.live_tokens,
        depth=config.depth,
        buckets=max(64, config.quota_tokens // 8),
    ).byte_size
