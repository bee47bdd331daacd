"""Stores that are filled chunk by chunk: tables, whose columns have declared types, and stores of values of bytes."""

from __future__ import annotations

import importlib
import io
import os
import re
import sqlite3
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from minato._support.files import replacement
from minato._support.lmdb_environments import one_at_a_time
from minato._support.text import short
from minato.sources.base import SourceError
from minato.sources.connections import Env, Place, shown_url
from minato.sources.sql import TableSource, quoted, quoted_column

__all__ = [
    "CassandraStore",
    "ChangedValue",
    "LMDBStore",
    "ObjectStore",
    "ParquetStore",
    "PostgresStore",
    "RedisStore",
    "SQLiteStore",
    "Store",
    "TarStore",
    "UnknownStore",
    "open_store",
]

Rows = Sequence[tuple[Any, dict[str, Any]]]
"""Keys, each with the values of its columns."""
Columns = Mapping[str, type]

_DATA = "data"
_OF_BYTES: Columns = {_DATA: bytes}
_TYPES = (bool, int, float, str, bytes)
_INT64 = range(-(1 << 63), 1 << 63)
_SHOWN = 60
"""Most characters of a value in a message."""
_BUSY_S = 60.0
"""How long a process waits for another one that writes to the SQLite file."""
_IN_FLIGHT = 16
"""Most objects of a chunk that are in flight."""
_ROWS_IN_FLIGHT = 64
"""Most rows of a chunk that are in flight to Cassandra."""
_LONGEST_KEY_BYTES = 511
_MOST_BYTES = 1 << 40
"""Of an LMDB file: address space, which it reserves."""
_CHANGED_PATH = re.compile(r"//|/\.\.?/|[\x00-\x1f\x7f]")
"""In a path between two slashes: obstore would leave it out, or refuse it."""


class ChangedValue(SourceError, ValueError):
    """A store would not hold a value as it is; the message names its key and column."""


class UnknownStore(ValueError):
    """A URL names no store that can be written; the message contains the remedy."""


class Store:
    """Takes chunks of rows, through the connections of the source that reads them, and with the source's retries.

    A chunk that is written again replaces its earlier rows. Like a source, a store can be forked and pickled, and opens
    its connections in the process that writes.

    Args:
        source: Reads what is written: without ``decode``, and all columns.
        columns: Of a table: the type of each column, by name: ``bool``, ``int``, ``float``, ``str`` or ``bytes``. None:
            ``data`` of bytes, as in all stores of values.

    Raises:
        ValueError: The store cannot have such a column.
    """

    key_column = ""
    """The column of the keys; empty in a store of values, which has no columns."""

    def __init__(self, source: Any, columns: Columns | None = None) -> None:
        self.source = source
        self.columns = dict(_OF_BYTES if columns is None else columns)
        if not self.key_column and self.columns != _OF_BYTES:
            raise ValueError(
                f"{source!r} has no columns, but values of bytes: leave columns out, or name a table"
            )
        for name, kind in self.columns.items():
            if kind not in _TYPES or name == self.key_column:
                raise ValueError(
                    f"the column {name!r} of type {kind!r} is not possible: declare bool, int, float, str or bytes, "
                    "under another name than the column of the keys"
                )

    def __repr__(self) -> str:
        return repr(self.source)

    def key(self, key: object) -> Any:
        """The key in this store of a sample with this key or index: a text.

        Raises:
            ValueError: The store cannot have this key.
        """
        if isinstance(key, Integral):
            return f"{int(key):08d}"
        text = key.decode(errors="surrogateescape") if isinstance(key, bytes) else str(key)
        if _SURROGATES.search(text):
            raise ValueError(f"key {key!r} is no text in UTF-8: give the dataset other keys")
        return text

    def row(self, key: object, sample: object) -> dict[str, Any]:
        """A sample as a row: a dict has the values by column, bytes are the column ``data``.

        Raises:
            ChangedValue: It has other columns than the store, or a value of another type than its column.
        """
        row: Any = sample if type(sample) is dict else {_DATA: sample}
        if row.keys() != self.columns.keys():
            declared = ", ".join(f"{name}:{kind.__name__}" for name, kind in self.columns.items())
            raise ChangedValue(
                f"key {key!r} has the columns {list(row)}, and the store has {declared}: declare others, or give "
                "encode=, which makes bytes of a sample or a dict of these columns"
            )
        for name, kind in self.columns.items():
            value = row[name]
            if value is None and self.key_column:
                continue
            fault = ""
            if type(value) is not kind:
                fault = f"a {type(value).__name__}, and the column is declared as {kind.__name__}"
            elif type(value) is int and value not in _INT64:
                fault = "no number of 64 bits"
            elif type(value) is str and ("\0" in value or _SURROGATES.search(value)):
                fault = "no text in UTF-8 without NUL"
            if fault:
                raise ChangedValue(
                    f"key {key!r}, column {name!r}: {_shown(value)} is {fault}: give encode=, which makes another "
                    "value, or declare another type"
                )
        return {name: row[name] for name in self.columns}

    def create(self, key: Any) -> None:
        """Create the table or directory if it is missing, before several processes write.

        Args:
            key: That of the first row.
        """
        self.source.attempt("its table or directory", lambda: self._create(key), "create")

    def _create(self, key: Any) -> None:
        """Create what is missing, if a write does not."""

    def write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk, and retry after transient errors; when this returns, the store holds it.

        Raises:
            ChangedValue: The store would hold another value; it names the key.
            SourceError: The chunk cannot be written; it names the keys.
        """
        keys = f"keys {rows[0][0]!r} to {rows[-1][0]!r}"
        self.source.attempt(keys, lambda: self._write(chunk, rows), "write")

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk once."""
        raise NotImplementedError

    def read(self, chunk: int, keys: Sequence[Any]) -> list[dict[str, Any]]:
        """The rows of a chunk, as they were written."""
        source, numbers = self.source.subset(keys), range(len(keys))
        many = getattr(source, "__getitems__", None)
        found = many(numbers) if many else [source[number] for number in numbers]
        rows = found if isinstance(source, TableSource) else [{_DATA: value} for value in found]
        return [{name: row[name] for name in self.columns} for row in rows]

    def others(self, chunks: int) -> list[str]:
        """Names of files of further chunks, which an earlier ingest of more samples has left."""
        return []

    def close(self) -> None:
        """Close the connections of this process."""
        self.source.close()


