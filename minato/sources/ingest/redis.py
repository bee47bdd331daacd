"""Into a Redis or Valkey server."""

from __future__ import annotations

from typing import Any

from minato.sources.ingest.store import Items, SourceStore
from minato.sources.redis import Redis
from minato.sources.settings import Env

__all__ = ["RedisStore", "from_url"]


class RedisStore(SourceStore):
    """Values of a Redis server.

    Args:
        url, prefix, settings: As for :class:`~minato.sources.redis.Redis`.
    """

    def __init__(self, url: str, prefix: str = "", **settings: Any) -> None:
        super().__init__(Redis(url, prefix, **settings))

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk in one request."""
        self._trying(items, lambda: self._write(items))

    def _write(self, items: Items) -> None:
        with self.source.connections.lease() as client:
            client.mset({self.source.prefix + key: value for key, value in items})


def from_url(url: str, table: str, password: Env | None) -> Any:
    """``redis://host:port/number``; the keys begin with the table's name and a slash."""
    settings: dict[str, Any] = {} if password is None else {"password": password}
    return RedisStore(url, f"{table}/", **settings)
