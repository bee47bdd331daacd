"""Values of an LMDB file, through py-lmdb (extra ``lmdb``)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb

from minato.sources.base import KeyedSource
from minato.sources.connections import Connections
from minato.sources.retry import Retry

__all__ = ["LMDB"]

_MOST_READERS = 1024
_MOST_DATABASES = 64


class LMDB(KeyedSource):
    """Values of an LMDB environment by their keys, which are ``bytes``, without a copy.

    ``decode`` gets a read-only ``memoryview`` of the mapped file. It, and arrays that view it, stay valid until the
    source is closed. Later writes of other processes are not visible, and LMDB does not reclaim the old pages.

    Args:
        path: The environment: a directory, or a file written with ``subdir=False``.
        database: Name of a database in it; None for the default one.
        keys, retry: See :class:`KeyedSource`. Without ``keys``, all keys in LMDB's order.
        decode: Called with the value as a ``memoryview``; by default ``bytes``, which copies.
    """

    def __init__(
        self,
        path: str | Path,
        database: str | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        decode: Callable[[memoryview], Any] = bytes,
        retry: Retry | None = None,
    ) -> None:
        super().__init__(keys, decode, retry)
        self._path = Path(path).absolute()
        self._database = database
        self._environments: Connections[Any] = Connections(self._open, _close, shared=True)
        # Each lease has its own transaction, which keeps its view of the file.
        self._transactions: Connections[Any] = Connections(self._begin, _abort)

    def __repr__(self) -> str:
        return f"LMDB({str(self._path)!r})"

    def _open(self) -> Any:
        environment = _acquire(self._path)
        try:
            name = self._database.encode() if self._database else None
            return (
                self._path,
                environment,
                environment.open_db(name, create=False) if name else None,
            )
        except BaseException:
            _release(self._path)
            raise

    def _begin(self) -> Any:
        with self._environments.lease() as (_, environment, database):
            return environment.begin(db=database, buffers=True)

    def close(self) -> None:
        """Unmap the file; the next read maps it again."""
        self._transactions.close()
        self._environments.close()

    def _fetch(self, key: bytes) -> memoryview:
        with self._transactions.lease() as transaction:
            value: memoryview | None = transaction.get(key)
        if value is None:
            raise LookupError(key)
        return value

    def _list(self) -> Sequence[bytes]:
        with self._transactions.lease() as transaction:
            return [bytes(key) for key in transaction.cursor().iternext(values=False)]


def _close(opened: tuple[Path, Any, Any]) -> None:
    _release(opened[0])


def _abort(transaction: Any) -> None:
    transaction.abort()


# ---- LMDB allows a process to open an environment only once ---------------------------------

_opened: dict[Path, list[Any]] = {}
"""Environments, each with its number of users."""
_lock = threading.Lock()


def _acquire(path: Path) -> Any:
    with _lock:
        if path not in _opened:
            if not path.exists():
                raise FileNotFoundError(path)
            environment = lmdb.open(
                str(path),
                subdir=path.is_dir(),
                readonly=True,
                readahead=False,
                max_readers=_MOST_READERS,
                max_dbs=_MOST_DATABASES,
            )
            _opened[path] = [environment, 0]
        _opened[path][1] += 1
        return _opened[path][0]


def _release(path: Path) -> None:
    with _lock:
        _opened[path][1] -= 1
        if not _opened[path][1]:
            _opened.pop(path)[0].close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for environment, _ in _opened.values():
        environment.close()  # py-lmdb sees that it belongs to the parent, and only forgets it
    _opened.clear()


os.register_at_fork(after_in_child=_after_fork)
