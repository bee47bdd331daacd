"""Into a table of a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minato.sources.ingest.store import Items
from minato.sources.ingest.tables import TableStore
from minato.sources.postgres import Postgres
from minato.sources.settings import Env
from minato.sources.sql import quoted_column

__all__ = ["PostgresStore", "from_url"]


class PostgresStore(TableStore):
    """A table of a PostgreSQL database.

    Args:
        conninfo, settings: As for :class:`~minato.sources.postgres.Postgres`.
        table, key: Names of the table and of the column of the keys.
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
        super().__init__(Postgres(conninfo, table, key, **settings))

    def escaped(self, text: str) -> str:
        """With each ``%`` twice, as psycopg wants it."""
        return text.replace("%", "%%")

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one transaction, its rows one behind the other in a pipeline."""
        self._trying(items, lambda: self._write(items))

    def _write(self, items: Items) -> None:
        names = [quoted_column(name) for name in items[0][1]]
        replacing = ", ".join(f"{name} = EXCLUDED.{name}" for name in names)
        otherwise = f"ON CONFLICT ({self._column}) DO UPDATE SET {replacing}"
        insertion = f"{self._insertion(items)} {self.escaped(otherwise)}"
        with (
            self.source.connections.lease() as connection,
            connection.transaction(),
            connection.cursor() as cursor,
        ):
            if self._has_types(items) and not _exists(cursor, self._table):
                cursor.execute(self._definition(items))
            cursor.executemany(insertion, self._rows(items))


def _exists(cursor: Any, table: str) -> bool:
    cursor.execute("SELECT to_regclass(%s)", (table,))
    return cursor.fetchone()[0] is not None


def from_url(url: str, table: str, password: Env | None) -> Any:
    """``postgresql://…``, as libpq reads it."""
    settings: dict[str, Any] = {} if password is None else {"password": password}
    return PostgresStore(url, table, **settings)
