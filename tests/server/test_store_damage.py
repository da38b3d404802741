"""Stores that are torn, corrupt, somebody else's or in use: what can be read is used, the rest is set aside, and errors say what to do."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from draftd.drafter.keeper import KeptNamespace
from draftd.server.store.codec import Codec, checksum
from draftd.server.store.database import FILE, FORMAT, Damaged, Database, Row, write_documents, write_namespaces
from draftd.server.store.directory import DataDir, StoreError
from draftd.server.store.opening import open_store
from draftd.server.store.salvage import open_or_salvage
from tests.server.harness import draftd, short_directory
from tests.server.test_store import Kept, kept

KEY = 10**15
DOCUMENTS = 400


def _row(number: int, namespace: int = KEY) -> Row:
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 1000, int(rng.integers(1, 400))).astype(np.int32)
    data = Codec().pack(tokens)
    us = KEY + 1 + number
    sum_ = checksum(namespace, us, f"document-{number}", 0, len(tokens), data)
    return Row(us, namespace, f"document-{number}", 0, len(tokens), data, sum_)


ROWS = [_row(i) for i in range(DOCUMENTS)]


@pytest.fixture(scope="module")
def written() -> Iterator[Path]:
    """A store of 400 documents that was closed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        database = Database(Path(directory) / FILE)
        with database.transaction() as db:
            write_namespaces(db, [KeptNamespace(KEY, "n", 1000, "", 0, 0)])
            write_documents(db, ROWS)
        database.close()
        yield Path(directory)