_SURROGATES = re.compile("[\ud800-\udfff]")


def _shown(value: object) -> str:
    return short(repr(value), _SHOWN)


# ---- databases ------------------------------------------------------------------------------


def _typed(*types: str) -> dict[type, str]:
    return dict(zip(_TYPES, types, strict=True))


class _TableStore(Store):
    """Rows of a table, which is created if it does not exist.

    Rows that are written are read again, and compared: a value that the table would change is refused.
    """

    types: Mapping[type, str] = {}
    """The type of a column in the database, by its declared type."""
    key_types: Mapping[type, str] = {}
    """The type of the column of the keys, by their type."""

    @property
    def key_column(self) -> str:  # type: ignore[override]
        """The column of the keys."""
        return str(self.source.key)

    def key(self, key: object) -> Any:
        """The key in this store: an integer or bytes as they are, or else a text."""
        if isinstance(key, Integral):
            return int(key)
        return key if isinstance(key, bytes) else super().key(key)

    def _definition(self, key: object) -> str:
        """The statement that creates the table for such keys."""
        of_keys = self.key_types.get(type(key), "")
        parts = [f"{quoted_column(self.source.key)} {of_keys} PRIMARY KEY"]
        for name, kind in self.columns.items():
            parts.append(f"{quoted_column(name)} {self.types.get(kind, '')}")
        return f"CREATE TABLE IF NOT EXISTS {quoted(self.source.table)} ({', '.join(parts)})"

    @property
    def _names(self) -> str:
        return ", ".join(map(quoted_column, (self.source.key, *self.columns)))

    def _insertion(self, end: str = "") -> str:
        """The statement that writes a row, key first."""
        marks = ", ".join("\0" * (1 + len(self.columns)))
        into = f"INSERT INTO {quoted(self.source.table)} ({self._names}) VALUES ({marks})"
        text: str = self.source.statement(into + end)
        return text

    def _upsert(self) -> str:
        """The same, which replaces the row of this key, and of no other unique column."""
        names = map(quoted_column, self.columns)
        given = ", ".join(f"{name} = EXCLUDED.{name}" for name in names)
        return self._insertion(
            f" ON CONFLICT ({quoted_column(self.source.key)}) DO UPDATE SET {given}"
        )

    def _selection(self, condition: str) -> str:
        """The statement that reads rows whose key meets a condition."""
        table, key = quoted(self.source.table), quoted_column(self.source.key)
        text = f"SELECT {self._names} FROM {table} WHERE {key} {condition}"
        return str(self.source.statement(text))

    def _cells(self, rows: Rows) -> list[tuple[Any, ...]]:
        """The key and the values of each row."""
        return [(key, *row.values()) for key, row in rows]

    def _compare(self, rows: Rows, found: Iterable[tuple[Any, dict[str, Any]]]) -> None:
        """Check that the table holds rows as they were written; ``found`` are those that it holds, with their keys.

        Raises:
            ChangedValue: A row is missing or changed.
        """
        there = {(type(key), key): row for key, row in found}
        for key, row in rows:
            if (type(key), key) not in there:
                raise ChangedValue(
                    f"key {key!r} would not be in the table, which changes it: give the dataset other keys, or the "
                    "table another type of key"
                )
            for name, value in row.items():
                kept = there[type(key), key][name]
                # repr() tells -0.0 from 0.0, and nan is nan.
                if type(value) is not type(kept) or repr(value) != repr(kept):
                    raise ChangedValue(
                        f"key {key!r}, column {name!r}: {_shown(value)} would be stored as {_shown(kept)}: give "
                        "encode=, which makes a value that the column can hold"
                    )


