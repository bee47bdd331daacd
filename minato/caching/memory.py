"""A cache in the memory of one process."""

from __future__ import annotations

import threading
from typing import Any

from minato._fork_safety import renew_in_children
from minato.caching.base import Cache

__all__ = ["MemoryCache"]


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
