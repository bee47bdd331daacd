"""What all sources of samples by key have in common."""

from __future__ import annotations

import asyncio
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.utils.data import Dataset

from minato._support.counters import Counters
from minato._support.text import printable
from minato.errors import MinatoError
from minato.sources.retry import Retry

__all__ = ["KeyedSource", "MissingKey", "SourceError", "TruncatedObject"]


class SourceError(MinatoError):
    """A source could not give a sample; the message names its key, and the cause is the library's own error."""


class MissingKey(SourceError, KeyError):
    """The source has no sample under this key."""

    __str__ = Exception.__str__  # KeyError would quote it


class TruncatedObject(SourceError):
    """Less came than there should be."""


class KeyedSource(Dataset[Any], ABC):
    """A map-style dataset of samples that lie under keys elsewhere: ``source[i]`` is the sample of ``source.keys[i]``.

    Sources can be forked, pickled and used by several threads; each process opens its own connections when it reads
    its first sample.

    Args:
        keys: Which samples, in this order; None for all there are, which are listed when they are first needed.
        decode: Makes the sample of what the store holds; what that is, each source says.
        retry: What to do when a read fails that may succeed a moment later.
    """

    transient: ClassVar[tuple[type[BaseException], ...]] = (ConnectionError, TimeoutError)
    """Errors of the library that may have passed when the read is tried again."""

    def __init__(
        self,
        keys: Sequence[Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._keys = keys
        self._decode = decode
        self.retry = retry or Retry()
        self.counters = Counters("retries")
        """For reports of the loaders that read it."""

    # ---- what a source must give ------------------------------------------------------------

    @abstractmethod
    def _fetch(self, key: Any) -> Any:
        """What the store holds under a key. Raises LookupError if there is nothing."""

    @abstractmethod
    def _list(self) -> Sequence[Any]:
        """All keys of the store."""

    def _may_pass(self, error: Exception) -> bool:
        """Whether a further try may do what this one could not."""
        return isinstance(error, self.transient)

    def _in_words(self, error: Exception) -> str:
        """What the library says."""
        return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the connections of this process; the next read opens new ones."""

    # ---- what all have ----------------------------------------------------------------------

    @property
    def keys(self) -> Sequence[Any]:
        """The keys of the samples, in the order of their indices."""
        if self._keys is None:
            self._keys = self._trying("the list of keys", self._list)
        return self._keys

    @property
    def retries(self) -> int:
        """How often reads were tried again, in all processes."""
        return self.counters.totals()[0]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        return self.get(self.keys[index])

    def get(self, key: Any) -> Any:
        """Read the sample under a key.

        Raises:
            MissingKey: There is none.
            SourceError: It could not be read, or decoded.
        """
        return self._decoded(key, self._trying(f"key {key!r}", lambda: self._fetch(key)))

    def subset(self, keys: Sequence[Any]) -> Any:
        """The same source with other keys, for instance those of a split."""
        other = copy.copy(self)
        other._keys = keys
        return other

    def __fingerprint__(self) -> dict[str, Any]:
        """What caches know the source by: also by its keys, listed now if need be, as they say what an index means."""
        return {**vars(self), "_keys": self.keys, "retry": None}

    def _trying(self, what: str, read: Callable[[], Any], verb: str = "read") -> Any:
        """Read, or write, again and again if need be; errors name what it was about."""
        with self._named(what, verb):
            pauses = self.retry.pauses()
            while True:
                try:
                    return read()
                except Exception as error:
                    pause_s = next(pauses, None) if self._may_pass(error) else None
                    if pause_s is None:
                        raise
                self.counters.add(retries=1)
                time.sleep(pause_s)

    async def _trying_later(self, what: str, read: Callable[[], Awaitable[Any]]) -> Any:
        """The same with coroutines."""
        with self._named(what):
            pauses = self.retry.pauses()
            while True:
                try:
                    return await read()
                except Exception as error:
                    pause_s = next(pauses, None) if self._may_pass(error) else None
                    if pause_s is None:
                        raise
                self.counters.add(retries=1)
                await asyncio.sleep(pause_s)

    @contextmanager
    def _named(self, what: str, verb: str = "read") -> Iterator[None]:
        """Turn the library's errors into ours, which say what was to be done."""
        started = time.monotonic()
        try:
            yield
        except SourceError as error:
            if what not in str(error):  # which part of a source it was, and not for which key
                raise SourceError(f"{self!r} cannot {verb} {what}: {error}") from error.__cause__
            raise
        except LookupError as error:
            raise MissingKey(f"{self!r} has no {what}") from error
        except Exception as error:
            spent_s = time.monotonic() - started
            given_up = f" after {spent_s:.1f} s of tries" if self._may_pass(error) else ""
            raise SourceError(
                f"{self!r} cannot {verb} {what}{given_up}: {printable(self._in_words(error), lines=True)}"
            ) from error

    def _decoded(self, key: Any, value: Any) -> Any:
        if self._decode is None:
            return value
        try:
            return self._decode(value)
        except Exception as error:
            raise SourceError(
                f"{self!r} cannot decode key {key!r}: {type(error).__name__}: {printable(str(error), lines=True)}"
            ) from error