class SQLiteStore(_TableStore):
    """A table of an SQLite file; its columns have no type, so that SQLite keeps each value as it is."""

    key_types: Mapping[type, str] = {int: "INTEGER"}

    def _create(self, key: Any) -> None:
        """Create the file and the table."""
        with closing(sqlite3.connect(self.source.path, timeout=_BUSY_S)) as connection:
            connection.execute(self._definition(key))

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk in one transaction."""
        with closing(
            sqlite3.connect(self.source.path, timeout=_BUSY_S, isolation_level=None)
        ) as to:
            to.row_factory = sqlite3.Row
            to.execute("BEGIN IMMEDIATE")
            to.executemany(self._upsert(), self._cells(rows))
            select = self._selection("= \0")
            found = (to.execute(select, (key,)).fetchone() for key, _ in rows)
            self._compare(rows, [(row[0], dict(row)) for row in found if row is not None])
            to.execute("COMMIT")


class PostgresStore(_TableStore):
    """A table of a PostgreSQL database."""

    types = key_types = _typed("boolean", "bigint", "double precision", "text", "bytea")

    def _create(self, key: Any) -> None:
        """Create the table, unless it exists: then no right to create one is needed."""
        with self.source.connections.lease() as connection:
            named = connection.execute("SELECT to_regclass(%s) AS it", (quoted(self.source.table),))
            if named.fetchone()["it"] is None:
                connection.execute(self._definition(key))

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk in one transaction, its rows in a pipeline."""
        with (
            self.source.connections.lease() as connection,
            connection.transaction(),
            connection.cursor() as cursor,
        ):
            cursor.executemany(self._upsert(), self._cells(rows))
            cursor.execute(self._selection("= ANY(\0)"), ([key for key, _ in rows],))
            self._compare(rows, [(row[self.source.key], row) for row in cursor.fetchall()])


class CassandraStore(_TableStore):
    """A table of a Cassandra or ScyllaDB cluster, in a keyspace that exists."""

    types = key_types = _typed("boolean", "bigint", "double", "text", "blob")

    def _create(self, key: Any) -> None:
        """Create the table."""
        cluster, session = self.source.connect()
        try:
            session.execute(self._definition(key))
        finally:
            cluster.shutdown()

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write the rows of a chunk, many of them concurrently."""
        from cassandra.concurrent import execute_concurrent_with_args

        session = self.source.session().session
        insertion = session.prepare(self._insertion())
        execute_concurrent_with_args(session, insertion, self._cells(rows), _ROWS_IN_FLIGHT)
        keys = [key for key, _ in rows]
        self._compare(rows, zip(keys, self.read(chunk, keys), strict=True))


# ---- values by key --------------------------------------------------------------------------


class RedisStore(Store):
    """Values of a Redis or Valkey server."""

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk in one request."""
        with self.source.connections.lease() as client:
            client.mset({self.source.prefix + key: row[_DATA] for key, row in rows})


