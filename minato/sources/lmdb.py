"""Values of an LMDB file, through py-lmdb (extra ``lmdb``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb

from minato._fork_safety import held_off_forks
from minato._support.lmdb_environments import environment, one_at_a_time
from minato.sources.base import KeyedSource, Retry
from minato.sources.connections import Connections

__all__ = ["LMDB"]

_MOST_READERS = 1024
_MOST_DATABASES = 64
_RECORD_BYTES = 48
"""Size of LMDB's record of a named database, which lies among the values of the default one."""


class LMDB(KeyedSource):
    """Values of an LMDB environment by their keys, which are ``bytes``, without a copy.

    ``decode`` gets a read-only ``memoryview`` of the mapped file. It, and arrays that view it, stay valid until the
    source is closed, and in this process alone: a forked child crashes if it reads one of its parent's, so copy values
    that a dataset keeps. Later writes of other processes are not visible, and LMDB does not reclaim the old pages.

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
        self.path = Path(path).absolute()
        self._database = database
        # Each lease has its own transaction, which keeps its view of the file. A forked child drops those of its
        # parent: py-lmdb then leaves them to the parent. With the environment it would end them for the parent, too.
        self._transactions: Connections[Any] = Connections(
            self._begin, _abort, keeps_inherited=False
        )

    def __repr__(self) -> str:
        return f"LMDB({str(self.path)!r})"

    # Leased in ``one_at_a_time`` alone, so that the locks of both are taken in one order.
    def _open(self) -> tuple[Any, Any]:
        name = self._database.encode() if self._database else None
        opened = environment(
            self.path,
            create=False,
            subdir=self.path.is_dir(),
            readonly=True,
            readahead=False,
            max_readers=_MOST_READERS,
            max_dbs=_MOST_DATABASES,
        )
        return opened, opened.open_db(name, create=False) if name else None

    def _begin(self) -> Any:
        with one_at_a_time(), self.connections.lease() as (opened, database):
            return opened.begin(db=database, buffers=True)

    def close(self) -> None:
        """Unmap the file; the next read maps it again."""
        with one_at_a_time():
            self._transactions.close()
            self.connections.close()

    def _fetch(self, key: bytes) -> memoryview:
        with held_off_forks(), self._transactions.lease() as transaction:
            value: memoryview | None = transaction.get(key)
        if value is None:
            raise LookupError(key)
        return value

    def _list(self) -> Sequence[bytes]:
        with held_off_forks(), self._transactions.lease() as transaction:
            entries = [(bytes(key), len(value)) for key, value in transaction.cursor()]
        for (key, _), (following, _) in itertools.pairwise(entries):
            if key == following:
                raise ValueError(
                    f"key {key!r} has several values, of which only the first can be read"
                )
        return [key for key, size in entries if size != _RECORD_BYTES or not self._is_database(key)]

    def _is_database(self, key: bytes) -> bool:
        """Whether a key of the default database is the name of another one."""
        if self._database is not None:
            return False
        with (
            one_at_a_time(),
            self.connections.lease() as (opened, _),
            opened.begin() as transaction,
        ):
            try:
                opened.open_db(key, txn=transaction, create=False)
            except (lmdb.IncompatibleError, lmdb.NotFoundError):
                return False
            return True


def _abort(transaction: Any) -> None:
    transaction.abort()
