"""The base classes of all sources that read samples by key, their errors, and how reads are repeated."""

from __future__ import annotations

import asyncio
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from minato._support.counters import Counters
from minato._support.values import items_of, message_of, plain, printable
from minato.checks import refuse_one
from minato.errors import MinatoError, is_lost_connection
from minato.options import Retry
from minato.sources.connections import Connections, Settings, shown_text

__all__ = ["BatchedSource", "KeyedSource", "MissingKey", "Retry", "SourceError", "TruncatedObject"]

Row: TypeAlias = dict[str, Any]
"""The columns of a row by their names."""


class SourceError(MinatoError):
    """A source cannot read a sample; the message names its key, and the cause is the library's own error."""


class MissingKey(SourceError, KeyError):
    """The source has no sample under this key."""

    __str__ = Exception.__str__  # KeyError would quote it


class TruncatedObject(SourceError):
    """A value is shorter than the store says."""


class KeyedSource(Dataset[Any], ABC):
    """A map-style dataset over a store with keys: ``source[i]`` is the sample of ``source.keys[i]``.

    Sources can be forked, pickled and used by several threads. Each process opens its own connections when it reads
    its first sample.

    Args:
        keys: The keys of the samples, in the order of their indices: a list, an array, a tensor or a column of a table.
            None for all in the store, which are listed at first use.
        decode: Returns the sample for a value of the store; each source documents the type of its values.
        retry: How often, and for how long, reads are repeated after transient errors.

    Attributes:
        settings: Arguments for the library that opens the connections, secrets included.
        connections: Those of this process.
    """

    transient: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors of the library after which a read is repeated; without any: those of a lost connection."""
    shared: ClassVar[bool] = True
    """Whether all threads share a connection; otherwise each read in flight has its own."""
    settings: Settings = Settings({})

    def __init__(
        self,
        keys: Sequence[object] | None = None,
        decode: Callable[[Any], object] | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._keys = _by_position(keys)
        self._decode = decode
        self.retry = Retry.given(retry)
        self.counters = Counters("retries")
        """Shown in the report of a loader."""
        self.connections: Connections[Any] = Connections(
            self.open_connection, self.close_connection, self.shared
        )

    # ---- what a subclass implements ---------------------------------------------------------

    @abstractmethod
    def read_value(self, key: Any) -> Any:
        """The value of a key. Raises LookupError if the store does not have the key."""

    @abstractmethod
    def list_keys(self) -> Sequence[Any]:
        """All keys of the store."""

    def open_connection(self) -> Any:
        """Open a connection, unless the store has none."""

    def close_connection(self, connection: Any) -> None:
        """Close a connection, unless it closes when it is collected."""

    def is_transient(self, error: Exception) -> bool:
        """Whether to repeat a read that raised this."""
        return isinstance(error, self.transient) if self.transient else is_lost_connection(error)

    def describe_error(self, error: Exception) -> str:
        """The text of an error of the library, for messages."""
        return f"{type(error).__name__}: {message_of(error)}"

    # ---- what all sources share -------------------------------------------------------------

    def close(self) -> None:
        """Close the connections of this process; the next read opens new ones."""
        self.connections.close()

    @property
    def keys(self) -> Sequence[Any]:
        """The keys of the samples, in the order of their indices."""
        if self._keys is None:
            self._keys = self.attempt("the list of keys", self.list_keys)
        return self._keys

    @property
    def retries(self) -> int:
        """Number of repeated reads, in all processes."""
        return self.counters.totals()[0]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        return self.get(self.keys[index])

    def key_at(self, index: int) -> object:
        """The key of a sample, as the store's library takes it."""
        return _python_key(self.keys[index])

    def get(self, key: object) -> Any:
        """Read the sample under a key; MissingKey: there is none; SourceError: it cannot be read or decoded."""
        key = _python_key(key)
        return self.decoded(key, self.attempt(f"key {key!r}", lambda: self.read_value(key)))

    def subset(self, keys: Sequence[object]) -> Any:
        """The same source with other keys, for instance those of a split."""
        other = copy.copy(self)
        other._keys = _by_position(keys)
        return other

    def __fingerprint__(self) -> dict[str, Any]:
        """What identifies the source to a cache. Its keys are part of it, as they define the meaning of an index."""
        return {**vars(self), "_keys": self.keys}

    def attempt(self, subject: str, call: Callable[[], object]) -> Any:
        """Call a function that reads, again after transient errors; SourceError: it failed; names the subject."""
        with self._explained(subject):
            return self.retry.call(call, self.is_transient, self.counters)

    async def attempt_async(self, subject: str, call: Callable[[], Awaitable[object]]) -> Any:
        """:meth:`attempt` with a coroutine function that reads."""
        with self._explained(subject):
            pauses = self.retry.pauses()
            while True:
                try:
                    return await call()
                except Exception as error:
                    if not self.is_transient(error) or (pause_s := next(pauses, None)) is None:
                        raise
                self.counters.add(retries=1)
                await asyncio.sleep(pause_s)

    @contextmanager
    def _explained(self, subject: str) -> Iterator[None]:
        """Turn the library's errors into ours, which name the subject."""
        started = time.monotonic()
        try:
            yield
        except SourceError as error:
            if subject not in str(error):  # it names a part of the source, but not the key
                error.args = (f"{self!r} cannot read {subject}: {error}",)
            raise
        except LookupError as error:
            raise MissingKey(f"{self!r} has no {subject}") from error
        except Exception as error:
            spent_s = time.monotonic() - started
            given_up = f" after {spent_s:.1f} s of tries" if self.is_transient(error) else ""
            said = printable(shown_text(self.describe_error(error)), lines=True)
            raise SourceError(f"{self!r} cannot read {subject}{given_up}: {said}") from error

    def decoded(self, key: object, value: object) -> Any:
        """The sample of a value; raises like :meth:`get`."""
        if self._decode is None:
            return value
        try:
            return self._decode(value)
        except Exception as error:
            said = f"{type(error).__name__}: {printable(message_of(error), lines=True)}"
            raise SourceError(f"{self!r} cannot decode key {key!r}: {said}") from error


class BatchedSource(KeyedSource):
    """A source that reads the samples of a batch together."""

    @abstractmethod
    def read_values(self, keys: list[object]) -> Sequence[Any]:
        """The value of each key; None where it is missing, or where its read failed alone."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        keys = list(map(self.key_at, indices))
        if not keys:
            return []
        values = self.attempt(f"keys {keys[0]!r} …", lambda: self.read_values(keys))
        return self.all_decoded(keys, values)

    def all_decoded(self, keys: Sequence[object], values: Sequence[object]) -> list[Any]:
        """The samples of values; raises like :meth:`get`."""
        # A key without a value is read alone, with retries and with errors that name it.
        return [
            self.get(key) if value is None else self.decoded(key, value)
            for key, value in zip(keys, values, strict=True)
        ]


def _by_position(keys: Sequence[object] | None) -> Sequence[object] | None:
    """Keys that an index finds by their position, not by a label as pandas does; an array is not copied."""
    refuse_one("keys", keys)
    by_position = keys is None or isinstance(keys, (Sequence, np.ndarray, torch.Tensor))
    return keys if by_position else items_of("keys", keys)


def _python_key(key: object) -> object:
    """A key as the stores' libraries take it, which do not know the values of NumPy and torch."""
    return plain(key) if isinstance(key, (np.generic, np.ndarray, torch.Tensor)) else key
