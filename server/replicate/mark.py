"""Up to when this node's committed documents are in the stream: a small file beside the store.

After a start the store's documents from then on are published again, which duplicates nothing; without it all are.
"""

import json
import os
from pathlib import Path

from draftd.server.replicate.settings import ReplicationSettings

_NAME = "replication.json"
_MARGIN_US = 1_000_000
"""Documents of different namespaces come to the outbox in nearly the order of their commits, not exactly."""


class Mark:
    """The mark of one stream and node in a data directory; that of another counts as none."""

    def __init__(self, directory: Path, settings: ReplicationSettings) -> None:
        self._path = directory / _NAME
        self._of = {"servers": sorted(settings.servers), "stream": settings.stream, "node": settings.node}
        self._last_us = 0

    def read(self) -> int | None:
        """Unix time in microseconds; None if there is no mark that can be used."""
        try:
            values = json.loads(self._path.read_text())
            published_us = values.pop("published_us")
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        return published_us if values == self._of and isinstance(published_us, int) else None

    def write(self, published_us: int) -> None:
        """Notes that all committed before is in the stream, less a margin.

        Raises:
            OSError: The disk refuses it.
        """
        if published_us - self._last_us < _MARGIN_US:
            return
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._of | {"published_us": published_us - _MARGIN_US}))
        os.replace(beside, self._path)
        self._last_us = published_us
