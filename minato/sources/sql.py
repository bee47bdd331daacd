"""TableSource, the base class of sources over a table of a database."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from minato.sources.base import KeyedSource, SourceError
from minato.sources.connections import Connections
from minato.sources.retry import Retry

__all__ = ["TableSource", "quoted", "quoted_column"]


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

    placeholder = "?"

    def __init__(
        self,
        table: str,
        key: str,
        columns: Sequence[str] | None,
        where: str | None,
        keys: Sequence[Any] | None,
        decode: Callable[[dict[str, Any]], Any] | None,
        retry: Retry | None,
    ) -> None:
        super().__init__(keys, decode, retry)
        self.table = table
        self.key = key
        self._columns = None if columns is None else tuple(columns)
        self._where = where
        self.connections: Connections[Any] = Connections(self._open, self._close_one)

    @abstractmethod
    def _open(self) -> Any:
        """Open a connection."""

    def _close_one(self, connection: Any) -> None:
        connection.close()

    def _query(self, text: str, arguments: tuple[Any, ...]) -> tuple[list[Any], list[str]]:
        """The rows of a query, and the names of their columns."""
        with self.connections.lease() as connection:
            cursor = connection.execute(text, arguments)
            return cursor.fetchall(), [column[0] for column in cursor.description]

    def close(self) -> None:
        """Close the connections of this process; the next read opens new ones."""
        self.connections.close()

    def _listing(self) -> str:
        """The query for all keys."""
        key = self._column(self.key)
        where = f" WHERE {self._where}" if self._where else ""
        return f"SELECT {key} FROM {quoted(self.table)}{where} ORDER BY {key}"

    def _list(self) -> Sequence[Any]:
        rows, _ = self._query(self._listing(), ())
        return [row[0] for row in rows]

    def _column(self, name: str) -> str:
        # With the table's name: without it, SQLite takes an unknown quoted column for a string.
        return f"{quoted(self.table)}.{quoted_column(name)}"

    def _select(self) -> str:
        names = "*"
        if self._columns is not None:
            named = dict.fromkeys((self.key, *self._columns))
            names = ", ".join(map(self._column, named))
        return f"SELECT {names} FROM {quoted(self.table)} WHERE {self._column(self.key)}"

    def _sample(self, row: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        sample = dict(zip(names, row, strict=True))
        if self._columns is None or self.key not in self._columns:
            sample.pop(self.key, None)
        return sample

    def _fetch(self, key: object) -> dict[str, Any]:
        rows, names = self._query(f"{self._select()} = {self.placeholder}", (key,))
        if not rows:
            raise LookupError(key)
        if len(rows) > 1:
            raise SourceError(f"{self!r} has {len(rows)} rows with key {key!r}")
        return self._sample(rows[0], names)