@pytest.fixture
def data(written: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        shutil.copy(written / FILE, directory)
        yield Path(directory)


def _read(data: Path) -> tuple[list[Row], int]:
    """What can be read of a store, oldest first, and how many documents are known to be lost."""
    database, lost = open_or_salvage(data)
    rows = list(database.newest_first(KEY))[::-1]
    database.close()
    return rows, lost


def _aside(data: Path) -> list[Path]:
    return sorted(data.glob("damaged-*"))


def _overwrite(data: Path, offset: int, content: bytes) -> None:
    with (data / FILE).open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_whole_store_is_read_as_it_is(data: Path) -> None:
    assert _read(data) == (ROWS, 0)
    assert not _aside(data)


def test_overwritten_page_costs_what_was_on_it(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = (data / FILE).stat().st_size
    before = (data / FILE).read_bytes()
    _overwrite(data, size // 2 // 4096 * 4096, os.urandom(4096))
    damaged = (data / FILE).read_bytes()
    rows, _ = _read(data)
    assert set(rows) < set(ROWS)
    assert len(rows) > DOCUMENTS * 0.8
    (aside,) = _aside(data)
    assert (aside / FILE).read_bytes() == damaged != before
    said = "".join(capfd.readouterr())
    assert "store_is_damaged" in said
    assert str(aside) in said
    assert re.search(rf"store_was_salvaged +documents={len(rows)} ", said), "what was read several times was counted several times"
    # The new store is whole.
    assert _read(data) == (rows, 0)
    assert len(_aside(data)) == 1


def test_file_cut_off_in_the_middle(data: Path) -> None:
    os.truncate(data / FILE, (data / FILE).stat().st_size * 2 // 3 // 4096 * 4096)
    rows, _ = _read(data)
    assert set(rows) < set(ROWS)
    assert len(rows) > DOCUMENTS * 0.4
    assert len(_aside(data)) == 1


@pytest.mark.parametrize("content", [b"garbage", b"x" * 100_000, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_file_that_is_no_database(data: Path, content: bytes) -> None:
    (data / FILE).write_bytes(content)
    assert _read(data) == ([], 0)
    (aside,) = _aside(data)
    assert (aside / FILE).read_bytes() == content


def test_empty_file_is_a_new_store(data: Path) -> None:
    (data / FILE).write_bytes(b"")
    assert _read(data) == ([], 0)
    assert not _aside(data)


def test_damaged_index_costs_nothing(data: Path) -> None:
    with closing(sqlite3.connect(data / FILE)) as db:
        page = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'documents_of_namespace'").fetchone()[0]
    _overwrite(data, (page - 1) * 4096, os.urandom(4096))
    assert _read(data) == (ROWS, 0)
    assert len(_aside(data)) == 1


def test_index_that_lacks_a_document_costs_nothing(data: Path) -> None:
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute(
            "UPDATE sqlite_schema SET sql = 'CREATE INDEX documents_of_namespace ON documents (namespace) WHERE 0' WHERE type = 'index'"
        )
        db.execute("PRAGMA writable_schema = RESET")
        extra = _row(DOCUMENTS)
        write_documents(db, [extra])
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = 'CREATE INDEX documents_of_namespace ON documents (namespace)' WHERE type = 'index'")
    assert _read(data) == ([*ROWS, extra], 0)
    assert len(_aside(data)) == 1


def test_changed_byte_in_a_document_is_found_by_its_checksum(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    victim = ROWS[7]
    content = (data / FILE).read_bytes()
    at = content.index(victim.data) + len(victim.data) // 2
    _overwrite(data, at, bytes([content[at] ^ 1]))
    with kept(data, quota_tokens=2**18) as made:
        assert [d.document_id for d in made.documents()] == [row.document_id for row in ROWS if row != victim]
        assert made.store.counts.damaged_documents == 1
    assert "documents_are_damaged" in "".join(capfd.readouterr())
    with closing(sqlite3.connect(data / FILE)) as db:
        assert db.execute("SELECT document_id FROM damaged_documents").fetchall() == [(victim.document_id,)]
    with kept(data, quota_tokens=2**18) as again:
        assert again.store.counts.damaged_documents == 0


@pytest.mark.parametrize(
    "changed",
    [
        ROWS[3]._replace(tokens=ROWS[3].tokens + 1),
        ROWS[3]._replace(tokens=2**40),
        ROWS[3]._replace(document_id="other"),
        ROWS[3]._replace(document_id="x" * 200),
        ROWS[3]._replace(data=b""),
        ROWS[3]._replace(data=ROWS[4].data),
        ROWS[3]._replace(data=Codec().pack(np.array([1000] * ROWS[3].tokens, np.int32))),
        ROWS[3]._replace(data=Codec().pack(np.array([-1] * ROWS[3].tokens, np.int32))),
    ],
)
@pytest.mark.parametrize("signed", [False, True])
def test_row_that_is_wrong_never_reaches_the_index(data: Path, changed: Row, signed: bool) -> None:
    if signed:
        us, namespace, document_id, generation, tokens, packed, _ = changed
        changed = changed._replace(checksum=checksum(namespace, us, document_id, generation, tokens, packed))
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        write_documents(db, [changed])
    with kept(data, quota_tokens=2**18) as made:
        ids = [d.document_id for d in made.documents()]
        right = signed and changed.document_id == "other"
        assert ids == [("other" if row == ROWS[3] else row.document_id) for row in ROWS if row != ROWS[3] or right or _same(changed)]
        assert made.corpus.settle()


def _same(changed: Row) -> bool:
    return changed == ROWS[3]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("name", "m"),
        ("vocab_size", 1001),
        ("fingerprint", "another"),
        ("generation", 2**40),
        ("evict_before", 1),
        ("key", 2**60),
        ("checksum", 0),
    ],
)
def test_namespace_that_is_not_what_was_written_is_set_aside_with_its_documents(
    data: Path, column: str, value: int | str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fault: no checksum covered a namespace's row. A changed name gave its text to another tenant, a changed generation deleted it."""
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        write_namespaces(db, [KeptNamespace(KEY + 10**9, "other", 1000, "", 0, 0)])
        write_documents(db, [_row(DOCUMENTS, namespace=KEY + 10**9)])
        db.execute(f"UPDATE namespaces SET {column} = ? WHERE key = ?", (value, KEY))
    with kept(data, quota_tokens=2**18) as made:
        assert [info.name for info in made.corpus.namespaces()] == ["other"]
        assert made.store.counts.damaged_documents == DOCUMENTS
        assert len(made.documents("other")) == 1
        # No number is taken from what is damaged.
        assert made.corpus.clock.now_us() < 2**53
    assert "namespaces_are_damaged" in "".join(capfd.readouterr())
    with closing(sqlite3.connect(data / FILE)) as db:
        assert db.execute("SELECT count(*) FROM damaged_documents").fetchone() == (DOCUMENTS,)
        assert db.execute(f"SELECT {column} FROM damaged_namespaces").fetchall() == [(value,)]
        assert db.execute("SELECT name FROM namespaces").fetchall() == [("other",)]
    with kept(data, quota_tokens=2**18) as again:
        assert again.store.counts.damaged_documents == 0


def test_damaged_calibration_costs_what_was_learned_only(data: Path) -> None:
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        write_namespaces(db, [KeptNamespace(KEY, "n", 1000, "", 0, 0, calibration=b"learned")])
    with closing(Database(data / FILE)) as database:
        assert [row.kept().calibration for row in database.namespaces() if row.kept()] == [b"learned"]  # type: ignore[union-attr]
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        db.execute("UPDATE namespaces SET calibration = x'00'")
    with closing(Database(data / FILE)) as database:
        assert [row.kept() for row in database.namespaces()] == [KeptNamespace(KEY, "n", 1000, "", 0, 0)]
    assert _read(data) == (ROWS, 0)


def test_schema_that_is_no_text_costs_nothing(data: Path) -> None:
    """Fault: Python could not decode what SQLite said of it, and the service did not start."""
    content = (data / FILE).read_bytes()
    at = content.index(b"CREATE TABLE namespaces")
    _overwrite(data, at, b"CREATE T\xc5BLE")
    assert _read(data) == (ROWS, 0)
    assert len(_aside(data)) == 1


@pytest.mark.parametrize("size", [1, 100, 4096])
def test_first_page_that_is_damaged_costs_nothing(data: Path, size: int) -> None:
    """Fault: it says where everything else is, so that with it everything was lost."""
    _overwrite(data, 0, b"\xff" * size)
    damaged = (data / FILE).read_bytes()
    assert _read(data) == (ROWS, 0)
    (aside,) = _aside(data)
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == {FILE: damaged}
    assert _read(data) == (ROWS, 0)


@pytest.mark.parametrize("version", [0, -(2**31)])
def test_format_that_never_was_is_damage(data: Path, version: int) -> None:
    """Fault: the service did not start, for a KeyError."""
    with closing(sqlite3.connect(data / FILE)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    assert _read(data) == (ROWS, 0)
    assert len(_aside(data)) == 1


# What this version's columns were added to.
_FORMAT_1 = """
DROP TABLE namespaces; DROP TABLE damaged_namespaces;
CREATE TABLE namespaces (key INTEGER PRIMARY KEY, name TEXT NOT NULL, vocab_size INTEGER NOT NULL, fingerprint TEXT NOT NULL,
    generation INTEGER NOT NULL, evict_before INTEGER NOT NULL) STRICT;
INSERT INTO namespaces VALUES (1000000000000000, 'n', 1000, 'tokenizer', 3, 0);
PRAGMA user_version = 1;
"""
_FORMAT_2 = f"""
{_FORMAT_1} ALTER TABLE namespaces ADD COLUMN calibration BLOB NOT NULL DEFAULT x'';
UPDATE namespaces SET calibration = x'0102';
PRAGMA user_version = 2;
"""


@pytest.mark.parametrize(("older", "calibration"), [(_FORMAT_1, b""), (_FORMAT_2, b"\x01\x02")])
@pytest.mark.parametrize("damaged", [False, True])
def test_store_of_an_older_format_is_used_whole_or_damaged(data: Path, older: str, calibration: bytes, damaged: bool) -> None:
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        db.executescript(older)
        page = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'documents_of_namespace'").fetchone()[0]
    if damaged:
        _overwrite(data, (page - 1) * 4096, os.urandom(4096))
    database, lost = open_or_salvage(data)
    with closing(database):
        (row,) = database.namespaces()
        assert row.kept() == KeptNamespace(KEY, "n", 1000, "tokenizer", 3, 0, calibration)
        assert (list(database.newest_first(KEY))[::-1], lost) == (ROWS, 0)
        set_aside = database._db.execute("SELECT count(*) FROM damaged_namespaces, damaged_documents").fetchone()
        assert database._db.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    assert set_aside == (0,)
    assert len(_aside(data)) == damaged


def test_torn_log_brings_back_whole_transactions_only(written: Path) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        live = Path(directory) / "live"
        live.mkdir()
        database = Database(live / FILE)
        with database.transaction() as db:
            write_namespaces(db, [KeptNamespace(KEY, "n", 1000, "", 0, 0)])
        for i in range(0, 40, 2):
            with database.transaction() as db:
                write_documents(db, ROWS[i : i + 2])
        log = (live / f"{FILE}-wal").read_bytes()
        lengths = set()
        for i in range(40):
            torn = Path(directory) / f"torn-{i}"
            torn.mkdir()
            shutil.copy(live / FILE, torn)
            cut = log[: rng.randrange(len(log))]
            # What was being written may be anything.
            (torn / f"{FILE}-wal").write_bytes(cut + (os.urandom(500) if i % 2 else b""))
            rows, lost = _read(torn)
            assert rows == ROWS[: len(rows)]
            assert len(rows) % 2 == 0
            assert (lost, _aside(torn)) == (0, [])
            lengths.add(len(rows))
        assert len(lengths) > 3
        database.close()


def test_anything_overwritten_anywhere_never_brings_back_what_was_not_written(written: Path) -> None:
    rng = random.Random(1)
    size = (written / FILE).stat().st_size
    found: list[int] = []
    refused: list[str] = []
    for _ in range(40):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            data = Path(directory)
            shutil.copy(written / FILE, data)
            for _ in range(rng.choice([1, 3, 30])):
                _overwrite(data, rng.randrange(size), rng.randbytes(rng.choice([1, 8, 300])))
            try:
                made = Kept(data, quota_tokens=2**18)
            except StoreError as error:
                refused.append(str(error))
                continue
            tokens = {d.document_id: d.tokens.tolist() for info in made.corpus.namespaces() for d in made.documents(info.name)}
            right = {row.document_id: Codec().unpack(row.data, row.tokens).tolist() for row in ROWS}
            assert tokens.items() <= right.items()
            found.append(len(tokens))
            made.add("new", [1, 2, 3], "new")
            made.settle()
            made.close()
    assert sum(count > DOCUMENTS // 2 for count in found) > 10
    # The marks that say whose file it is, and of which format, are a few bytes as well.
    assert all("is not a store of draftd" in said or "has format" in said for said in refused)


# -- what is refused ---------------------------------------------------------------------------------------------------------


def test_newer_format_is_refused_and_not_touched(data: Path) -> None:
    with closing(sqlite3.connect(data / FILE)) as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = (data / FILE).read_bytes()
    with pytest.raises(StoreError, match=f"has format {FORMAT + 1}, and this version of draftd knows up to {FORMAT}: use a newer one"):
        open_store(data, 10)
    assert (data / FILE).read_bytes() == before
    assert not _aside(data)


def test_database_of_another_program_is_refused_and_not_touched(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("CREATE TABLE photos (id INTEGER)")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StoreError, match="is not a store of draftd; choose another --data-dir"):
        open_store(tmp_path, 10)
    assert (tmp_path / FILE).read_bytes() == before


def test_directory_in_use_is_refused_and_names_the_process(tmp_path: Path) -> None:
    held = DataDir(tmp_path)
    with pytest.raises(StoreError, match=f"is used by another service, process {os.getpid()}; stop it, or choose another --data-dir"):
        open_store(tmp_path, 10)
    held.close()
    open_store(tmp_path, 10).close()
    # An open that failed holds nothing.
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    for _ in range(2):
        with pytest.raises(StoreError, match="the store cannot be opened: unable to open database file"):
            open_store(tmp_path, 10)


def test_file_open_in_another_program_is_refused(data: Path) -> None:
    with closing(sqlite3.connect(data / FILE, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="the store cannot be opened: database is locked"):
            open_store(data, 10)


def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StoreError, match=f"belongs to user {owner}, not to {owner + 1}"):
        DataDir(tmp_path)


def test_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"cannot be written: (File exists|Not a directory); choose another --data-dir"):
            DataDir(path)


def test_directory_that_cannot_be_written_is_refused() -> None:
    place = Path(tempfile.mkdtemp(prefix="draftd-test-"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Root may write everywhere, so another user tries.
        try:
            os.mkdir(place / "data", 0o500)
            if os.geteuid() == 0:
                place.chmod(0o755)
                os.chown(place / "data", 65534, 65534)
                os.setuid(65534)
            DataDir(place / "data")
        except StoreError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    said = os.read(reading, 4096).decode()
    os.close(reading)
    os.waitpid(child, 0)
    shutil.rmtree(place)
    assert said.startswith(f"data_dir {place}/data cannot be written: Permission denied; choose another --data-dir")


def test_new_directory_and_all_files_are_for_their_owner_only(tmp_path: Path) -> None:
    DataDir(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o755)
    store = open_store(tmp_path, 10)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {path.name for path in files} == {FILE, f"{FILE}-wal", "lock"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    store.close()


def test_service_that_cannot_have_its_store_ends_with_one_line(tmp_path: Path) -> None:
    held = DataDir(tmp_path)
    with short_directory() as directory:
        flags = ["--socket", str(directory / "d.sock"), "--http", "off", "--shm-root", str(directory / "shm"), "--data-dir", str(tmp_path)]
        result = draftd("serve", *flags)
        assert (result.returncode, result.stderr.startswith(f"draftd: data_dir {tmp_path} is used by another service")) == (1, True)
        assert len(result.stderr.splitlines()) == 1
        assert not (directory / "d.sock").exists()
    held.close()


def test_damage_is_told_from_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"x" * 5000)
    with pytest.raises(Damaged):
        Database(tmp_path / FILE)
