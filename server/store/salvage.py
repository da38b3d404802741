"""A store that cannot be trusted: it is set aside, whole, and what can be read of it goes into a new one."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

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

_PAGE = 4096
"""SQLite's own default, which every store has."""
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
    # Read-only, so that what was set aside stays as it was found.
    lost, reason = _copy_from(damaged, "ro", database)
    if reason:
        log.error("damaged_store_cannot_be_read_further", reason=reason)
        if not database.namespaces():
            # All may be there but for the first page, which says where.
            try:
                with _with_another_first_page(damaged) as file:
                    lost, reason = _copy_from(file, "rw", database)
            except OSError as error:
                reason = error.strerror or str(error)
            if reason:
                log.error("damaged_store_cannot_be_read_further", first_page="replaced", reason=reason)
    log.warning("store_was_salvaged", documents=sum(database.counts().values()), unreadable_documents=len(lost))
    return len(lost)


def _copy_from(file: Path, mode: str, database: Database) -> tuple[set[int], str]:
    """Numbers of documents that are not what was written, and why it could not be read to its end; empty if it could."""
    lost: set[int] = set()
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)) as old:
            old.text_factory = text
            # Also if the file has fewer pages than its header says.
            old.execute("PRAGMA writable_schema = ON")
            kept = _namespaces(old)
            with database.transaction() as db:
                write_namespaces(db, kept)
            keys = {namespace.key for namespace in kept}
            batch: list[Row] = []
            for row, whole in _documents(old):
                if whole and row.namespace in keys:
                    batch.append(row)
                else:
                    lost.add(row.committed_us)
                if len(batch) == 1000:
                    _write(database, batch)
            _write(database, batch)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return lost, reason_of(error)
    return lost, ""


@contextmanager
def _with_another_first_page(damaged: Path) -> Iterator[Path]:
    """A copy of a store, with the header and the schema of a new one: tables begin at the same pages in every store of this format."""
    with TemporaryDirectory(prefix="mending-", dir=damaged.parent) as directory:
        place = Path(directory)
        Database(place / "new").close()
        first = bytearray((place / "new").read_bytes()[:_PAGE])
        for suffix in ("", "-wal"):
            part = damaged.with_name(damaged.name + suffix)
            if part.exists():
                shutil.copyfile(part, place / part.name)
        with (place / damaged.name).open("r+b") as file:
            first[28:32] = (file.seek(0, os.SEEK_END) // _PAGE).to_bytes(4, "big")
            file.seek(0)
            file.write(first)
        yield place / damaged.name


def _write(database: Database, batch: list[Row]) -> None:
    with database.transaction() as db:
        write_documents(db, batch)
    batch.clear()


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


def _documents(old: sqlite3.Connection) -> Iterator[tuple[Row, bool]]:
    """Every row that can be read, and whether it is whole: a range of numbers that fails is halved until what fails is left out."""
    failures = 0
    ranges = [(0, _RANGE)]
    query = f"SELECT {', '.join(Row._fields)} FROM documents WHERE committed_us >= ? AND committed_us < ? ORDER BY committed_us"
    while ranges and failures < _MOST_FAILURES:
        low, high = ranges.pop()
        try:
            for row in map(Row._make, old.execute(query, (low, high))):
                whole = _is_whole(row)
                if whole:
                    # Its number is right, so what fails comes later.
                    low = row.committed_us + 1
                yield row, whole
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
