"""Values of a Redis or Valkey server, through redis-py (extra ``redis``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import redis

from minato.sources.base import BatchedSource, Retry
from minato.sources.connections import Place, Settings, without_password

__all__ = ["Redis"]

_SCAN_COUNT = 10_000
_CLIENT_INFO = (
    ["driver_info"]
    if "driver_info" in signature(redis.Redis.__init__).parameters
    else ["lib_name", "lib_version"]
)
_TERSE: dict[str, Any] = {"protocol": 2, **dict.fromkeys(_CLIENT_INFO)}
"""A new connection neither negotiates the protocol nor sends the client's name: each would cost a round trip."""


class Redis(BatchedSource):
    """Values of a Redis server, as ``bytes``, by their keys.

    A batch of keys is one ``MGET``. With ``fetch_concurrency`` samples are fetched one by one instead.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; a password in it is kept secret.
        prefix: Prefix of all keys in the store; the keys of samples do not contain it.
        keys, retry: See :class:`KeyedSource`. Without ``keys`` they are scanned and sorted.
        decode: Called with the value, as ``bytes``.
        settings: Further arguments of ``redis.Redis.from_url`` (``password``, ``ssl_ca_certs``, ``socket_timeout`` …),
            each of them a value or an :class:`~minato.sources.connections.Env`.
    """

    transient = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError)

    def __init__(
        self,
        url: str,
        prefix: str = "",
        *,
        keys: Sequence[str] | None = None,
        decode: Callable[[bytes], Any] | None = None,
        retry: Retry | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(keys, decode, retry)
        rest, password = without_password(url)
        self.place = Place(rest)
        if password is not None:
            settings.setdefault("password", password)
        self.prefix = prefix
        self.settings = Settings(settings)

    def __repr__(self) -> str:
        return f"Redis({self.place!r}, prefix={self.prefix!r})"

    def _is_transient(self, error: Exception) -> bool:
        # redis-py raises a ConnectionError for a wrong password.
        return super()._is_transient(error) and not isinstance(error, redis.AuthenticationError)

    def _open(self) -> redis.Redis:  # of which all threads share one, with its pool of connections
        return redis.Redis.from_url(self.place.url, **{**_TERSE, **self.settings.values()})

    def _close_one(self, connection: redis.Redis) -> None:
        connection.close()

    def _fetch(self, key: str) -> bytes:
        with self.connections.lease() as client:
            value: Any = client.get(self.prefix + key)
        if value is None:
            raise LookupError(key)
        return bytes(value)

    def _fetch_all(self, keys: list[str]) -> list[bytes | None]:
        """One request."""
        with self.connections.lease() as client:
            values: Any = client.mget([self.prefix + key for key in keys])
        return list(values)

    def _list(self) -> Sequence[str]:
        with self.connections.lease() as client:
            pattern = _literal(self.prefix) + "*"
            # A scan may return a key twice.
            found = set(client.scan_iter(match=pattern, count=_SCAN_COUNT))
        start = len(self.prefix.encode())
        return sorted(key[start:].decode() for key in found)


def _literal(text: str) -> str:
    """A text as a pattern that matches only it."""
    return "".join("\\" + letter if letter in "\\*?[]" else letter for letter in text)
