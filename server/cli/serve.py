"""`draftd serve`: runs the service until SIGTERM."""

import sys
from typing import TYPE_CHECKING

from draftd.drafter.errors import DraftdError
from draftd.server.cli.failure import Failure
from draftd.server.cli.flags import with_config
from draftd.server.config import LoadedConfig
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
    from draftd.server.security.files import FileRefused
    from draftd.server.service import serve as run
    from draftd.server.store.directory import StoreError

    config = loaded.config
    configure_logging(config.log_level, config.log_format)
    try:
        run(config, _announce)
    except (DraftdError, EndpointError, FileRefused, PermissionError, StoreError) as error:
        raise Failure(str(error)) from None


def _announce(running: "Service") -> None:
    """Prints where the service answers and what it may take."""
    config = running.config
    endpoints = running.endpoints()
    lines = [
        f"draftd {version()} is ready (instance {running.corpus.instance})",
        *(f"  {'grpc' if kind.startswith('grpc') else kind:<7} {address}" for kind, address in endpoints.items()),
        f"  data    {config.shm_directory()} (shared memory)",
        f"  store   {config.data_dir or 'none: nothing is kept after a stop'}{running.restored()}",
        f"  limits  {config.max_attachments} attachments, {config.max_rows} rows of {config.max_length:,} tokens each, k <= {config.max_k},"
        f" lease {config.lease_ms} ms",
        f"  memory  {running.corpus.memory_use()}; at most {config.max_namespaces} namespaces",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
