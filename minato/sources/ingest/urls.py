"""The store that a URL names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from minato.sources.ingest.files import ObjectStore, ParquetStore, TarStore
from minato.sources.ingest.key_values import LMDBStore, RedisStore
from minato.sources.ingest.store import Store
from minato.sources.ingest.tables import CassandraStore, PostgresStore, SQLiteStore
from minato.sources.settings import Env, shown_url

__all__ = ["UnknownStore", "open_store"]


class UnknownStore(ValueError):
    """A URL names no store that can be written; the message contains the remedy."""


def open_store(url: str, table: str = "samples", password: Env | None = None) -> Store:
    """The store that a URL names.

    ``sqlite:FILE``, ``lmdb:DIRECTORY``, ``parquet:DIRECTORY``, ``postgresql://…``, ``redis://…/0``,
    ``cassandra://user@host:port``; objects in ``file:///directory``, ``s3://``, ``gs://`` and ``az://``; and tar files
    of a chunk each, in the same places with the prefix ``tar+``.

    Args:
        table: Name of the table in a database, for Cassandra ``keyspace.table``; in Redis, the prefix of the keys.
        password: The environment variable that holds the password, so that no list of processes shows it.

    Raises:
        UnknownStore: There is no such store, or its library is not installed.
        ValueError: The password in the URL contains a character that ends this part of a URL.
    """
    shown = shown_url(url)
    scheme = url.partition(":")[0]
    if ":" not in url or scheme not in _STORES:
        raise UnknownStore(f"{shown!r} names no store: begin it with one of {', '.join(_STORES)}")
    extra, make = _STORES[scheme]
    try:
        return make(url, table, password)
    except ModuleNotFoundError as error:
        raise UnknownStore(
            f"{shown!r} needs the package {error.name!r}: pip install 'minatoloader[{extra}]'"
        ) from None


def _path(url: str) -> str:
    return url.partition(":")[2]


def _postgres(url: str, table: str, password: Env | None) -> Store:
    return PostgresStore(url, table, **_given(password))


def _redis(url: str, table: str, password: Env | None) -> Store:
    return RedisStore(url, f"{table}/", **_given(password))


def _given(password: Env | None) -> dict[str, Any]:
    return {} if password is None else {"password": password}


def _cassandra(url: str, table: str, password: Env | None) -> Store:
    """``cassandra://user@host:port`` and ``keyspace.table``; several hosts are separated by commas."""
    if "." not in table:
        raise UnknownStore(f"the table {table!r} has no keyspace: name it keyspace.table")
    user, _, places = urlsplit(url).netloc.rpartition("@")
    hosts = [place.partition(":")[0] for place in places.split(",")]
    port = places.rpartition(":")[2]
    settings: dict[str, Any] = {"port": int(port)} if port.isdigit() else {}
    if user:
        name, _, given = user.partition(":")
        settings.update(username=name, password=password or given or None)
    return CassandraStore(hosts, table, **settings)


_objects: tuple[str, Callable[..., Store]] = ("objects", lambda url, *_: ObjectStore(url))
_tars: tuple[str, Callable[..., Store]] = (
    "objects",
    lambda url, *_: TarStore(url.removeprefix("tar+")),
)
_STORES: dict[str, tuple[str, Callable[..., Store]]] = {
    "sqlite": ("", lambda url, table, _: SQLiteStore(_path(url), table)),
    "lmdb": ("lmdb", lambda url, *_: LMDBStore(_path(url))),
    "parquet": ("parquet", lambda url, *_: ParquetStore(_path(url))),
    "postgresql": ("postgres", _postgres),
    "postgres": ("postgres", _postgres),
    "redis": ("redis", _redis),
    "rediss": ("redis", _redis),
    "cassandra": ("cassandra", _cassandra),
    **dict.fromkeys(["s3", "gs", "az", "file"], _objects),
    **dict.fromkeys(["tar+s3", "tar+gs", "tar+az", "tar+file"], _tars),
}
"""By scheme: the extra that the store needs, and the function that makes it of URL, table and password."""
