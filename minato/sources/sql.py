"""Rows of a table: the base class of the databases, and SQLite (in Python's standard library)."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minato._fork_safety import held_off_forks
from minato.checks import refuse_one
from minato.sources.base import KeyedSource, Retry, Row, SourceError

__all__ = ["SQLite", "TableSource", "quoted", "quoted_column"]

_BUSY_S = 5.0  # how long SQLite itself waits for a writer
_TRANSIENT = frozenset({5, 6, 10, 15})
"""SQLITE_BUSY, LOCKED, IOERR and PROTOCOL, which another process or the file system may have caused."""


def quoted(name: str) -> str:
    """The name of a table, quoted for SQL; the parts of a dotted name are quoted one by one."""
    return ".".join(map(quoted_column, name.split(".")))


def quoted_column(name: str) -> str:
    """The name of a column, quoted for SQL; a dot is a part of the name."""
    if not name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a table or column")
    return '"' + name.replace('"', '""') + '"'


class TableSource(KeyedSource):
    """Rows of a table by their primary key; a sample is a dict of the columns, in one read.

    Args:
        table: Name of the table, or ``schema.table``.
        key: The column of the keys; it must be unique, and should have an index.
        columns: The columns of a sample; None for all but the key.
        where: A condition in SQL that selects rows, for instance ``"split = 'train'"``; the database evaluates it when
            the keys are listed.
        keys, retry: See :class:`KeyedSource`.
        decode: Called with the dict of a row.
    """

    shared = False

    def __init__(
        self,
        table: str,
        key: str,
        columns: Sequence[str] | None,
        where: str | None,
        keys: Sequence[object] | None,
        decode: Callable[[Row], object] | None,
        retry: Retry | None,
    ) -> None:
        super().__init__(keys, decode, retry)
        self.table, self.key = table, key
        refuse_one("columns", columns)
        self._columns = None if columns is None else tuple(columns)
        self._where = where

    def close_connection(self, connection: Any) -> None:
        connection.close()

    def statement(self, text: str) -> str:
        """A statement of the database: with its placeholder for each NUL in the text, which no name contains."""
        return text.replace("\0", "?")

    def query(self, text: str, *arguments: object) -> list[Row]:
        """The rows of a query."""
        with self.connections.lease() as connection:
            rows: list[Row] = connection.execute(self.statement(text), arguments).fetchall()
        return rows

    def listing(self) -> str:
        """The query for all keys."""
        key = self.column_name(self.key)
        where = f" WHERE {self._where}" if self._where else ""
        return f"SELECT {self.selected(self.key)} FROM {quoted(self.table)}{where} ORDER BY {key}"

    def list_keys(self) -> Sequence[Any]:
        return [row[self.key] for row in self.query(self.listing())]

    def column_name(self, name: str) -> str:
        """A column, quoted, after the table's name: without it, SQLite takes an unknown column for a string."""
        return f"{quoted(self.table)}.{quoted_column(name)}"

    def selected(self, name: str) -> str:
        """A column of the result, whose name there is the one that was asked for."""
        return self.column_name(name)

    def selection(self) -> str:
        """The query for rows, up to the condition on the key."""
        names = "*"
        if self._columns is not None:
            named = dict.fromkeys((self.key, *self._columns))
            names = ", ".join(map(self.selected, named))
        return f"SELECT {names} FROM {quoted(self.table)} WHERE {self.column_name(self.key)}"

    def sample_of(self, key: object, rows: list[dict[str, object]]) -> Row | None:
        """The sample of the rows with a key; None if there are none."""
        if len(rows) > 1:
            raise SourceError(f"{self!r} has {len(rows)} rows with key {key!r}")
        if rows and (self._columns is None or self.key not in self._columns):
            rows[0].pop(self.key, None)
        return rows[0] if rows else None

    def read_value(self, key: Any) -> Row:
        sample = self.sample_of(key, self.query(f"{self.selection()} = \0", key))
        if sample is None:
            raise LookupError(key)
        return sample


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
        keys: Sequence[object] | None = None,
        decode: Callable[[Row], object] | None = None,
        retry: Retry | None = None,
    ) -> None:
        super().__init__(table, key, columns, where, keys, decode, retry)
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"SQLite({str(self.path)!r}, {self.table!r})"

    def selected(self, name: str) -> str:
        # SQLite takes a name in any case, and would answer with the one of the table.
        return f"{self.column_name(name)} AS {quoted_column(name)}"

    def sample_of(self, key: object, rows: list[dict[str, object]]) -> Row | None:
        sample = super().sample_of(key, rows)
        if sample is None or self._columns is not None:
            return sample
        return {name: cell for name, cell in sample.items() if _folded(name) != _folded(self.key)}

    def is_transient(self, error: Exception) -> bool:
        # A missing table or column is an OperationalError too; so is a text that is not UTF-8, which has no code.
        passes = getattr(error, "sqlite_errorcode", 0) % 256 in _TRANSIENT
        return super().is_transient(error) and (passes or not isinstance(error, sqlite3.Error))

    def describe_error(self, error: Exception) -> str:
        text = super().describe_error(error)
        if text.endswith(f"no such column: {self.table}.{self.key}"):
            text += ": key= names the column of the keys"
        return text

    def query(self, text: str, *arguments: object) -> list[Row]:
        with held_off_forks():  # a child would inherit the locks of SQLite itself
            return super().query(text, *arguments)

    def close_connection(self, connection: sqlite3.Connection) -> None:
        with held_off_forks():
            super().close_connection(connection)

    def open_connection(self) -> sqlite3.Connection:
        if not self.path.exists():
            raise FileNotFoundError(self.path)
        url = f"file://{quote(os.fsencode(self.path.absolute()))}?mode="
        if Path(f"{self.path}-journal").exists():
            # A writer may have been killed; what it left half-done is undone by the first reader that may write.
            with closing(sqlite3.connect(url + "rw", uri=True, timeout=_BUSY_S)) as recovering:
                recovering.execute("PRAGMA schema_version")
        # Only one thread at a time uses a connection, but not always the same one.
        opened = sqlite3.connect(url + "ro", uri=True, check_same_thread=False, timeout=_BUSY_S)
        opened.row_factory = _named
        return opened


def _named(cursor: sqlite3.Cursor, row: tuple[object, ...]) -> Row:
    return {column[0]: cell for column, cell in zip(cursor.description, row, strict=True)}


def _folded(name: str) -> bytes:
    """What SQLite compares of a name: it ignores the case of ASCII only."""
    return name.encode().lower()
