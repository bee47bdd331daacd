"""Stores of rows in a database: SQLite, PostgreSQL, Cassandra."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from minato.sources.connections import Connections
from minato.sources.ingest.store import Items, SourceStore
from minato.sources.sql import quoted, quoted_column

__all__ = ["CassandraStore", "PostgresStore", "SQLiteStore", "TableStore"]

_SQLITE_BUSY_S = 60.0
"""One process writes at a time; the others wait."""
_CASSANDRA_IN_FLIGHT = 64
"""Most rows of a chunk that are in flight."""


class TableStore(SourceStore):
    """Rows of a table, which is created if it does not exist, with the columns of the first sample.

    A column that is None in the first sample has no type. If there is one, create the table yourself.

    Attributes:
        types: The type of a column, by the Python type of its values.
    """

    takes_rows = True
    types: ClassVar[Mapping[type, str]]
    placeholder: ClassVar[str] = "?"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._table = quoted(source.table)
        self._column = quoted_column(source.key)

    def _definition(self, items: Items) -> str:
        """The statement that creates the table."""
        key, row = items[0]
        columns = [f"{self._column} {self.types[type(key)]} PRIMARY KEY"]
        columns += [
            f"{quoted_column(name)} {self.types.get(type(cell))}" for name, cell in row.items()
        ]
        return f"CREATE TABLE IF NOT EXISTS {self._table} ({', '.join(columns)})"

    def escaped(self, text: str) -> str:
        """A part of a statement without placeholders, with the driver's special characters escaped."""
        return text

    def _has_types(self, items: Items) -> bool:
        return all(type(cell) in self.types for cell in items[0][1].values())

    def _insertion(self, items: Items, verb: str = "INSERT") -> str:
        """The statement that writes a row of these columns, key first."""
        names = [self._column, *map(quoted_column, items[0][1])]
        marks = ", ".join([self.placeholder] * len(names))
        into = f"{verb} INTO {self._table} ({', '.join(names)}) VALUES"
        return f"{self.escaped(into)} ({marks})"

    def _rows(self, items: Items) -> list[tuple[Any, ...]]:
        """The values of each row, in the order of the first row's columns."""
        names = list(items[0][1])
        for key, row in items:
            if row.keys() != items[0][1].keys():
                raise ValueError(f"key {key!r} has the columns {list(row)}, and others {names}")
        return [(key, *(row[name] for name in names)) for key, row in items]


class SQLiteStore(TableStore):
    """A table of an SQLite file.

    Args:
        path: The file; created if it does not exist.
        table: Name of the table.
        key: Name of the column of the keys.
    """

    types: ClassVar[Mapping[type, str]] = {
        int: "INTEGER",
        float: "REAL",
        str: "TEXT",
        bytes: "BLOB",
    }

    def __init__(self, path: str | Path, table: str = "samples", key: str = "id") -> None:
        from minato.sources.sqlite import SQLite

        self._path = Path(path).absolute()
        super().__init__(SQLite(self._path, table, key))

    def _write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one transaction."""
        connection = sqlite3.connect(self._path, timeout=_SQLITE_BUSY_S, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            if self._has_types(items):
                connection.execute(self._definition(items))
            connection.executemany(self._insertion(items, "INSERT OR REPLACE"), self._rows(items))
            connection.execute("COMMIT")
        finally:
            connection.close()


class PostgresStore(TableStore):
    """A table of a PostgreSQL database.

    Args:
        conninfo, settings: As for :class:`~minato.sources.postgres.Postgres`.
        table: Name of the table.
        key: Name of the column of the keys.
    """

    types: ClassVar[Mapping[type, str]] = {
        int: "BIGINT",
        float: "DOUBLE PRECISION",
        str: "TEXT",
        bytes: "BYTEA",
    }
    placeholder = "%s"

    def __init__(
        self, conninfo: str, table: str = "samples", key: str = "id", **settings: Any
    ) -> None:
        from minato.sources.postgres import Postgres

        super().__init__(Postgres(conninfo, table, key, **settings))

    def escaped(self, text: str) -> str:
        """With each ``%`` doubled, as psycopg requires."""
        return text.replace("%", "%%")

    def _write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one transaction, its rows in a pipeline."""
        names = [quoted_column(name) for name in items[0][1]]
        replacing = ", ".join(f"{name} = EXCLUDED.{name}" for name in names)
        otherwise = f"ON CONFLICT ({self._column}) DO UPDATE SET {replacing}"
        insertion = f"{self._insertion(items)} {self.escaped(otherwise)}"
        with (
            self.source.connections.lease() as connection,
            connection.transaction(),
            connection.cursor() as cursor,
        ):
            if self._has_types(items):
                cursor.execute("SELECT to_regclass(%s)", (self._table,))
                if cursor.fetchone()[0] is None:
                    cursor.execute(self._definition(items))
            cursor.executemany(insertion, self._rows(items))


class _Session(NamedTuple):
    """A session that writes, with its prepared statements by their text."""

    cluster: Any
    session: Any
    prepared: dict[str, Any]


class CassandraStore(TableStore):
    """A table of a Cassandra or ScyllaDB cluster, in a keyspace that exists.

    Args:
        hosts, table, settings: As for :class:`~minato.sources.cassandra.Cassandra`.
        key: Name of the column of the keys.
    """

    types: ClassVar[Mapping[type, str]] = {
        int: "bigint",
        float: "double",
        str: "text",
        bytes: "blob",
    }

    def __init__(self, hosts: Any, table: str, key: str = "id", **settings: Any) -> None:
        from minato.sources.cassandra import Cassandra

        source = Cassandra(hosts, table, key, **settings)
        super().__init__(source)
        self._connect = source.connect
        self._sessions: Connections[_Session] = Connections(self._open, _shut_down, shared=True)

    def _open(self) -> _Session:
        return _Session(*self._connect(), {})

    def _write(self, chunk: int, items: Items) -> None:
        """Write the rows of a chunk, many of them concurrently."""
        from cassandra.concurrent import execute_concurrent_with_args

        with self._sessions.lease() as opened:
            _, session, prepared = opened
        text = self._insertion(items)
        if text not in prepared:
            if self._has_types(items):
                session.execute(self._definition(items))
            prepared[text] = session.prepare(text)
        execute_concurrent_with_args(
            session, prepared[text], self._rows(items), _CASSANDRA_IN_FLIGHT
        )

    def close(self) -> None:
        """Close the sessions of this process."""
        super().close()
        self._sessions.close()


def _shut_down(opened: _Session) -> None:
    opened.cluster.shutdown()
