"""Keeping samples after the deterministic part of their transforms, so that later epochs skip it and the read.

In the memory of one process, or in a directory that several processes and runs may share (extra ``cache``).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pickle
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from minato._fork_safety import held_off_forks, interrupted_calls, renew_in_children
from minato._support.counters import Counters
from minato._support.files import check_private, gets_lock, open_regular, write_all
from minato._support.pickling import pickled
from minato._support.values import message_of, printable, text_of, type_name
from minato.checks import check_whole, given_whole
from minato.errors import MinatoWarning, missing, warn

__all__ = ["CacheReport", "DiskCache", "MemoryCache"]

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
    """

    shared = False
    """Whether several processes see one store."""
    failures: tuple[type[Exception], ...] = ()
    """The exceptions of a store that fails."""

    def __init__(self, quota_bytes: int, after: int | None, version: str | None) -> None:
        self.quota_bytes = given_whole("quota_bytes", quota_bytes, 1)
        self.after, self.version = check_whole("after", after, 0), version
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
                with held_off_forks():  # it may import, and a child would wait for that forever
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
        """Keep a sample if it can be pickled and the quota allows it; nothing more after a failure of the store."""
        if not self._takes:
            self.counters.add(errors=1)
            return
        try:
            with held_off_forks():
                content = pickled(sample)
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
            with suppress(MinatoWarning):
                warn(
                    f"{self!r} failed ({type(error).__name__}: {printable(message_of(error))}): samples that it cannot "
                    "give or keep are read from the dataset"
                )

    def report(self) -> CacheReport:
        """The counts of the cache so far, of all processes."""
        return CacheReport(*self.counters.totals())


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_NBYTES, key=key).digest()


