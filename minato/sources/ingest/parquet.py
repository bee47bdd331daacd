"""Into Parquet files, a file of one row group for each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from minato._support.files import replacement
from minato.sources.ingest.encoding import as_row
from minato.sources.ingest.store import Items, Store
from minato.sources.settings import Env

__all__ = ["ParquetStore", "from_url"]


class ParquetStore(Store):
    """A folder of Parquet files, ``part-000000.parquet`` and so on.

    Args:
        folder: Made if there is none.
        key: Name of the column of the keys.
    """

    takes_rows = True

    def __init__(self, folder: str | Path, key: str = "id") -> None:
        self._folder = Path(folder).absolute()
        self._key = key

    def __repr__(self) -> str:
        return f"ParquetStore({str(self._folder)!r})"

    def _path(self, chunk: int) -> Path:
        return self._folder / f"part-{chunk:06d}.parquet"

    def write(self, chunk: int, items: Items) -> None:
        """Write a file under another name, and give it its own when it is whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([{self._key: key, **row} for key, row in items])
        path = self._path(chunk)
        # Others may read what is ingested, if the umask lets them; the journal relies on files being on the disk.
        with replacement(path, mode=0o666, sync=True) as file:
            pq.write_table(table, file, row_group_size=max(len(items), 1))

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The rows of a chunk's file."""
        rows = {row.pop(self._key): row for row in pq.read_table(self._path(chunk)).to_pylist()}
        return [as_row(rows[key]) for key in keys]

    def close(self) -> None:
        """Nothing is left open."""


def from_url(url: str, table: str, password: Env | None) -> Any:
    """``parquet:FOLDER``."""
    return ParquetStore(url.partition(":")[2])
