"""Into an LMDB environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

from minato.sources.connections import Connections
from minato.sources.ingest.store import Items, SourceStore
from minato.sources.lmdb import LMDB
from minato.sources.settings import Env

__all__ = ["LMDBStore", "from_url"]


class LMDBStore(SourceStore):
    """An LMDB environment in a folder.

    Args:
        path: The folder; made if there is none.
        map_size_bytes: What it may take at most. The file is only as large as what it holds.
    """

    def __init__(self, path: str | Path, map_size_bytes: int = 1 << 40) -> None:
        super().__init__(LMDB(path))
        self._path = Path(path).absolute()
        self._map_size_bytes = map_size_bytes
        self._environments: Connections[Any] = Connections(self._open, _close, shared=True)

    def _open(self) -> Any:
        self._path.mkdir(parents=True, exist_ok=True)
        return lmdb.open(str(self._path), map_size=self._map_size_bytes, readahead=False)

    def key(self, key: Any) -> bytes:
        """The key as bytes."""
        return bytes(super().key(key), "utf-8")

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one transaction; one process writes at a time, and the others wait."""
        self._trying(items, lambda: self._write(items))

    def _write(self, items: Items) -> None:
        with self._environments.lease() as environment, environment.begin(write=True) as to:
            for key, value in items:
                to.put(key, value)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """What lies under the keys; by the environment that is open, as LMDB allows a process only one."""
        with self._environments.lease() as environment, environment.begin() as view:
            found = [view.get(key) for key in keys]
        if None in found:
            raise LookupError(keys[found.index(None)])
        return found

    def close(self) -> None:
        """Close the environment in this process."""
        self._environments.close()


def _close(environment: Any) -> None:
    environment.close()


def from_url(url: str, table: str, password: Env | None) -> Any:
    """``lmdb:FOLDER``."""
    return LMDBStore(url.partition(":")[2])
