"""Stores of files: objects, tar files, Parquet files."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from minato._support.files import replacement
from minato.sources.ingest.store import (
    ChangedValue,
    Items,
    SourceStore,
    Store,
    check_rows,
    compare_rows,
)

__all__ = ["ObjectStore", "ParquetStore", "TarStore"]

_CHANGED = re.compile(r"//|/\.\.?/|[\x00-\x1f\x7f]")
"""In a path between two slashes: obstore would leave it out, or refuse it."""
_SHARD = re.compile(r"shard-(\d{6,})\.tar")
_PART = re.compile(r"part-(\d{6,})\.parquet")
_IN_FLIGHT = 16
"""Most objects of a chunk that are in flight."""


class ObjectStore(SourceStore):
    """An object for each sample in S3, GCS, Azure or a directory; its key is the path.

    Args:
        url, settings: As for :class:`~minato.sources.objects.Objects`. A directory is created if it does not exist.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        from minato.sources.objects import Objects

        super().__init__(Objects(url, **settings))

    def key(self, key: object) -> str:
        """The key as a path.

        Raises:
            ValueError: Object stores would change the path, or refuse it.
        """
        path: str = super().key(key)
        if _CHANGED.search(f"/{path}/"):
            raise ValueError(
                f"key {key!r} is no path of an object: begin and end it without '/', and write no empty part, '.', "
                "'..' or control character"
            )
        return path

    def _write(self, chunk: int, items: Items) -> None:
        """Write the objects of a chunk, several of them concurrently."""
        import obstore

        url = self.source.place.url
        if url.startswith("file://"):
            Path(unquote(urlsplit(url).path)).mkdir(parents=True, exist_ok=True)
        with self.source.stores.lease() as store, ThreadPoolExecutor(_IN_FLIGHT) as threads:
            for _ in threads.map(lambda item: obstore.put(store, *item), items):
                pass


class TarStore(ObjectStore):
    """A tar file for each chunk, ``shard-000000.tar`` and so on, with the samples as members.

    :func:`~minato.sources.objects.tar_members` returns the keys to read them with.

    Args:
        url, settings: As for :class:`~minato.sources.objects.Objects`. A directory is created if it does not exist.
    """

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk as one object."""
        to = io.BytesIO()
        with tarfile.open(fileobj=to, mode="w") as archive:
            for key, value in items:
                info = tarfile.TarInfo(key)
                info.size = len(value)
                archive.addfile(info, io.BytesIO(value))
        super().write(chunk, [(_shard(chunk), to.getvalue())])

    def others(self, chunks: int) -> list[str]:
        """Names of tar files with further numbers."""
        return _beyond(self.source.subset(None).keys, _SHARD, chunks)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The members of a chunk's tar file."""
        (data,) = super().read(chunk, [_shard(chunk)])
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            files = [archive.extractfile(key) for key in keys]
            return [b"" if file is None else file.read() for file in files]


def _beyond(names: Iterable[str], pattern: re.Pattern[str], chunks: int) -> list[str]:
    matches = [(name, pattern.fullmatch(name)) for name in names]
    return sorted(name for name, match in matches if match and int(match[1]) >= chunks)


def _shard(chunk: int) -> str:
    return f"shard-{chunk:06d}.tar"


class ParquetStore(Store):
    """A directory of Parquet files of one row group, ``part-000000.parquet`` and so on, one for each chunk.

    Args:
        directory: Created if it does not exist.
        key: Name of the column of the keys.
    """

    takes_rows = True

    def __init__(self, directory: str | Path, key: str = "id") -> None:
        import pyarrow.parquet  # noqa: F401  (a missing package is an error now, not in a worker)

        self._directory = Path(directory).absolute()
        self._key = key

    def __repr__(self) -> str:
        return f"ParquetStore({str(self._directory)!r})"

    def _path(self, chunk: int) -> Path:
        return self._directory / f"part-{chunk:06d}.parquet"

    def write(self, chunk: int, items: Items) -> None:
        """Write a file whole, or not at all.

        Raises:
            ChangedValue: A row has other columns, or a value of another type, than the others and the first file.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        check_rows(items, self._key, one_type=True)
        rows = [{self._key: key, **row} for key, row in items]
        types = {
            bool: pa.bool_(),
            int: pa.int64(),
            float: pa.float64(),
            str: pa.string(),
            bytes: pa.binary(),
        }
        kinds = {name: {type(row[name]) for row in rows} - {type(None)} for name in rows[0]}
        schema = pa.schema(
            [(name, types[kind.pop()] if kind else pa.null()) for name, kind in kinds.items()]
        )
        if chunk and self._path(0).exists():
            self._check_schema(schema, pq.read_schema(self._path(0)), items)
        table = pa.Table.from_pylist(rows, schema)
        found = {row.pop(self._key): row for row in table.to_pylist()}
        compare_rows(items, found)
        self._directory.mkdir(parents=True, exist_ok=True)
        # The umask decides who may read the samples; the journal relies on the file being on the disk.
        with replacement(self._path(chunk), mode=0o666, sync=True) as file:
            pq.write_table(table, file, row_group_size=max(len(items), 1))

    def _check_schema(self, schema: Any, first: Any, items: Items) -> None:
        """Refuse columns that differ from the first file's; one of only None fits all."""
        keys = f"keys {items[0][0]!r} to {items[-1][0]!r}"
        if schema.names != first.names:
            raise ChangedValue(
                f"{keys} have the columns {schema.names}, and {self._path(0)} has {first.names}: give encode=, which "
                "makes the same columns of all samples"
            )
        for name in schema.names:
            types = {str(schema.field(name).type), str(first.field(name).type)}
            if len(types - {"null"}) > 1:
                raise ChangedValue(
                    f"{keys}, column {name!r}: its values are of type {schema.field(name).type}, and those in "
                    f"{self._path(0)} of type {first.field(name).type}: give encode=, which makes values of one type"
                )

    def others(self, chunks: int) -> list[str]:
        """Names of files with further numbers."""
        names = os.listdir(self._directory) if self._directory.exists() else []
        return _beyond(names, _PART, chunks)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The rows of a chunk's file."""
        import pyarrow.parquet as pq

        rows = {row.pop(self._key): row for row in pq.read_table(self._path(chunk)).to_pylist()}
        return [rows[key] for key in keys]

    def close(self) -> None:
        """Nothing is open."""
