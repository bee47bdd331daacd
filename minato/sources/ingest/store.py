"""The interface of stores that samples are written to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Any, ClassVar

__all__ = ["Items", "SourceStore", "Store"]

Items = Sequence[tuple[Any, Any]]
"""Keys with their encoded samples."""


class Store(ABC):
    """Takes chunks of samples. A chunk that is written again replaces its earlier samples.

    Like a source, it can be forked and pickled, and opens its connections in the process that writes.

    Attributes:
        takes_rows: Whether it holds dicts of columns; otherwise bytes.
    """

    takes_rows: ClassVar[bool] = False

    def key(self, key: object) -> Any:
        """The key in this store of a sample with this key or index.

        The keys in stores of bytes are strings; those in stores of rows may also be integers and bytes.
        """
        if isinstance(key, Integral):
            return int(key) if self.takes_rows else f"{key:08d}"
        if isinstance(key, bytes):
            return key if self.takes_rows else key.decode()
        return str(key)

    @abstractmethod
    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk; when this returns, the store holds it."""

    @abstractmethod
    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The samples of a chunk, as they were written."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections of this process."""


class SourceStore(Store):
    """A store that is written through the connections of the source that reads it, with the source's retries.

    Args:
        source: A :class:`~minato.sources.base.KeyedSource`.
    """

    def __init__(self, source: object) -> None:
        self.source: Any = source

    def __repr__(self) -> str:
        return repr(self.source)

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk, and retry after transient errors; errors name the keys."""
        keys = f"keys {items[0][0]!r} to {items[-1][0]!r}"
        self.source.attempt(keys, lambda: self._write(chunk, items), "write")

    @abstractmethod
    def _write(self, chunk: int, items: Items) -> None:
        """Write a chunk once."""

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The values of the keys."""
        source = self.source.subset(keys)
        if hasattr(source, "__getitems__"):
            found: list[Any] = source.__getitems__(range(len(keys)))
            return found
        return [source[number] for number in range(len(keys))]

    def close(self) -> None:
        """Close the connections of this process."""
        self.source.close()
