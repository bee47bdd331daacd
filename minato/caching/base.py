"""The base class of all caches, their counters, and a cache in the memory of one process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from minato._fork_safety import renew_in_children
from minato._support.counters import Counters
from minato._support.pickling import ViewPickler
from minato._support.text import message_of, printable
from minato.errors import MinatoWarning, warn

__all__ = ["Cache", "CacheReport", "MemoryCache"]

_DIGEST_NBYTES = 16


class CacheReport(NamedTuple):
    """Counters of a cache since its creation, over all processes.

    Attributes:
        hits: Samples found in the cache.
        misses: Samples not found, or damaged.
        damaged: Samples found with invalid content.
        errors: Reads and writes that failed because of the disk, and samples that cannot be pickled.
        full: Samples not stored because of the quota.
        stored_bytes: Bytes added.
    """

    hits: int
    misses: int
    damaged: int
    errors: int
    full: int
    stored_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hits as a share of all samples; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)


class Cache(ABC):
    """Stores samples up to a quota. A full cache stores no more samples of a dataset, and evicts none of them.

    If the store fails, it warns once, and samples come from the dataset.

    Each epoch reads every sample once, so an evicting cache would drop samples shortly before their next use.

    Args:
        quota_bytes: Size limit of all kept samples together, without the overhead of the store.
        after: Number of the loader's transforms that run before a sample is kept; None: all of them. Neither they nor
            the dataset may draw random numbers.
        version: Identifies the dataset and these transforms in the samples' keys; None: a fingerprint of the files that
            define them and of their state.
    """

    shared = False
    """Whether several processes see one store."""
    failures: tuple[type[Exception], ...] = ()
    """The exceptions of a store that fails."""

    def __init__(self, quota_bytes: int, after: int | None, version: str | None) -> None:
        if quota_bytes < 1:
            raise ValueError(f"quota_bytes={quota_bytes} is too small: give at least 1")
        if after is not None and after < 0:
            raise ValueError(f"after={after} is too small: give at least 0")
        self.quota_bytes = quota_bytes
        self.after = after
        self.version = version
        self.counters = Counters(*CacheReport._fields)
        """Shown in the report of a loader."""
        self._takes = True

    @abstractmethod
    def load(self, key: bytes) -> bytes | None:
        """The entry of a key, or None."""

    @abstractmethod
    def store(self, key: bytes, entry: bytes) -> int:
        """Keep an entry; returns the number of bytes added, or -1 if the quota does not allow it."""

    @abstractmethod
    def drop(self, key: bytes) -> None:
        """Remove an entry."""

    def get(self, key: bytes) -> tuple[bool, Any]:
        """``(True, sample)``, or ``(False, None)`` if it is missing or damaged."""
        try:
            entry = self.load(key)
            if entry is None:
                self.counters.add(misses=1)
                return False, None
            try:
                if entry[:_DIGEST_NBYTES] != _digest(key, entry[_DIGEST_NBYTES:]):
                    raise ValueError("another entry, or a damaged one")
                sample = pickle.loads(memoryview(entry)[_DIGEST_NBYTES:])
            except Exception:  # unpickling may raise anything: the sample is built again
                self.counters.add(misses=1, damaged=1)
                self.drop(key)
                return False, None
        except self.failures as error:
            self.counters.add(misses=1)
            self._failed(error)
            return False, None
        self.counters.add(hits=1)
        return True, sample

    def put(self, key: bytes, sample: object) -> None:
        """Keep a sample if it can be pickled and the quota allows it.

        After a failure of the store, this process keeps no more.
        """
        if not self._takes:
            self.counters.add(errors=1)
            return
        try:
            content = _pickled(sample)
        except Exception as error:  # of the sample's own code: it is delivered, and not kept
            self._failed(error)
            return
        try:
            added = self.store(key, _digest(key, content) + content)
        except self.failures as error:
            self._takes = False
            self._failed(error)
            return
        if added < 0:
            self.counters.add(full=1)
        else:
            self.counters.add(stored_bytes=added)

    def _failed(self, error: Exception) -> None:
        first = not self.report().errors  # in no process
        self.counters.add(errors=1)
        if first:
            # Where warnings are errors, a sample that is there must not fail either.
            with contextlib.suppress(MinatoWarning):
                warn(
                    f"{self!r} failed ({type(error).__name__}: {printable(message_of(error))}): samples that it cannot "
                    "give or keep are read from the dataset"
                )

    def report(self) -> CacheReport:
        """The counts of the cache so far, of all processes."""
        return CacheReport(*self.counters.totals())


def _pickled(sample: object) -> bytes:
    to = io.BytesIO()
    ViewPickler(to, 5).dump(sample)
    return to.getvalue()


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_NBYTES, key=key).digest()


class MemoryCache(Cache):
    """Keeps samples in the memory of each process: for worker threads, or without workers.

    Args:
        quota_bytes: Size limit of all kept samples together.
        after: Number of the loader's transforms that run before a sample is kept; None: all of them.
        version: Identifies the dataset and these transforms; None: a fingerprint of them.
    """

    def __init__(
        self, quota_bytes: int, after: int | None = None, *, version: str | None = None
    ) -> None:
        super().__init__(quota_bytes, after, version)
        self._entries: dict[bytes, bytes] = {}
        self._nbytes = 0
        self._renew()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entries": {}, "_nbytes": 0, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        renew_in_children(self, MemoryCache._renew)

    def __repr__(self) -> str:
        return f"MemoryCache(quota_bytes={self.quota_bytes})"

    def load(self, key: bytes) -> bytes | None:
        return self._entries.get(key)

    def store(self, key: bytes, entry: bytes) -> int:
        with self._lock:
            if key in self._entries:
                return 0
            if self._nbytes + len(entry) > self.quota_bytes:
                return -1
            self._entries[key] = entry
            self._nbytes += len(entry)
        return len(entry)

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._nbytes -= len(self._entries.pop(key, b""))
