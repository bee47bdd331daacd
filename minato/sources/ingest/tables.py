"""Stores of rows in a database: SQLite, PostgreSQL, Cassandra."""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from minato.sources.connections import Connections
from minato.sources.ingest.store import Items, SourceStore, check_rows, compare_rows
from minato.sources.sql import quoted, quoted_column

__all__ = ["CassandraStore", "PostgresStore", "SQLiteStore", "TableStore"]

_SQLITE_BUSY_S = 60.0
"""One process writes at a time; the others wait."""
_CASSANDRA_IN_FLIGHT = 64
"""Most rows of a chunk that are in flight."""


class TableStore(SourceStore):
    """Rows of a table, which is created if it does not exist, with the columns of the first sample.

    A row that is written is read again, and compared: a value that the table would change is refused.

    Attributes:
        types: The type of a column, by the Python type of its values.
        one_type: Whether a column has a type at all.
    """

    takes_rows = True
    types: ClassVar[Mapping[type, str]]
    one_type: ClassVar[bool] = True
    placeholder: ClassVar[str] = "?"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._table = quoted(source.table)
        self._column = quoted_column(source.key)

    def _write(self, chunk: int, items: Items) -> None:
        """Write the rows of a chunk once, if one table can hold them."""
        check_rows(items, self.source.key, self.one_type)
        self._write_rows(items)

    @abstractmethod
    def _write_rows(self, items: Items) -> None:
        """Write rows, and compare what the table holds."""

    def _definition(self, items: Items) -> str:
        """The statement that creates the table."""
        columns = [f"{self._column} {self._key_type(items[0][0])} PRIMARY KEY"]
        columns += [f"{quoted_column(name)} {self._type(name, items)}" for name in items[0][1]]
        return f"CREATE TABLE IF NOT EXISTS {self._table} ({', '.join(columns)})"

    def _key_type(self, key: object) -> str:
        return self.types[type(key)]

    def _type(self, name: str, items: Items) -> str:
        """The type of a column, by the first value that is not None."""
        for _, row in items:
            if row[name] is not None:
                return self.types[type(row[name])]
        raise ValueError(
            f"column {name!r} is None in the first {len(items)} samples, and has no type: create the table yourself"
        )

    def escaped(self, text: str) -> str:
        """A part of a statement without placeholders, with the driver's special characters escaped."""
        return text

    def _insertion(self, items: Items) -> str:
        """The statement that writes a row of these columns, key first."""
        names = [self._column, *map(quoted_column, items[0][1])]
        marks = ", ".join([self.placeholder] * len(names))
        into = f"INSERT INTO {self._table} ({', '.join(names)}) VALUES"
        return f"{self.escaped(into)} ({marks})"

    def _replacing(self, items: Items) -> str:
        """The end of an insertion that replaces the row of this key, and of no other unique column."""
        names = map(quoted_column, items[0][1])
        given = ", ".join(f"{name} = EXCLUDED.{name}" for name in names)
        return self.escaped(f" ON CONFLICT ({self._column}) DO UPDATE SET {given}")

    def _selection(self, items: Items) -> str:
        """The statement that reads such a row, up to its condition."""
        names = map(quoted_column, (self.source.key, *items[0][1]))
        columns = ", ".join(f"{self._table}.{name}" for name in names)
        return self.escaped(f"SELECT {columns} FROM {self._table} WHERE {self._column}")

    def _rows(self, items: Items) -> list[tuple[Any, ...]]:
        """The values of each row, in the order of the first row's columns."""
        names = list(items[0][1])
        return [(key, *(row[name] for name in names)) for key, row in items]

    def _compare(self, items: Items, found: Iterable[Sequence[Any] | None]) -> None:
        names = list(items[0][1])
        rows = {row[0]: dict(zip(names, row[1:], strict=True)) for row in found if row is not None}
        compare_rows(items, rows)


class SQLiteStore(TableStore):
    """A table of an SQLite file.

    Args:
        path: The file; created if it does not exist.
        table: Name of the table.
        key: Name of the column of the keys.
    """

    one_type = False

    def __init__(self, path: str | Path, table: str = "samples", key: str = "id") -> None:
        from minato.sources.sqlite import SQLite

        self._path = Path(path).absolute()
        super().__init__(SQLite(self._path, table, key))

    def _key_type(self, key: object) -> str:
        return "INTEGER" if type(key) is int else ""

    def _type(self, name: str, items: Items) -> str:
        """None: SQLite would convert values to the type of a column; without one it keeps each as it is."""
        return ""

    def _write_rows(self, items: Items) -> None:
        """Write a chunk in one transaction."""
        connection = sqlite3.connect(self._path, timeout=_SQLITE_BUSY_S, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(self._definition(items))
            insertion = self._insertion(items) + self._replacing(items)
            connection.executemany(insertion, self._rows(items))
            select = f"{self._selection(items)} = ?"
            self._compare(
                items, [connection.execute(select, (key,)).fetchone() for key, _ in items]
            )
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
        bool: "BOOLEAN",
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

    def _write_rows(self, items: Items) -> None:
        """Write a chunk in one transaction, its rows in a pipeline."""
        with (
            self.source.connections.lease() as connection,
            connection.transaction(),
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT to_regclass(%s)", (self._table,))
            if cursor.fetchone()[0] is None:
                cursor.execute(self._definition(items))
            cursor.executemany(self._insertion(items) + self._replacing(items), self._rows(items))
            cursor.execute(f"{self._selection(items)} = ANY(%s)", ([key for key, _ in items],))
            self._compare(items, cursor.fetchall())


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
        bool: "boolean",
    }

    def __init__(self, hosts: Any, table: str, key: str = "id", **settings: Any) -> None:
        from minato.sources.cassandra import Cassandra

        source = Cassandra(hosts, table, key, **settings)
        super().__init__(source)
        self._connect = source.connect
        self._sessions: Connections[_Session] = Connections(self._open, _shut_down, shared=True)

    def _open(self) -> _Session:
        return _Session(*self._connect(), {})

    def _write_rows(self, items: Items) -> None:
        """Write the rows of a chunk, many of them concurrently."""
        from cassandra.concurrent import execute_concurrent_with_args

        with self._sessions.lease() as opened:
            _, session, prepared = opened
        names = ", ".join(map(quoted_column, (self.source.key, *items[0][1])))
        insertion = self._insertion(items)
        selection = f"SELECT {names} FROM {self._table} WHERE {self._column} = ?"
        if insertion not in prepared:
            session.execute(self._definition(items))
            prepared[insertion] = session.prepare(insertion)
            prepared[selection] = session.prepare(selection)
        execute_concurrent_with_args(
            session, prepared[insertion], self._rows(items), _CASSANDRA_IN_FLIGHT
        )
        keys = [(key,) for key, _ in items]
        found = execute_concurrent_with_args(
            session, prepared[selection], keys, _CASSANDRA_IN_FLIGHT
        )
        rows = [row for _, results in found for row in results]
        order = (self.source.key, *items[0][1])
        self._compare(items, [[row[name] for name in order] for row in rows])

    def close(self) -> None:
        """Close the sessions of this process."""
        super().close()
        self._sessions.close()


def _shut_down(opened: _Session) -> None:
    opened.cluster.shutdown()