class MemoryCache(Cache):
    """Keeps samples in the memory of each process: for worker threads, or without workers.

    Args:
        quota_bytes: Size limit of all kept samples together.
        after: Number of the loader's transforms that run before a sample is kept; None: all of them. Neither they nor
            the dataset may draw random numbers.
        version: Identifies the dataset and these transforms in the samples' keys; None: a fingerprint of the files that
            define them and of their state.
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


# ---- in a directory -------------------------------------------------------------------------


_MAP_BYTES = 1 << 40
"""Addresses that LMDB reserves. All processes must name the same, and the file is only as large as its content."""
_READERS = 4200
"""Most threads of all processes that read at one moment; a loader has up to 4096 workers."""
_LOCK_FILE_BYTES = 64 * _READERS + 4096
_PATIENCE_S = 60.0
"""How long to wait for another process to open the cache, which takes milliseconds."""
_SYNC_BYTES, _SYNC_S = 64 << 20, 30.0
"""How much a process writes, and for how long, before it has the disk keep it."""
_PREFIX_BYTES = 16  # the part of a key that names the dataset and its transforms
_USED_NS = 10**9
"""How precise the time is at which a prefix was last used: a process that uses it all the time notes it so often."""
_TOTAL = b"bytes"
"""In the database of states: the size of all entries. The other keys are prefixes, with the time of their last use."""
_STAMP = struct.Struct("<16sQ")
"""What is known to be on the disk: the start of the machine, and the last transaction before it was written out."""


class DiskCache(Cache):
    """Keeps samples in a directory of a local disk, in an LMDB environment.

    Args:
        path: The directory, created with mode 0700. Its entries are unpickled, so no other user may be able to write
            there, or to replace it.
        quota_bytes: Size limit of all kept samples together, without the overhead of LMDB, which stores large samples
            in whole pages of 4 KiB. All processes and runs that use the directory count together, each against its own
            quota. Where it is reached, samples with another fingerprint or version make room, if nothing has used them
            since this cache was made; the longest unused go first.
        after, version: As of :class:`MemoryCache`.

    Raises:
        ModuleNotFoundError: lmdb is not installed.
        PermissionError: Another user could write there; the message names the path and the remedy.
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
        self.failures = (OSError, _lmdb().Error)
        try:
            self._path = Path(path).absolute()
        except TypeError:
            raise TypeError(
                f"path={text_of(path)} of DiskCache is a {type_name(path)}: give a string or a Path"
            ) from None
        self._made_ns = _wall_ns()
        self._used_ns: dict[bytes, int] = {}
        self._opened: tuple[int, _Environment | Exception, Callable[[], object]] | None = None
        check_private(self._path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_used_ns": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        _lmdb()
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"DiskCache({str(self._path)!r}, quota_bytes={self.quota_bytes})"

    def _environment(self) -> _Environment:
        """The environment, opened by each process: none must use that of its parent.

        OSError, lmdb.Error: It cannot be opened; this process does not try again.
        """
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            try:
                made = _Environment(self._path)
            except self.failures as error:
                opened = os.getpid(), error, lambda: None
            else:
                opened = os.getpid(), made, Finalize(self, made.close, exitpriority=0)
            self._opened = opened
        if isinstance(opened[1], Exception):
            raise opened[1].with_traceback(None)
        return opened[1]

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        with _one_at_a_time():
            opened, self._opened = self._opened, None
            if opened is not None:
                opened[2]()  # which does nothing in another process

    @property
    def stored_bytes(self) -> int:
        """Bytes of all kept samples in the directory."""
        with _one_at_a_time(), self._environment().begin() as view:
            return _number(view.get(_TOTAL))

    def load(self, key: bytes) -> bytes | None:
        prefix, now_ns = key[:_PREFIX_BYTES], _wall_ns()
        with _one_at_a_time():
            files = self._environment()
            entry = files.get(key)
            if entry is not None and now_ns - self._used_ns.get(prefix, 0) > _USED_NS:
                self._used_ns[prefix] = now_ns
                with suppress(*self.failures):  # the sample is there all the same
                    files.mark(prefix, self._made_ns)
        return entry

    def store(self, key: bytes, entry: bytes) -> int:
        with _one_at_a_time():
            try:
                return self._environment().add(key, entry, self.quota_bytes, self._made_ns)
            except _lmdb().MapFullError:
                return -1

    def drop(self, key: bytes) -> None:
        with _one_at_a_time():
            self._environment().remove(key)


class _Environment:
    """The files of a cache, as one process uses them, in one thread at a time (``_one_at_a_time``).

    All that a transaction writes is there, or nothing, also if its process is killed. If the machine stops, what the
    disk holds may be damaged; the cache then starts empty. OSError, lmdb.Error: They cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsynced_bytes = 0
        self._synced_s = time.monotonic()
        path.mkdir(0o700, parents=True, exist_ok=True)
        with _locked(path / "opening.lock"):
            for name in ("", "data.mdb", "lock.mdb", "synced"):
                check_private(path / name)
            if not os.access(path, os.W_OK):
                raise OSError(errno.EROFS, "May not be written to", str(path))
            _make_lock_file(path / "lock.mdb")
            self._files = self._open()
            boot, synced = self._stamp()
            if boot != _boot():
                if self._last() > synced:
                    self._files.close()  # no other process has them: each stamps them first
                    (path / "data.mdb").unlink()
                    self._files = self._open()
                self._write_stamp(self._last())
            pages = self._files.info()["last_pgno"] + 1
            if (path / "data.mdb").stat().st_size < pages * self._files.stat()["psize"]:
                # Reading what is not there would kill the process.
                reason = "Lacks its end: delete the directory of the cache"
                raise OSError(errno.EIO, reason, str(path / "data.mdb"))
            self._files.reader_check()  # frees what killed workers have read
            self._samples = self._files.open_db(b"samples")
            self._states = self._files.open_db(b"states")

    def _open(self) -> Any:
        """The environment of LMDB, unless this process has it open: it may open each of them only once."""
        lmdb = _lmdb()  # before the lock: a thread may wait for another that imports it
        with _lock:
            file, found = self._path / "data.mdb", None
            if file.exists():
                found = _environments.get(_identity(file))
                if _identity(file) in _interrupted:
                    raise lmdb.Error(
                        f"{str(self._path)!r} cannot be opened: this process was forked while a thread of its parent "
                        "was in a call of LMDB or SQLite that took too long; start it by "
                        "multiprocessing_context='forkserver'"
                    )
            if found is None:
                found = lmdb.open(
                    str(self._path),
                    map_size=_MAP_BYTES,
                    mode=0o600,
                    max_readers=_READERS,
                    max_dbs=2,
                    sync=False,  # sync() does it, and not for each sample
                )
                _environments[_identity(file)] = found
            return found

    # ---- entries ------------------------------------------------------------------------

    def begin(self, write: bool = False) -> Any:
        return self._files.begin(db=self._states, write=write)

    def get(self, key: bytes) -> bytes | None:
        with self.begin() as view:
            entry: bytes | None = view.get(key, db=self._samples)
        return entry

    def add(self, key: bytes, entry: bytes, quota_bytes: int, made_ns: int) -> int:
        """Add an entry; returns its size, or 0 if it is there already.

        Raises:
            MapFullError: There is no room.
        """
        prefix, size = key[:_PREFIX_BYTES], len(entry)
        with self.begin(write=True) as to:
            if to.get(key, db=self._samples) is not None:
                return 0
            total = _number(to.get(_TOTAL)) + size
            if total > quota_bytes:
                total -= self._evict(to, total - quota_bytes, prefix, made_ns)
            if total > quota_bytes:
                raise _lmdb().MapFullError  # which undoes the evictions
            to.put(key, entry, db=self._samples)
            to.put(_TOTAL, _bytes(total))
            self._mark(to, prefix, made_ns)
        self._unsynced_bytes += size
        if self._unsynced_bytes > _SYNC_BYTES or time.monotonic() - self._synced_s > _SYNC_S:
            self.sync()
        return size

    def _evict(self, to: Any, nbytes: int, prefix: bytes, made_ns: int) -> int:
        """Remove entries of other prefixes that were last used before a time; returns the bytes removed."""
        with to.cursor(db=self._states) as states:
            found = [(_number(used), key) for key, used in states if key not in (_TOTAL, prefix)]
        freed, before_ns = 0, min(made_ns, _wall_ns() - 2 * _USED_NS)
        for used_ns, other in sorted(found):
            if used_ns >= before_ns:
                break
            with to.cursor(db=self._samples) as entries:
                there = entries.set_range(other)
                while there and freed < nbytes and entries.key().startswith(other):
                    freed += len(entries.value())
                    there = entries.delete()
            if freed >= nbytes:
                break
            to.delete(other)
        return freed

    def mark(self, prefix: bytes, made_ns: int) -> None:
        """Note that a cache, which was made at this time, uses a prefix."""
        with self.begin(write=True) as to:
            self._mark(to, prefix, made_ns)

    def _mark(self, to: Any, prefix: bytes, made_ns: int) -> None:
        now_ns = _wall_ns()
        if _number(to.get(prefix)) < max(made_ns, now_ns - _USED_NS):
            to.put(prefix, _bytes(now_ns))
            self._unsynced_bytes += 1  # else the cache would start empty after the next start

    def remove(self, key: bytes) -> None:
        with self.begin(write=True) as to:
            entry = to.pop(key, db=self._samples)
            if entry is not None:
                to.put(_TOTAL, _bytes(max(_number(to.get(_TOTAL)) - len(entry), 0)))
        self._unsynced_bytes += 1

    # ---- what is on the disk ------------------------------------------------------------

    def sync(self) -> None:
        """Have the disk keep what was written; a failure costs the entries if the machine stops, and nothing else."""
        if not self._unsynced_bytes:
            return
        self._unsynced_bytes, self._synced_s = 0, time.monotonic()
        with suppress(Exception):
            last = self._last()
            self._files.sync(True)
            with _locked(self._path / "opening.lock"):
                boot, synced = self._stamp()
                if boot != _boot() or synced < last:  # another process may have synced later
                    self._write_stamp(last)

    def close(self) -> None:
        """Have the disk keep what was written, and let go of the files."""
        with _one_at_a_time():
            self.sync()
            del self._samples, self._states, self._files

    def _last(self) -> int:
        return int(self._files.info()["last_txnid"])

    def _stamp(self) -> tuple[bytes, int]:
        with suppress(FileNotFoundError, struct.error):
            boot, synced = _STAMP.unpack((self._path / "synced").read_bytes())
            return boot, synced
        return b"", 0

    def _write_stamp(self, last: int) -> None:
        with _file(self._path / "synced") as file:
            file.write(_STAMP.pack(_boot(), last))


# ---- the environments of this process -------------------------------------------------------

_lock = threading.RLock()
_environments: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""By device and inode, as several paths may lead to a file. An environment closes when nothing refers to it."""
_interrupted: dict[tuple[int, int], Any] = {}
"""Environments of the parent in a child whose fork has interrupted calls: closing one would wait for them forever."""


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one thread of this process call LMDB, and hold forks off meanwhile: a child would wait for it forever.

    Opening an environment or a database beside other calls on the same file, or closing it, hangs threads.
    """
    with held_off_forks(), _lock:
        yield


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    if interrupted_calls():
        _interrupted.update(_environments)
    else:
        for inherited in list(_environments.values()):
            inherited.close()  # py-lmdb opens no file twice
    _environments.clear()


os.register_at_fork(after_in_child=_after_fork)


def _lmdb() -> Any:
    """The package; first imported where a cache is made, as a child that is forked in an import hangs in the next."""
    try:
        import lmdb
    except ModuleNotFoundError:
        raise missing("DiskCache", "lmdb", "cache") from None
    return lmdb


def _wall_ns() -> int:
    """The time, which entries keep. Where it jumps, other entries than the oldest make room."""
    return time.time_ns()  # compared with that of other runs


def _number(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "little")


def _bytes(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _boot() -> bytes:
    """Identifies the present start of the machine; where there is no such number, all are one."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


def _make_lock_file(file: Path) -> None:
    """Give LMDB's file of locks its whole size: LMDB maps it, and a full disk would then kill the process."""
    size = file.stat().st_size if file.exists() else 0
    # No process has it open before it is whole. Closing it would release this process's locks.
    if size < _LOCK_FILE_BYTES:
        with _file(file) as content:
            content.seek(size)
            write_all(content.fileno(), bytes(_LOCK_FILE_BYTES - size), file)


def _file(path: Path) -> FileIO:
    """A regular file, made if it is missing, to read and write."""
    return open(open_regular(path, os.O_RDWR | os.O_CREAT), "r+b", 0)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes for the block; OSError: another one holds it for too long, or there is no file."""
    with _file(path) as file:
        if not gets_lock(file.fileno(), _PATIENCE_S):
            reason = f"Is held by another process for {_PATIENCE_S:.0f} s"
            raise OSError(errno.EBUSY, reason, str(path))
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
