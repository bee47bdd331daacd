"""Into a table of a Cassandra or ScyllaDB cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from cassandra.concurrent import execute_concurrent_with_args

from minato.sources.cassandra import Cassandra
from minato.sources.connections import Connections
from minato.sources.ingest.store import Items, Unknown
from minato.sources.ingest.tables import TableStore
from minato.sources.settings import Env

__all__ = ["CassandraStore", "from_url"]

_AT_ONCE = 64
"""Rows of a chunk in flight at once."""


class _Opened(NamedTuple):
    """What a process writes with; the statements by their text."""

    cluster: Any
    session: Any
    prepared: dict[str, Any]


class CassandraStore(TableStore):
    """A table of a cluster, in a keyspace that exists.

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
        source = Cassandra(hosts, table, key, **settings)
        super().__init__(source)
        self._connect = source._connect
        self._writing: Connections[_Opened] = Connections(self._open, _shut_down, shared=True)

    def _open(self) -> _Opened:
        return _Opened(*self._connect(), {})

    def write(self, chunk: int, items: Items) -> None:
        """Write the rows of a chunk, many of them at once."""
        self._trying(items, lambda: self._write(items))

    def _write(self, items: Items) -> None:
        with self._writing.lease() as opened:
            _, session, prepared = opened
        text = self._insertion(items)
        if text not in prepared:
            if self._has_types(items):
                session.execute(self._definition(items))
            prepared[text] = session.prepare(text)
        execute_concurrent_with_args(session, prepared[text], self._rows(items), _AT_ONCE)

    def close(self) -> None:
        """Close the sessions of this process."""
        super().close()
        self._writing.close()


def _shut_down(opened: _Opened) -> None:
    opened.cluster.shutdown()


def from_url(url: str, table: str, password: Env | None) -> Any:
    """``cassandra://user@host:port`` and ``keyspace.table``; several hosts with commas between them."""
    if "." not in table:
        raise Unknown(f"the table {table!r} has no keyspace: name it keyspace.table")
    user, _, places = urlsplit(url).netloc.rpartition("@")
    hosts = [place.partition(":")[0] for place in places.split(",")]
    port = places.rpartition(":")[2]
    settings: dict[str, Any] = {"port": int(port)} if port.isdigit() else {}
    if user:
        name, _, given = user.partition(":")
        settings.update(username=name, password=password or given or None)
    return CassandraStore(hosts, table, **settings)
