"""Into a table of an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from minato.sources.ingest.store import Items
from minato.sources.ingest.tables import TableStore
from minato.sources.settings import Env
from minato.sources.sqlite import SQLite

__all__ = ["SQLiteStore", "from_url"]

_BUSY_S = 60.0
"""One process writes at a time; the others wait."""


class SQLiteStore(TableStore):
    """A table of an SQLite file.

    Args:
        path: The file; made if there is none.
        table, key: Names of the table and of the column of the keys.
    """

    types: ClassVar[Mapping[type, str]] = {
        int: "INTEGER",
        float: "REAL",
        str: "TEXT",
        bytes: "BLOB",
    }

    def __init__(self, path: str | Path, table: str = "samples", key: str = "id") -> None:
        super().__init__(SQLite(Path(path).absolute(), table, key))
        self._path = Path(path).absolute()

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one transaction."""
        self._trying(items, lambda: self._write(items))

    def _write(self, items: Items) -> None:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            if self._has_types(items):
                connection.execute(self._definition(items))
            connection.executemany(self._insertion(items, "INSERT OR REPLACE"), self._rows(items))
            connection.execute("COMMIT")
        finally:
            connection.close()


def from_url(url: str, table: str, password: Env | None) -> Any:
    """``sqlite:FILE``."""
    return SQLiteStore(url.partition(":")[2], table)