class LMDBStore(Store):
    """Values of an LMDB environment in a directory; its file is only as large as its content."""

    def key(self, key: object) -> bytes:
        """The key as bytes.

        Raises:
            ValueError: LMDB cannot have it.
        """
        found = key if isinstance(key, bytes) else super().key(key).encode()
        if not 0 < len(found) <= _LONGEST_KEY_BYTES:
            raise ValueError(
                f"key {key!r} has {len(found)} bytes: LMDB's have 1 to {_LONGEST_KEY_BYTES}"
            )
        return found

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk in one transaction; one process writes at a time, and the others wait."""
        import lmdb

        path = self.source.path
        path.mkdir(parents=True, exist_ok=True)
        with one_at_a_time():
            self.source.close()  # a process can open an environment only once
            environment = lmdb.open(str(path), map_size=_MOST_BYTES, readahead=False)
            with closing(environment), environment.begin(write=True) as to:
                for key, row in rows:
                    to.put(key, row[_DATA])


# ---- files ----------------------------------------------------------------------------------


class ObjectStore(Store):
    """An object for each sample in S3, GCS, Azure or a directory, which is created; its key is the path."""

    def key(self, key: object) -> str:
        """The key as a path.

        Raises:
            ValueError: Object stores would change the path, or refuse it.
        """
        path: str = super().key(key)
        if _CHANGED_PATH.search(f"/{path}/"):
            raise ValueError(
                f"key {key!r} is no path of an object: begin and end it without '/', and write no empty part, '.', "
                "'..' or control character"
            )
        return path

    def _create(self, key: Any) -> None:
        """Create the directory."""
        url = urlsplit(self.source.place.url)
        if url.scheme == "file":
            Path(unquote(url.path)).mkdir(parents=True, exist_ok=True)

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write the objects of a chunk, several of them concurrently."""
        import obstore

        with self.source.connections.lease() as store, ThreadPoolExecutor(_IN_FLIGHT) as threads:
            for _ in threads.map(lambda row: obstore.put(store, row[0], row[1][_DATA]), rows):
                pass


class TarStore(ObjectStore):
    """A tar file for each chunk, ``shard-000000.tar`` and so on, with the samples as members.

    :func:`~minato.sources.objects.tar_members` returns the keys to read them with.
    """

    def write(self, chunk: int, rows: Rows) -> None:
        """Write a chunk as one object."""
        to = io.BytesIO()
        with tarfile.open(fileobj=to, mode="w") as archive:
            for key, row in rows:
                info = tarfile.TarInfo(key)
                info.size = len(row[_DATA])
                archive.addfile(info, io.BytesIO(row[_DATA]))
        super().write(chunk, [(f"shard-{chunk:06d}.tar", {_DATA: to.getvalue()})])

    def others(self, chunks: int) -> list[str]:
        """Names of tar files with further numbers."""
        return _beyond(chunks, r"shard-(\d{6,})\.tar", self.source.subset(None).keys)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[dict[str, Any]]:
        """The members of a chunk's tar file."""
        (shard,) = super().read(chunk, [f"shard-{chunk:06d}.tar"])
        with tarfile.open(fileobj=io.BytesIO(shard[_DATA]), mode="r:") as archive:
            files = [archive.extractfile(key) for key in keys]
            return [{_DATA: b"" if file is None else file.read()} for file in files]


class ParquetStore(Store):
    """A directory of Parquet files of one row group, ``part-000000.parquet`` and so on, one for each chunk.

    The keys are the column ``id``.
    """

    key_column = "id"
    key = _TableStore.key

    @property
    def _directory(self) -> Path:
        files = self.source.files
        return Path(files.url if isinstance(files, Place) else files)

    def _path(self, chunk: int) -> Path:
        return self._directory / f"part-{chunk:06d}.parquet"

    def _write(self, chunk: int, rows: Rows) -> None:
        """Write a file whole, or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = dict(
            zip(
                _TYPES,
                (pa.bool_(), pa.int64(), pa.float64(), pa.string(), pa.binary()),
                strict=True,
            )
        )
        columns = {self.key_column: type(rows[0][0]), **self.columns}
        schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
        table = pa.Table.from_pylist([{self.key_column: key, **row} for key, row in rows], schema)
        self._directory.mkdir(parents=True, exist_ok=True)
        # The umask decides who may read the samples; the journal relies on the file being on the disk.
        with replacement(self._path(chunk), mode=0o666, sync=True) as file:
            pq.write_table(table, file, row_group_size=len(rows))

    def others(self, chunks: int) -> list[str]:
        """Names of files with further numbers."""
        names = os.listdir(self._directory) if self._directory.exists() else []
        return _beyond(chunks, r"part-(\d{6,})\.parquet", names)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[dict[str, Any]]:
        """The rows of a chunk's file."""
        import pyarrow.parquet as pq

        rows = {
            row.pop(self.key_column): row for row in pq.read_table(self._path(chunk)).to_pylist()
        }
        return [rows[key] for key in keys]


