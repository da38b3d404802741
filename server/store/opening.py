"""Opening the store of a data directory, whatever state it was left in."""

import sqlite3
from pathlib import Path

from draftd.server.store.directory import DataDir, StoreError
from draftd.server.store.salvage import open_or_salvage
from draftd.server.store.store import Store


def open_store(path: Path, lag_ms: float) -> Store:
    """Claims the directory and opens its store; a damaged one is set aside and what can be read of it is used.

    Raises:
        StoreError: It cannot be used.
    """
    directory = DataDir(path)
    try:
        database, lost = open_or_salvage(path)
        store = Store(directory, database, lag_ms)
        store.counts.damaged_documents = lost
        return store
    except (sqlite3.Error, OSError) as error:
        directory.close()
        raise StoreError(f"data_dir {path}: the store cannot be opened: {error}") from None
    except StoreError:
        directory.close()
        raise
