"""Where samples are written to."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, ClassVar

from minato.sources.base import KeyedSource
from minato.sources.settings import Env, shown_url

__all__ = ["SourceStore", "Store", "Unknown", "open_store"]

Items = Sequence[tuple[Any, Any]]
"""Keys, and what is to lie under them."""


class Unknown(ValueError):
    """A URL names no store that can be written; the message says what could be."""


class Store(ABC):
    """Takes chunks of samples. What is written again replaces what was there, so that nothing is there twice.

    Like a source, it can be forked and pickled, and opens its connections in the process that writes.

    Attributes:
        takes_rows: Whether it holds dicts of columns; otherwise bytes.
    """

    takes_rows: ClassVar[bool] = False

    def key(self, key: Any) -> Any:
        """The key in this store of a sample that has one, or of which only the number is known.

        Stores of bytes have text for keys; stores of rows have numbers and bytes too.
        """
        if isinstance(key, Integral):
            return int(key) if self.takes_rows else f"{key:08d}"
        if isinstance(key, bytes):
            return key if self.takes_rows else key.decode()
        return str(key)

    @abstractmethod
    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk; it is there when this returns."""

    @abstractmethod
    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """What lies under the keys of a chunk."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections of this process."""


class SourceStore(Store):
    """A store that a source reads by its keys, and through whose connections it is written."""

    def __init__(self, source: Any) -> None:
        self.source: Any = source

    def __repr__(self) -> str:
        return repr(self.source)

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """What lies under the keys."""
        source = self.source.subset(keys)
        if hasattr(source, "__getitems__"):
            found: list[Any] = source.__getitems__(range(len(keys)))
            return found
        return [source[number] for number in range(len(keys))]

    def _trying(self, items: Items, write: Callable[[], Any]) -> None:
        """Write with the source's tries; errors name the keys."""
        source: KeyedSource = self.source
        source._trying(f"keys {items[0][0]!r} to {items[-1][0]!r}", write, "write")

    def close(self) -> None:
        """Close the connections of this process."""
        self.source.close()


_MODULES = {
    "sqlite": "sqlite",
    "lmdb": "lmdb",
    "parquet": "parquet",
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "cassandra": "cassandra",
    **dict.fromkeys(["s3", "gs", "az", "file"], "objects"),
    **dict.fromkeys(["tar+s3", "tar+gs", "tar+az", "tar+file"], "objects"),
}


def open_store(url: str, table: str = "samples", password: Env | None = None) -> Store:
    """The store that a URL names.

    ``sqlite:FILE``, ``lmdb:FOLDER``, ``parquet:FOLDER``, ``postgresql://…``, ``redis://…/0``,
    ``cassandra://user@host:port``, objects in ``file:///folder``, ``s3://``, ``gs://`` and ``az://``, and with
    ``tar+`` before these, tar files of a chunk each.

    Args:
        table: Its name in a database, for Cassandra ``keyspace.table``; in Redis, what the keys begin with.
        password: The environment variable that holds one, which does not show itself in a list of processes.

    Raises:
        Unknown: There is no such store, or its library is not installed.
        ValueError: The password in the URL holds a character that ends this part of a URL.
    """
    shown = shown_url(url)
    scheme = url.partition(":")[0]
    if ":" not in url or scheme not in _MODULES:
        raise Unknown(f"{shown!r} names no store: begin it with one of {', '.join(_MODULES)}")
    name = _MODULES[scheme]
    try:
        module = importlib.import_module(f"minato.sources.ingest.{name}")
    except ModuleNotFoundError as error:
        raise Unknown(
            f"{shown!r} needs the package {error.name!r}: pip install 'minatoloader[{name}]'"
        ) from None
    store: Store = module.from_url(url, table, password)
    return store
