"""A cache in a folder, which several processes and several runs may use (extra ``cache``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from minato.caching.base import Cache

__all__ = ["DiskCache"]

_SHARDS = 8
_UNBOUNDED = 1 << 62
"""diskcache has no limit of its own here: the quota is ours."""
_BUSY_S = 60.0


class DiskCache(Cache):
    """Keeps samples in a folder, through diskcache.

    Args:
        path: The folder. What lies in it is unpickled, so nobody else should be able to write there.
        quota_bytes: What the kept samples may take together, without the overhead of the file system and of SQLite. All
            processes and runs that use the folder count together, each against its own quota.
        after: How many of the loader's transforms run before a sample is kept; None: all of them.
        version: Stands for the dataset and these transforms; None: a fingerprint of them.
    """

    shared = True

    def __init__(
        self,
        path: str | Path,
        quota_bytes: int,
        after: int | None = None,
        *,
        version: str | None = None,
    ) -> None:
        super().__init__(quota_bytes, after, version)
        self._path = Path(path).absolute()
        self._opened: tuple[int, Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None}

    def __repr__(self) -> str:
        return f"DiskCache({str(self._path)!r}, quota_bytes={self.quota_bytes})"

    def _stores(self) -> tuple[Any, Any]:
        """The samples, and what they take; SQLite's connections must not be used over a fork."""
        import diskcache

        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                how = {"eviction_policy": "none", "cull_limit": 0, "size_limit": _UNBOUNDED}
                samples = diskcache.FanoutCache(
                    self._path / "samples", _SHARDS, timeout=_BUSY_S, **how
                )
                sizes = diskcache.Cache(self._path / "sizes", timeout=_BUSY_S, **how)
                self._opened = os.getpid(), samples, sizes
            return self._opened[1:]

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()
            opened[2].close()

    @property
    def stored_bytes(self) -> int:
        """What all kept samples in the folder take."""
        return int(self._stores()[1].get("bytes", 0))

    def _load(self, key: bytes) -> bytes | None:
        entry: bytes | None = self._stores()[0].get(key)
        return entry

    def _store(self, key: bytes, entry: bytes) -> int:
        samples, sizes = self._stores()
        size = len(entry)
        # Taken first: whoever looks and then takes would, with others, take too much.
        if sizes.incr("bytes", size) > self.quota_bytes:
            sizes.decr("bytes", size)
            return -1
        added = False
        try:
            added = samples.add(key, entry, tag=size)
            if not added and samples.get(key) is None:  # its file is gone, or it never was a sample
                self._drop(key)
                added = samples.add(key, entry, tag=size)
        finally:
            if not added:  # another worker was quicker, or the disk is full
                sizes.decr("bytes", size)
        return size if added else 0

    def _drop(self, key: bytes) -> None:
        samples, sizes = self._stores()
        # What was counted for it is its tag: the entry itself may have become shorter, or be another's.
        size = samples.pop(key, tag=True)[1]
        if isinstance(size, int):
            sizes.decr("bytes", size)
