"""The SQLite file: its schema, its versions, and the statements that write and read it. One object, one lock, any thread.

Errors of SQLite come through as they are; who calls decides what they mean.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.params import MAX_VOCAB
from draftd.server.names import check_name
from draftd.server.store.codec import namespace_checksum
from draftd.server.store.directory import StoreError

FILE = "corpus.sqlite"
FORMAT = 3
_APPLICATION_ID = 0x64726674
_BUSY_S = 1.0
_READ_ROWS = 2000
_SLACK_PAGES = 256
_VACUUM_PAGES = 1024
_NO_TIME_US = 2**53
"""A time in the year 2255: whatever has a larger number is damaged."""
_SCHEMA = """
CREATE TABLE namespaces (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    vocab_size INTEGER NOT NULL,
    fingerprint TEXT NOT NULL,
    generation INTEGER NOT NULL,
    evict_before INTEGER NOT NULL,
    calibration BLOB NOT NULL DEFAULT x'',
    checksum INTEGER NOT NULL DEFAULT 0,
    calibration_checksum INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE documents (
    committed_us INTEGER PRIMARY KEY,
    namespace INTEGER NOT NULL,
    document_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    data BLOB NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;
CREATE INDEX documents_of_namespace ON documents (namespace);
CREATE TABLE damaged_documents AS SELECT * FROM documents WHERE 0;
CREATE TABLE damaged_namespaces AS SELECT * FROM namespaces WHERE 0;
"""


_STEPS = {
    1: "ALTER TABLE namespaces ADD COLUMN calibration BLOB NOT NULL DEFAULT x''",
    2: """
ALTER TABLE namespaces ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE namespaces ADD COLUMN calibration_checksum INTEGER NOT NULL DEFAULT 0;
UPDATE namespaces SET checksum = namespace_checksum(key, name, vocab_size, fingerprint, generation, evict_before),
    calibration_checksum = crc32(calibration);
CREATE TABLE damaged_namespaces AS SELECT * FROM namespaces WHERE 0
""",
}
"""What makes the next format of each one."""


class Damaged(Exception):
    """The file is not what SQLite or draftd wrote; the message says how that showed."""


def text(data: bytes) -> str:
    """Text of the store; what is not UTF-8 is damaged, and no checksum fits it."""
    return data.decode(errors="replace")


def reason_of(error: sqlite3.Error | UnicodeDecodeError) -> str:
    """What SQLite says is wrong; Python cannot decode it where it quotes a damaged schema."""
    return str(error) if isinstance(error, sqlite3.Error) else "malformed database schema"


class Row(NamedTuple):
    """One stored document; `data` and `checksum` are what draftd.server.store.codec makes of it."""

    committed_us: int
    namespace: int
    document_id: str
    generation: int
    tokens: int
    data: bytes
    checksum: int


class NamespaceRow(NamedTuple):
    """One stored namespace; the checksums are namespace_checksum and, of the calibration, CRC-32."""

    key: int
    name: str
    vocab_size: int
    fingerprint: str
    generation: int
    evict_before: int
    calibration: bytes
    checksum: int
    calibration_checksum: int

    @staticmethod
    def of(kept: KeptNamespace) -> "NamespaceRow":
        """The row of a namespace."""
        said = (kept.key, kept.name, kept.vocab_size, kept.fingerprint, kept.generation, kept.evict_before)
        return NamespaceRow(*said, kept.calibration, namespace_checksum(*said), zlib.crc32(kept.calibration))

    def kept(self) -> KeptNamespace | None:
        """What was written; None if it is not that any more. Of a damaged calibration nothing is left, and the rest is used."""
        if self.checksum != namespace_checksum(*self[:6]):
            return None
        whole = isinstance(self.calibration, bytes) and zlib.crc32(self.calibration) == self.calibration_checksum
        kept = KeptNamespace(*self[:6], self.calibration if whole else b"")
        return kept if is_sound(kept) else None


class Database:
    """An open store.

    Args:
        path: The file; it is made if it is not there.

    Raises:
        Damaged: It cannot be trusted.
        StoreError: It is another program's, or a newer version's.
        sqlite3.OperationalError, OSError: It cannot be opened or made.
    """

    def __init__(self, path: Path) -> None:
        # What SQLite makes beside it gets the same mode.
        path.touch(mode=0o600)
        self.path = path
        self._lock = Lock()
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self._db.text_factory = text
        try:
            self._prepare()
        except sqlite3.OperationalError:
            self._db.close()
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self._db.close()
            raise Damaged(reason_of(error)) from None
        except (Damaged, StoreError):
            self._db.close()
            raise

    def _prepare(self) -> None:
        # Nobody else opens the file, so that no reader can hold the log up, and no shared memory is needed beside it.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        application, version, objects = (
            int(self._db.execute(query).fetchone()[0])
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        if objects and application != _APPLICATION_ID:
            raise StoreError(f"{self.path} is not a store of draftd; choose another --data-dir")
        if version > FORMAT:
            raise StoreError(
                f"{self.path} has format {version}, and this version of draftd knows up to {FORMAT}: use a newer one, or another --data-dir"
            )
        if objects and version < 1:
            raise Damaged(f"its format is {version}")
        if not objects:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.execute("PRAGMA journal_mode = WAL")
        # What a commit has answered for is on the disk, not only in the kernel.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
        if not objects:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;")
            return
        wrong = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if wrong != "ok":
            raise Damaged(str(wrong))
        self._db.create_function("namespace_checksum", 6, namespace_checksum, deterministic=True)
        self._db.create_function("crc32", 1, zlib.crc32, deterministic=True)
        for step in range(version, FORMAT):
            self._db.executescript(f"BEGIN; {_STEPS[step]}; PRAGMA user_version = {step + 1}; COMMIT;")

    def close(self) -> None:
        """Closes the file; what is in the log goes into it first."""
        with self._lock:
            self._db.close()

    def size_bytes(self) -> int:
        """Bytes on disk, the log included."""
        return sum(file.stat().st_size for file in self.files() if file.exists())

    def files(self) -> list[Path]:
        """The file and what SQLite keeps beside it."""
        return [self.path.with_name(self.path.name + suffix) for suffix in ("", "-wal", "-shm")]

    # -- writing -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is done inside is on disk when it ends; or nothing, if anything fails."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def give_space_back(self) -> bool:
        """Returns some pages to the file system where a quarter of the file is unused; True if that is still so."""
        with self._lock:
            free, pages = (int(self._db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("freelist_count", "page_count"))
            if free <= max(_SLACK_PAGES, pages // 4):
                return False
            self._db.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
            return True

    # -- reading -------------------------------------------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceRow]:
        """All namespaces, the one made last first."""
        with self._lock:
            rows = self._db.execute(f"SELECT {', '.join(NamespaceRow._fields)} FROM namespaces ORDER BY key DESC").fetchall()
        return [NamespaceRow(*row) for row in rows]

    def counts(self) -> dict[int, int]:
        """Documents of each namespace, also of those that are gone."""
        with self._lock:
            return dict(self._db.execute("SELECT namespace, count(*) FROM documents GROUP BY namespace").fetchall())

    def last_us(self) -> int:
        """The largest number that a document or namespace has, but for numbers that no clock gave."""
        with self._lock:
            return max(
                int(self._db.execute(f"SELECT coalesce(max({column}), 0) FROM {table} WHERE {column} < {_NO_TIME_US}").fetchone()[0])
                for column, table in (("committed_us", "documents"), ("key", "namespaces"))
            )

    def newest_first(self, namespace: int) -> Iterator[Row]:
        """The documents of a namespace. Others may write between any two of them."""
        before = 2**63 - 1
        while True:
            with self._lock:
                rows = self._db.execute(
                    "SELECT * FROM documents WHERE namespace = ? AND committed_us < ? ORDER BY committed_us DESC LIMIT ?",
                    (namespace, before, _READ_ROWS),
                ).fetchall()
            yield from (Row(*row) for row in rows)
            if len(rows) < _READ_ROWS:
                return
            before = rows[-1][0]


def is_sound(kept: KeptNamespace) -> bool:
    """What was read of a namespace can be what was written."""
    numbers = (kept.key, kept.vocab_size, kept.generation, kept.evict_before)
    texts = (kept.name, kept.fingerprint)
    if not isinstance(kept.calibration, bytes):
        return False
    try:
        check_name(kept.name, "namespace")
    except (InvalidArgument, TypeError):
        return False
    return all(isinstance(n, int) for n in numbers) and all(isinstance(t, str) for t in texts) and 1 <= kept.vocab_size <= MAX_VOCAB


def write_namespaces(db: sqlite3.Connection, namespaces: Iterable[KeptNamespace]) -> None:
    """Adds or replaces namespaces."""
    columns, places = ", ".join(NamespaceRow._fields), ", ".join("?" * len(NamespaceRow._fields))
    db.executemany(f"INSERT OR REPLACE INTO namespaces ({columns}) VALUES ({places})", map(NamespaceRow.of, namespaces))


def drop_namespaces(db: sqlite3.Connection, keys: Iterable[int]) -> None:
    """Removes namespaces; delete_of_namespace removes their documents."""
    db.executemany("DELETE FROM namespaces WHERE key = ?", ((key,) for key in keys))


def write_documents(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Adds or replaces documents."""
    db.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def delete_documents(db: sqlite3.Connection, committed_us: Iterable[int]) -> None:
    """Removes documents."""
    db.executemany("DELETE FROM documents WHERE committed_us = ?", ((number,) for number in committed_us))


def delete_of_namespace(db: sqlite3.Connection, key: int, most: int) -> int:
    """Removes up to `most` documents of a namespace, and answers how many."""
    return db.execute(
        "DELETE FROM documents WHERE committed_us IN (SELECT committed_us FROM documents WHERE namespace = ? LIMIT ?)", (key, most)
    ).rowcount


def delete_up_to(db: sqlite3.Connection, key: int, committed_us: int, evict_before: int) -> None:
    """Removes documents of a namespace that came up to then, or are of a generation below `evict_before`."""
    db.execute("DELETE FROM documents WHERE namespace = ? AND (committed_us <= ? OR generation < ?)", (key, committed_us, evict_before))


def set_documents_aside(db: sqlite3.Connection, committed_us: Sequence[int]) -> None:
    """Moves documents that cannot be read to the table damaged_documents."""
    for number in committed_us:
        db.execute("INSERT INTO damaged_documents SELECT * FROM documents WHERE committed_us = ?", (number,))
    delete_documents(db, committed_us)


def set_namespaces_aside(db: sqlite3.Connection, keys: Iterable[int]) -> None:
    """Moves namespaces that cannot be read, and their documents, to the tables damaged_namespaces and damaged_documents."""
    for key in keys:
        db.execute("INSERT INTO damaged_namespaces SELECT * FROM namespaces WHERE key = ?", (key,))
        db.execute("INSERT INTO damaged_documents SELECT * FROM documents WHERE namespace = ?", (key,))
        db.execute("DELETE FROM namespaces WHERE key = ?", (key,))
        db.execute("DELETE FROM documents WHERE namespace = ?", (key,))
