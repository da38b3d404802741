"""A store that cannot be trusted: it is set aside, whole, and what can be read of it goes into a new one."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import structlog

from draftd.drafter.keeper import KeptNamespace
from draftd.server.store.codec import checksum
from draftd.server.store.database import (
    FILE,
    Damaged,
    Database,
    NamespaceRow,
    Row,
    is_sound,
    reason_of,
    text,
    write_documents,
    write_namespaces,
)

log = structlog.get_logger()

_RANGE = 2**62
_MOST_FAILURES = 20_000
"""Reads that may fail before the rest is given up: a whole store of unreadable pages must not hold the start up for hours."""


def open_or_salvage(directory: Path) -> tuple[Database, int]:
    """The store of a data directory, and how many documents are known to be lost.

    Raises:
        StoreError: The store is another program's, or a newer version's.
        sqlite3.OperationalError, OSError: It cannot be opened or made.
    """
    path = directory / FILE
    try:
        return Database(path), 0
    except Damaged as error:
        aside = _set_aside(path)
        log.error("store_is_damaged", reason=str(error), set_aside=str(aside))
    database = Database(path)
    lost = _copy(aside / FILE, database)
    return database, lost


def _set_aside(path: Path) -> Path:
    """Moves the store's files to a directory of their own beside it."""
    aside = path.with_name(f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    aside.mkdir(mode=0o700)
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.rename(aside / file.name)
    return aside


def _copy(damaged: Path, database: Database) -> int:
    """Copies the namespaces and documents that can be read and are what was written; answers how many others were seen."""
    copied = lost = 0
    try:
        # Read-only, so that what was set aside stays as it was found.
        with closing(sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as old:
            old.text_factory = text
            # Also if the file has fewer pages than its header says.
            old.execute("PRAGMA writable_schema = ON")
            kept = _namespaces(old)
            with database.transaction() as db:
                write_namespaces(db, kept)
            keys = {namespace.key for namespace in kept}
            batch: list[Row] = []
            for row in _documents(old):
                if row.namespace in keys and _is_whole(row):
                    batch.append(row)
                else:
                    lost += 1
                if len(batch) == 1000:
                    copied += _write(database, batch)
            copied += _write(database, batch)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        log.error("damaged_store_cannot_be_read_further", reason=reason_of(error))
    log.warning("store_was_salvaged", documents=copied, unreadable_documents=lost)
    return lost


def _write(database: Database, batch: list[Row]) -> int:
    with database.transaction() as db:
        write_documents(db, batch)
    count = len(batch)
    batch.clear()
    return count


def _namespaces(old: sqlite3.Connection) -> list[KeptNamespace]:
    """Those that are what was written. Older formats have no checksum of them, and the oldest no calibration."""
    for columns in (NamespaceRow._fields, NamespaceRow._fields[:7], NamespaceRow._fields[:6]):
        try:
            rows = old.execute(f"SELECT {', '.join(columns)} FROM namespaces").fetchall()
        except sqlite3.OperationalError as error:
            if "no such column" in str(error) and len(columns) > 6:
                continue
            raise
        if columns == NamespaceRow._fields:
            return [kept for row in rows if (kept := NamespaceRow(*row).kept()) is not None]
        return [kept for row in rows if is_sound(kept := KeptNamespace(*row))]
    return []


def _documents(old: sqlite3.Connection) -> Iterator[Row]:
    """Every row that can be read: a range of numbers that fails is halved until what fails is left out."""
    failures = 0
    ranges = [(0, _RANGE)]
    while ranges and failures < _MOST_FAILURES:
        low, high = ranges.pop()
        try:
            yield from (
                Row(*row)
                for row in old.execute(
                    f"SELECT {', '.join(Row._fields)} FROM documents WHERE committed_us >= ? AND committed_us < ?", (low, high)
                )
            )
        except sqlite3.DatabaseError:
            failures += 1
            if high - low > 1:
                middle = (low + high) // 2
                ranges += [(middle, high), (low, middle)]


def _is_whole(row: Row) -> bool:
    try:
        return row.checksum == checksum(row.namespace, row.committed_us, row.document_id, row.generation, row.tokens, row.data)
    except (TypeError, AttributeError):
        return False
