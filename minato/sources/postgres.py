"""Rows of a PostgreSQL database, through psycopg (extra ``postgres``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import conninfo

from minato.sources.base import MissingKey, SourceError
from minato.sources.retry import Retry
from minato.sources.settings import Settings
from minato.sources.sql import TableSource

__all__ = ["Postgres"]


class Postgres(TableSource):
    """Rows of a table of a PostgreSQL database.

    A batch of keys is one query. With ``fetch_concurrency`` samples are queried one by one instead, over that number of
    connections in each worker.

    Args:
        conninfo: libpq's connection string or URL; a password in it is kept secret. Missing settings come from libpq's
            environment variables (``PGHOST``, ``PGPASSWORD``, ``PGSSLMODE`` …).
        table, key, columns, where, keys, decode, retry: See :class:`TableSource`.
        settings: Further settings of libpq (``sslmode``, ``sslrootcert``, ``connect_timeout``, ``options`` …), each of
            them a value or an :class:`~minato.sources.settings.Env`.

    >>> source = Postgres("host=db dbname=train", "images", password=Env("DB_PASSWORD"))  # doctest: +SKIP
    """

    transient = (psycopg.OperationalError, psycopg.InterfaceError)
    placeholder = "%s"

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
        self._settings = Settings({**_parsed(conninfo), **settings})

    def __repr__(self) -> str:
        return f"Postgres({self.table!r}, {self._settings!r})"

    def _open(self) -> psycopg.Connection[Any]:
        return psycopg.connect(autocommit=True, **self._settings.values())

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read the samples of a batch in one query."""
        requested = [self.keys[index] for index in indices]
        found = self.attempt(f"keys {requested[0]!r} …", lambda: self._fetch_all(requested))
        for key in requested:
            if key not in found:
                raise MissingKey(f"{self!r} has no key {key!r}")
        return [self._decoded(key, dict(found[key])) for key in requested]

    def _select(self) -> str:
        return (
            super()._select().replace("%", "%%")
        )  # psycopg looks for its placeholders in the whole text

    def _fetch_all(self, requested: list[Any]) -> dict[Any, dict[str, Any]]:
        rows, names = self._query(f"{self._select()} = ANY(%s)", (requested,))
        at = names.index(self.key)
        found = {row[at]: self._sample(row, names) for row in rows}
        if len(found) < len(rows):
            repeated = Counter(row[at] for row in rows).most_common(1)[0]
            raise SourceError(f"{self!r} has {repeated[1]} rows with key {repeated[0]!r}")
        return found

    def _list(self) -> Sequence[Any]:
        # By a cursor of the server: a single result with a million keys would be in memory twice.
        with (
            self.connections.lease() as connection,
            connection.transaction(),
            connection.cursor(name="minato_keys") as cursor,
        ):
            cursor.itersize = 50_000
            cursor.execute(self._listing())
            return [row[0] for row in cursor]


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = conninfo.conninfo_to_dict(text)
    except psycopg.ProgrammingError:  # its text may contain the password
        raise ValueError(
            "conninfo is no connection string of libpq (not shown, as it may hold a password): in a URL, give the "
            "characters / ? # @ of a password as %2F, %3F, %23 and %40"
        ) from None
    return {name: value for name, value in given.items() if value is not None}
