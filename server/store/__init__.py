"""Committed documents on disk: a SQLite database in the data directory, written behind the index and restored at the start."""
