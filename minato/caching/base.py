"""What all caches have in common."""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from minato._counters import Counters

__all__ = ["Cache", "CacheReport"]

_DIGEST_NBYTES = 16


class CacheReport(NamedTuple):
    """What a cache did since it was made, in all processes.

    Attributes:
        hits: Samples that were there.
        misses: Samples that were not, or not whole.
        damaged: Those of them that were there and could not be used.
        full: Samples that were not kept because of the quota.
        stored_bytes: What was added.
    """

    hits: int
    misses: int
    damaged: int
    full: int
    stored_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hits as a share of all samples; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)


class Cache(ABC):
    """Keeps samples up to a quota; what comes when it is full is not kept, and nothing makes way for it.

    In epochs every sample comes once in turn, so that a cache which evicts would throw away what is needed next.

    Args:
        quota_bytes: What the kept samples may take together, without the overhead of the store.
        after: How many of the loader's transforms run before a sample is kept; None: all of them. They, and the
            dataset, must not draw random numbers.
        version: Stands for the dataset and these transforms in the samples' keys; None: a fingerprint of their code and
            parameters.
    """

    shared = False
    """Whether several processes see one store."""

    def __init__(self, quota_bytes: int, after: int | None, version: str | None) -> None:
        if quota_bytes < 1:
            raise ValueError(f"quota_bytes={quota_bytes} is too small: give at least 1")
        if after is not None and after < 0:
            raise ValueError(f"after={after} is too small: give at least 0")
        self.quota_bytes = quota_bytes
        self.after = after
        self.version = version
        self.counters = Counters(*CacheReport._fields)
        """For reports of the loaders that use it."""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @abstractmethod
    def _load(self, key: bytes) -> bytes | None:
        """The entry, or None."""

    @abstractmethod
    def _store(self, key: bytes, entry: bytes) -> int:
        """Keep an entry; returns how many bytes were added, or -1 if the quota does not allow it."""

    @abstractmethod
    def _drop(self, key: bytes) -> None:
        """Keep an entry no longer."""

    def get(self, key: bytes) -> tuple[bool, Any]:
        """``(True, sample)``, or ``(False, None)`` if it is not there or not whole."""
        entry = self._load(key)
        if entry is None:
            self.counters.add(misses=1)
            return False, None
        try:
            if entry[:_DIGEST_NBYTES] != _digest(key, entry[_DIGEST_NBYTES:]):
                raise ValueError("another entry, or a damaged one")
            sample = pickle.load(io.BytesIO(entry[_DIGEST_NBYTES:]))
        except Exception:  # whatever unpickling raises: it is made anew
            self._drop(key)
            self.counters.add(misses=1, damaged=1)
            return False, None
        self.counters.add(hits=1)
        return True, sample

    def put(self, key: bytes, sample: Any) -> None:
        """Keep a sample if there is room."""
        content = pickle.dumps(sample, 5)
        added = self._store(key, _digest(key, content) + content)
        if added < 0:
            self.counters.add(full=1)
        else:
            self.counters.add(stored_bytes=added)

    def report(self) -> CacheReport:
        """What the cache did so far."""
        return CacheReport(*self.counters.totals())


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_NBYTES, key=key).digest()
