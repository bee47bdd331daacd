"""The interface of stores that samples are written to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar

from minato._support.text import short
from minato.sources.base import SourceError

__all__ = ["ChangedValue", "Items", "SourceStore", "Store", "check_rows", "compare_rows"]

_SHOWN = 60
"""Most characters of a value in a message."""

Items = Sequence[tuple[Any, Any]]
"""Keys with their encoded samples."""


class ChangedValue(SourceError, ValueError):
    """A store would not hold a sample as it is; the message names its key."""


def check_rows(items: Items, key_column: str, one_type: bool) -> None:
    """Check that the rows of a chunk have the same columns.

    Args:
        one_type: Whether the values of a column, None aside, must be of one type.

    Raises:
        ChangedValue: They do not, or a column is that of the key.
    """
    types: dict[str, type] = {}
    for key, row in items:
        if row.keys() != items[0][1].keys():
            raise ChangedValue(
                f"key {key!r} has the columns {list(row)}, and others {list(items[0][1])}: give encode=, which makes "
                "the same columns of all samples"
            )
        if key_column in row:
            raise ChangedValue(
                f"key {key!r} has a column {key_column!r}, which is the store's column of the keys: rename one of them"
            )
        for name, cell in row.items():
            if (
                one_type
                and cell is not None
                and types.setdefault(name, type(cell)) is not type(cell)
            ):
                raise ChangedValue(
                    f"key {key!r}, column {name!r}: {_shown(cell)} is a {type(cell).__name__}, and earlier values are "
                    f"of type {types[name].__name__}: give encode=, which makes values of one type"
                )


def compare_rows(items: Items, found: Mapping[Any, Mapping[str, Any]]) -> None:
    """Check that a store holds rows as they were written.

    Args:
        found: The rows that it holds, by their keys.

    Raises:
        ChangedValue: A row is missing or changed.
    """
    types = {key: type(key) for key in found}
    for key, row in items:
        there = found.get(key)
        if there is None or types[key] is not type(key):
            raise ChangedValue(
                f"key {key!r} would not be in the table, which changes it: give the dataset other keys, or the table "
                "another type of key"
            )
        for name, cell in row.items():
            if name not in there or not _alike(cell, there[name]):
                raise ChangedValue(
                    f"key {key!r}, column {name!r}: {_shown(cell)} would be stored as {_shown(there.get(name))}: give "
                    "encode=, which makes a value that the column can hold"
                )


def _alike(one: object, other: object) -> bool:
    # repr() tells -0.0 from 0.0, and nan is nan.
    return type(one) is type(other) and (
        one == other if isinstance(one, bytes) else repr(one) == repr(other)
    )


def _shown(value: object) -> str:
    """A value in a message, shortened."""
    return short(repr(value), _SHOWN)


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

        Raises:
            ValueError: The store cannot have this key.
        """
        if isinstance(key, Integral):
            return int(key) if self.takes_rows else f"{int(key):08d}"
        if isinstance(key, bytes) and self.takes_rows:
            return key
        try:
            text = key.decode() if isinstance(key, bytes) else str(key)
            text.encode()
        except UnicodeError:
            raise ValueError(
                f"key {key!r} is no text in UTF-8: give the dataset other keys"
            ) from None
        return text

    @abstractmethod
    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk; when this returns, the store holds it."""

    @abstractmethod
    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The samples of a chunk, as they were written."""

    def others(self, chunks: int) -> list[str]:
        """Names of files of further chunks, which an earlier ingest of more samples has left."""
        return []

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
        """Write a chunk, and retry after transient errors; errors name the keys.

        Raises:
            ChangedValue: The store would hold another value; it names the key.
            SourceError: The chunk cannot be written.
        """
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
