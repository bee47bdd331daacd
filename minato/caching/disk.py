"""A cache in a directory, which several processes and runs may share (extra ``cache``)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

from minato._fork_safety import held_off_forks
from minato._support.files import PRIVATE, check_private, is_private, open_regular, write_all
from minato.caching.base import Cache

__all__ = ["DiskCache"]

_SHARDS = 4
_UNBOUNDED = 1 << 62
_inherited: list[Any] = []
"""What the parent of this forked process has opened: its collection here would write to the same files."""
_BUSY_S = 60.0
_MODE = 0o700
_FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")
"""How diskcache names the file of a large entry."""
_TRIES = 5


class DiskCache(Cache):
    """Keeps samples in a directory, through diskcache.

    Args:
        path: The directory, created with mode 0700. Its entries are unpickled, so no other user may be able to write
            there, or to replace it.
        quota_bytes: Size limit of all kept samples together, without the overhead of the file system and of SQLite. All
            processes and runs that use the directory count together, each against its own quota.
        after: Number of the loader's transforms that run before a sample is kept; None: all of them.
        version: Identifies the dataset and these transforms; None: a fingerprint of them.

    Raises:
        PermissionError: Another user could write there; the message names the path and the remedy.
    """

    shared = True
    failures = (OSError, sqlite3.Error)

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
        self._opened: tuple[int, Any] | None = None
        check_private(self._path)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None}

    def __repr__(self) -> str:
        return f"DiskCache({str(self._path)!r}, quota_bytes={self.quota_bytes})"

    def _samples(self) -> Any:
        """The part of diskcache, opened by each process: SQLite's connections must not be used over a fork.

        Raises:
            OSError, sqlite3.Error: It cannot be opened; this process does not try again.
        """
        with self._lock:
            if self._opened is not None and self._opened[0] != os.getpid():
                _inherited.append(self._opened[1])
                self._opened = None
            if self._opened is None:
                try:
                    self._opened = os.getpid(), self._open()
                except self.failures as error:
                    self._opened = os.getpid(), OSError(*error.args)
            if isinstance(self._opened[1], OSError):
                raise self._opened[1].with_traceback(None)
            return self._opened[1]

    def _open(self) -> Any:
        import diskcache

        directory = self._path / "samples"
        self._path.mkdir(_MODE, parents=True, exist_ok=True)
        directory.mkdir(_MODE, exist_ok=True)
        for number in range(_SHARDS):
            shard = directory / f"{number:03}"  # as diskcache names it
            shard.mkdir(_MODE, exist_ok=True)
            for part in (shard, *shard.glob("cache.db*")):
                check_private(part)
        if not os.access(directory, os.W_OK):
            raise OSError(errno.EROFS, "May not be written to", str(directory))
        # Neither a limit nor an eviction of diskcache's own: the quota is ours.
        how = {"eviction_policy": "none", "cull_limit": 0, "size_limit": _UNBOUNDED}
        return diskcache.FanoutCache(directory, _SHARDS, timeout=_BUSY_S, disk=_disk(), **how)

    def _add(self, nbytes: int) -> int:
        """Add to the size of all samples, and return it; in a file, as writers would wait long for a database."""
        self._path.mkdir(_MODE, parents=True, exist_ok=True)
        file = open_regular(self._path / "bytes", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it when this process ends
            taken = max(int.from_bytes(os.pread(file, 8, 0), "little") + nbytes, 0)
            if nbytes:
                os.pwrite(file, taken.to_bytes(8, "little"), 0)
            return taken
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid() and not isinstance(opened[1], OSError):
            opened[1].close()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all kept samples in the directory."""
        return self._add(0)

    def _load(self, key: bytes) -> bytes | None:
        with held_off_forks():  # a child would inherit the locks of SQLite itself
            entry: bytes | None = self._samples().get(key)
        return entry

    def _store(self, key: bytes, entry: bytes) -> int:
        with held_off_forks():
            return self._add_sample(key, entry)

    def _add_sample(self, key: bytes, entry: bytes) -> int:
        samples = self._samples()
        size = len(entry)
        # Reserve first: checking before reserving would let several processes exceed the quota together.
        if self._add(size) > self.quota_bytes:
            self._add(-size)
            return -1
        added = False
        try:
            added = samples.add(key, entry, tag=size)
            if not added and samples.get(key) is None:  # its file is missing, or it is no sample
                self._drop(key)
                added = samples.add(key, entry, tag=size)
        finally:
            if not added:  # another worker was quicker, or the disk is full
                self._add(-size)
        return size if added else 0

    def _drop(self, key: bytes) -> None:
        # Its tag is the size that was counted; the entry itself may be truncated or foreign.
        with held_off_forks():
            size = self._samples().pop(key, tag=True)[1]
        if isinstance(size, int):
            self._add(-size)


@functools.cache
def _disk() -> Any:
    """The storage of diskcache's entries: bytes only, so that diskcache unpickles nothing."""
    import diskcache
    from diskcache.core import MODE_BINARY, MODE_RAW, UNKNOWN

    class Disk(diskcache.Disk):  # type: ignore[misc]  # an untyped package's class
        def __init__(self, directory: str, **settings: object) -> None:
            super().__init__(directory, **settings)
            self.directory = directory

        def get(self, key: object, raw: bool) -> Any:
            return super().get(key, raw) if raw else b""

        def store(self, value: object, read: bool, key: object = UNKNOWN) -> Any:
            if type(value) is not bytes or len(value) < self.min_file_size:
                return super().store(value, read, key=key)
            filename, full_path = self.filename(key, value)
            _write(full_path, value)
            return len(value), MODE_BINARY, filename, None

        def fetch(self, mode: int, filename: Any, value: object, read: bool) -> bytes:
            """The entry; empty, which no whole one is, if it is something else."""
            if mode == MODE_RAW and type(value) is bytes:
                return value
            if mode != MODE_BINARY or not _FILE.fullmatch(str(filename)):
                return b""
            path = os.path.join(self.directory, filename)
            with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                return file.read() if is_private(os.fstat(file.fileno())) else b""

        def remove(self, file_path: str) -> None:
            if _FILE.fullmatch(file_path):
                super().remove(file_path)

    return Disk


def _write(path: str, content: bytes) -> None:
    """Write a new file, and remove it if the disk is full."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for left in reversed(range(_TRIES)):
        os.makedirs(os.path.dirname(path), _MODE, exist_ok=True)
        try:
            descriptor = os.open(path, flags, PRIVATE)
            break
        except FileNotFoundError:  # another process has removed the empty directory
            if not left:
                raise
    try:
        write_all(descriptor, content, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)
