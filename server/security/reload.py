"""Reads files again that have changed: at each tick of the service's housekeeping, and on SIGHUP whether they have or not."""

from collections.abc import Mapping
from typing import Protocol

import structlog

from draftd.server.metrics import Metrics
from draftd.server.security.files import FileRefused

log = structlog.get_logger()


class Reloadable(Protocol):
    """What was read from files."""

    @property
    def changed(self) -> bool: ...
    def reload(self) -> None: ...


def reload_files(files: Mapping[str, Reloadable], metrics: Metrics, *, force: bool) -> None:
    """Reads again what has changed, or everything if `force`. What cannot be used is logged and counted, and changes nothing."""
    for name, file in files.items():
        if not force and not file.changed:
            continue
        try:
            file.reload()
        except FileRefused as error:
            metrics.count("draftd_reloads_total", name, "failed")
            log.error("reload_failed", file=name, reason=str(error))
        else:
            metrics.count("draftd_reloads_total", name, "ok")
            log.info("reloaded", file=name)
