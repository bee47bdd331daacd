"""Stores of bytes by their keys: Redis, LMDB."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minato.sources.connections import Connections
from minato.sources.ingest.store import Items, SourceStore

__all__ = ["LMDBStore", "RedisStore"]

_LONGEST_KEY_BYTES = 511


class RedisStore(SourceStore):
    """Values of a Redis or Valkey server.

    Args:
        url, prefix, settings: As for :class:`~minato.sources.redis.Redis`.
    """

    def __init__(self, url: str, prefix: str = "", **settings: Any) -> None:
        from minato.sources.redis import Redis

        super().__init__(Redis(url, prefix, **settings))

    def _write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one request."""
        with self.source.connections.lease() as client:
            client.mset({self.source.prefix + key: value for key, value in items})


class LMDBStore(SourceStore):
    """An LMDB environment in a directory.

    Args:
        path: The directory; created if it does not exist.
        map_size_bytes: The largest size of the database. The file is only as large as its content.
    """

    def __init__(self, path: str | Path, map_size_bytes: int = 1 << 40) -> None:
        from minato.sources.lmdb import LMDB

        super().__init__(LMDB(path))
        self._path = Path(path).absolute()
        self._map_size_bytes = map_size_bytes
        self._environments: Connections[Any] = Connections(self._open, _close, shared=True)

    def _open(self) -> Any:
        import lmdb

        self._path.mkdir(parents=True, exist_ok=True)
        return lmdb.open(str(self._path), map_size=self._map_size_bytes, readahead=False)

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

    def _write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one transaction; one process writes at a time, and the others wait."""
        with self._environments.lease() as environment, environment.begin(write=True) as to:
            for key, value in items:
                to.put(key, value)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The values of the keys, read from the environment for writing: a process can open only one."""
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
