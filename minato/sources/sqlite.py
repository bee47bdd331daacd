"""Rows of an SQLite database (in Python's standard library)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import pathname2url

from minato._fork_safety import held_off_forks
from minato.sources.retry import Retry
from minato.sources.sql import TableSource

__all__ = ["SQLite"]

_BUSY_S = 5.0
"""How long SQLite itself waits for a writer."""
_TRANSIENT = frozenset({5, 6, 10, 15})
"""SQLITE_BUSY, LOCKED, IOERR and PROTOCOL, which another process or the file system may have caused."""
_UNKNOWN = 5


class SQLite(TableSource):
    """Rows of a table of an SQLite file, which is opened read-only.

    Args:
        path: The file.
        table, key, columns, where, keys, decode, retry: See :class:`TableSource`.

    >>> source = SQLite("train.db", "images", key="id", columns=["pixels", "label"])  # doctest: +SKIP
    """

    transient = (sqlite3.OperationalError,)

    def __init__(
        self,
        path: str | Path,
        table: str,
        key: str = "id",
        columns: Sequence[str] | None = None,
        *,
        where: str | None = None,
        keys: Sequence[Any] | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        retry: Retry | None = None,
    ) -> None:
        super().__init__(table, key, columns, where, keys, decode, retry)
        self._path = Path(path)

    def __repr__(self) -> str:
        return f"SQLite({str(self._path)!r}, {self.table!r})"

    def _is_transient(self, error: Exception) -> bool:
        # A missing table or column is an OperationalError too. Python 3.10 has no error codes.
        code: int = getattr(error, "sqlite_errorcode", _UNKNOWN)
        return super()._is_transient(error) and code % 256 in _TRANSIENT

    def _query(self, text: str, arguments: tuple[Any, ...]) -> tuple[list[Any], list[str]]:
        with held_off_forks():  # a child would inherit the locks of SQLite itself
            return super()._query(text, arguments)

    def _close_one(self, connection: sqlite3.Connection) -> None:
        with held_off_forks():
            super()._close_one(connection)

    def _open(self) -> sqlite3.Connection:
        if not self._path.exists():
            raise FileNotFoundError(self._path)
        url = f"file:{pathname2url(str(self._path.absolute()))}?mode="
        if Path(f"{self._path}-journal").exists():
            # A writer may have been killed; what it left half-done is undone by the first reader that may write.
            with closing(sqlite3.connect(url + "rw", uri=True, timeout=_BUSY_S)) as recovering:
                recovering.execute("PRAGMA schema_version")
        # Only one thread at a time uses a connection, but not always the same one.
        return sqlite3.connect(url + "ro", uri=True, check_same_thread=False, timeout=_BUSY_S)