def _beyond(chunks: int, pattern: str, names: Iterable[str]) -> list[str]:
    """Those of names that match, with the number of a further chunk."""
    matches = [(name, re.fullmatch(pattern, name)) for name in names]
    return sorted(name for name, match in matches if match and int(match[1]) >= chunks)


# ---- URLs -----------------------------------------------------------------------------------


def open_store(
    url: str,
    table: str = "samples",
    *,
    columns: Columns | None = None,
    password: Env | None = None,
) -> Store:
    """The store that a URL names.

    Tables: ``sqlite:FILE``, ``parquet:DIRECTORY``, ``postgresql://…`` and ``cassandra://user@host:port``. Values of
    bytes: ``lmdb:DIRECTORY``, ``redis://…/0``; objects in ``file:///directory``, ``s3://``, ``gs://`` and ``az://``;
    and tar files of a chunk each, in the same places with the prefix ``tar+``.

    Args:
        table: Name of the table in a database, for Cassandra ``keyspace.table``; in Redis, the prefix of the keys.
        columns: As for :class:`Store`.
        password: The environment variable that holds the password, so that no list of processes shows it.

    Raises:
        UnknownStore: There is no such store, or its library is not installed.
        ValueError: The password in the URL contains a character that ends this part of a URL, or the store cannot have
            a column.
    """
    shown = shown_url(url)
    scheme, separator, _ = url.partition(":")
    if not separator or scheme not in _STORES:
        raise UnknownStore(f"{shown!r} names no store: begin it with one of {', '.join(_STORES)}")
    extra, kind, source_of = _STORES[scheme]
    secret = {} if password is None else {"password": password}
    try:
        module = importlib.import_module(f"minato.sources.{extra}")
    except ModuleNotFoundError as error:
        raise UnknownStore(
            f"{shown!r} needs the package {error.name!r}: pip install 'minatoloader[{extra}]'"
        ) from None
    return kind(source_of(module, url, table, secret), columns)


def _path(url: str) -> str:
    return str(Path(url.partition(":")[2]).absolute())


def _cassandra(of: Any, url: str, table: str, secret: dict[str, Any]) -> Any:
    """``cassandra://user@host:port`` and ``keyspace.table``; several hosts are separated by commas."""
    if "." not in table:
        raise UnknownStore(f"the table {table!r} has no keyspace: name it keyspace.table")
    user, _, places = urlsplit(url).netloc.rpartition("@")
    hosts = [place.partition(":")[0] for place in places.split(",")]
    port = places.rpartition(":")[2]
    settings: dict[str, Any] = {"port": int(port)} if port.isdigit() else {}
    if user:
        name, _, given = user.partition(":")
        settings.update(username=name, password=given or None)
    return of.Cassandra(hosts, table, **{**settings, **secret})


_Made = tuple[str, type[Store], Callable[[Any, str, str, dict[str, Any]], Any]]
_postgres: _Made = (
    "postgres",
    PostgresStore,
    lambda of, url, table, secret: of.Postgres(url, table, **secret),
)
_redis: _Made = (
    "redis",
    RedisStore,
    lambda of, url, table, secret: of.Redis(url, f"{table}/", **secret),
)
_objects: _Made = ("objects", ObjectStore, lambda of, url, *_: of.Objects(url))
_tars: _Made = ("objects", TarStore, lambda of, url, *_: of.Objects(url.removeprefix("tar+")))
_STORES: dict[str, _Made] = {
    "sqlite": ("sql", SQLiteStore, lambda of, url, table, _: of.SQLite(_path(url), table)),
    "parquet": ("parquet", ParquetStore, lambda of, url, *_: of.Parquet(_path(url))),
    **dict.fromkeys(("postgresql", "postgres"), _postgres),
    "cassandra": ("cassandra", CassandraStore, _cassandra),
    "lmdb": ("lmdb", LMDBStore, lambda of, url, *_: of.LMDB(_path(url))),
    **dict.fromkeys(("redis", "rediss"), _redis),
    **dict.fromkeys(("s3", "gs", "az", "file"), _objects),
    **dict.fromkeys(("tar+s3", "tar+gs", "tar+az", "tar+file"), _tars),
}
"""By scheme: module and extra of the source, the store, and the source of module, URL, table and password."""
