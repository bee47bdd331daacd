"""The same samples in every store."""

from __future__ import annotations

import io
import os
import sqlite3
import tarfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minato.sources.base import Retry
from minato.sources.connections import Env
from tests.sources import servers

COUNT = 60
WIDTH = 8
RETRY = Retry(attempts=200, longest_s=1.0, deadline_s=100.0)


def features(i: int) -> Any:
    return np.random.default_rng(i).random(WIDTH, dtype=np.float32)


def record(i: int) -> bytes:
    return np.int64(i).tobytes() + features(i).tobytes()


def of_bytes(value: Any) -> dict[str, Any]:
    """Decodes what ``record`` made."""
    head = bytes(value[:8])
    return {
        "label": int.from_bytes(head, "little"),
        "x": np.frombuffer(value, np.float32, WIDTH, 8),
    }


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"label": row["label"], "x": np.frombuffer(bytes(row["x"]), np.float32)}


class Kind:
    """One kind of source over a store that holds ``COUNT`` samples.

    Attributes:
        key: Key of sample i.
        server: What serves it, or None.
        worker_method: What workers of a process that has read samples itself can be.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        key: Callable[[int], Any],
        decode: Callable[[Any], Any],
        server: servers.Server | None = None,
        secret: str | None = None,
        worker_method: str = "process",
    ) -> None:
        self._make = make
        self._secret = secret
        self.key = key
        self.decode = decode
        self.server = server
        self.absent = key(10**6)
        self.worker_method = worker_method

    @property
    def has_secrets(self) -> bool:
        return self._secret is not None

    def source(self, keys: Sequence[Any] | None = None, **arguments: Any) -> Any:
        return self._make(keys=keys, **{"decode": self.decode, "retry": RETRY, **arguments})

    def source_from_environment(self, variable: str, **arguments: Any) -> Any:
        """The same with the secret from the named variable."""
        assert self._secret is not None
        return self.source(**{self._secret: Env(variable)}, **arguments)


def name_of(i: int) -> str:
    return f"sample-{i:07d}"


def same(i: int) -> int:
    return i


# ---- how each is made -----------------------------------------------------------------------


def sqlite(folder: Path, _: ExitStack) -> Kind:
    from minato.sources.sql import SQLite

    path = folder / "samples.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, label INTEGER, x BLOB)")
        rows = [(i, i, features(i).tobytes()) for i in range(COUNT)]
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
    return Kind(partial(SQLite, path, "samples"), same, of_row)


def cassandra(folder: Path, stack: ExitStack) -> Kind:
    """One node of our own."""
    server, settings = servers.cassandra_server(folder)
    stack.callback(server.kill)
    server.start()
    servers.make_role(settings)
    return _cassandra(settings, server)


def cassandra_cluster(_folder: Path, _stack: ExitStack) -> Kind:
    """A cluster of somebody's, whose tables in the keyspace ``minato`` may be made and overwritten."""
    host, _, port = os.environ["MINATO_TEST_CASSANDRA"].rpartition(":")
    return _cassandra({"hosts": [host], "port": int(port)}, None)


def _cassandra(settings: dict[str, Any], server: servers.Server | None) -> Kind:
    from minato.sources.cassandra import Cassandra

    filling = Cassandra(table="minato.samples", **settings)
    cluster, session = filling.connect()
    session.execute(
        "CREATE KEYSPACE IF NOT EXISTS minato WITH replication = "
        "{'class': 'SimpleStrategy', 'replication_factor': 1}"
    )
    session.execute(
        'CREATE TABLE IF NOT EXISTS "minato"."samples" (id bigint PRIMARY KEY, label bigint, x blob)'
    )
    insert = session.prepare('INSERT INTO "minato"."samples" ("id", "label", "x") VALUES (?, ?, ?)')
    for i in range(COUNT):
        session.execute(insert, (i, i, features(i).tobytes()))
    cluster.shutdown()
    make = partial(Cassandra, table="minato.samples", **settings)
    return Kind(make, same, of_row, server, "password" if "password" in settings else None)


def files(folder: Path, _: ExitStack) -> Kind:
    from minato.sources.files import Files

    _write_files(folder)
    return Kind(partial(Files, str(folder)), name_of, of_bytes)


def folder(folder: Path, _: ExitStack) -> Kind:
    from minato.sources.objects import Objects

    _write_files(folder)
    return Kind(partial(Objects, f"file://{folder}"), name_of, of_bytes, worker_method="thread")


def parquet(folder: Path, _: ExitStack) -> Kind:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from minato.sources.parquet import Parquet

    for first in range(0, COUNT, 20):
        numbers = range(first, first + 20)
        columns = {"label": list(numbers), "x": [features(i).tobytes() for i in numbers]}
        pq.write_table(pa.table(columns), folder / f"{first:03d}.parquet", row_group_size=7)
    return Kind(partial(Parquet, folder), same, of_row)


def _write_files(folder: Path) -> None:
    for i in range(COUNT):
        (folder / name_of(i)).write_bytes(record(i))


def s3(folder: Path, stack: ExitStack) -> Kind:
    import obstore

    from minato.sources.objects import Objects

    storage, server, settings = servers.s3_servers(folder)
    for one in (storage, server):
        stack.callback(one.stop)
        one.start()
    store = servers.s3_store(settings)
    for i in range(COUNT):
        obstore.put(store, f"train/{name_of(i)}", record(i))
    obstore.put(store, "shards/first.tar", records_tar(COUNT))
    plain = {"client_options": {"allow_http": True}}

    def make(url: str = "s3://minato/train", **given: Any) -> Any:
        return Objects(url, **{**plain, **settings, **given})

    return Kind(make, name_of, of_bytes, server, "secret_access_key", worker_method="thread")


def tar_of(members: Iterable[tuple[str, bytes]]) -> bytes:
    to = io.BytesIO()
    with tarfile.open(fileobj=to, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return to.getvalue()


def records_tar(count: int) -> bytes:
    return tar_of((f"{name_of(i)}.bin", record(i)) for i in range(count))


KINDS = {make.__name__: make for make in (sqlite, parquet, folder, files, cassandra, s3)}
if os.environ.get("MINATO_TEST_CASSANDRA"):
    KINDS["cassandra_cluster"] = cassandra_cluster
