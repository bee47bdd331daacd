"""Rows of a PostgreSQL database, through psycopg (extra ``postgres``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.rows import dict_row

from minato.sources.base import BatchedSource, Retry
from minato.sources.connections import Settings
from minato.sources.sql import TableSource

__all__ = ["Postgres"]


class Postgres(TableSource, BatchedSource):
    """Rows of a table of a PostgreSQL database.

    A batch of keys is one query. With ``fetch_concurrency`` samples are queried one by one instead, over that number of
    connections in each worker.

    Args:
        conninfo: libpq's connection string or URL; a password in it is kept secret. Missing settings come from libpq's
            environment variables (``PGHOST``, ``PGPASSWORD``, ``PGSSLMODE`` …).
        table, key, columns, where, keys, decode, retry: See :class:`TableSource`.
        settings: Further settings of libpq (``sslmode``, ``sslrootcert``, ``connect_timeout``, ``options`` …), each of
            them a value or an :class:`~minato.sources.connections.Env`.

    >>> source = Postgres("host=db dbname=train", "images", password=Env("DB_PASSWORD"))  # doctest: +SKIP
    """

    transient = (psycopg.OperationalError, psycopg.InterfaceError)

    def __init__(
        self,
        conninfo: str,
        table: str,
        key: str = "id",
        columns: Sequence[str] | None = None,
        *,
        where: str | None = None,
        keys: Sequence[Any] | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        retry: Retry | None = None,
        **settings: object,
    ) -> None:
        super().__init__(table, key, columns, where, keys, decode, retry)
        self.settings = Settings({**_parsed(conninfo), **settings})

    def __repr__(self) -> str:
        return f"Postgres({self.table!r}, {self.settings!r})"

    def _open(self) -> psycopg.Connection[Any]:
        return psycopg.connect(autocommit=True, row_factory=dict_row, **self.settings.values())

    def statement(self, text: str) -> str:
        """With each ``%`` doubled, as psycopg looks for its placeholders in the whole text."""
        return text.replace("%", "%%").replace("\0", "%s")

    def _fetch_all(self, keys: list[Any]) -> list[dict[str, Any] | None]:
        """One query."""
        rows: dict[Any, list[dict[str, Any]]] = {key: [] for key in keys}
        for row in self._query(f"{self._select()} = ANY(\0)", keys):
            rows.setdefault(row[self.key], []).append(row)
        return [self._sample(key, [dict(row) for row in rows[key]]) for key in keys]

    def _list(self) -> Sequence[Any]:
        # By a cursor of the server: a single result with a million keys would be in memory twice.
        with (
            self.connections.lease() as connection,
            connection.transaction(),
            connection.cursor(name="minato_keys") as cursor,
        ):
            cursor.itersize = 50_000
            cursor.execute(self._listing())
            return [row[self.key] for row in cursor]


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = conninfo.conninfo_to_dict(text)
    except psycopg.ProgrammingError:  # its text may contain the password
        raise ValueError(
            "conninfo is no connection string of libpq (not shown, as it may hold a password): in a URL, give the "
            "characters / ? # @ of a password as %2F, %3F, %23 and %40"
        ) from None
    return {name: value for name, value in given.items() if value is not None}
