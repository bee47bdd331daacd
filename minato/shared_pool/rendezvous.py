"""Where the ranks of a node find each other: a socket and a key in a directory that no other user can enter."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["KEY_BYTES", "Found", "Rendezvous"]

KEY_BYTES = 32
_JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "GROUP_RANK",
)
"""Variables that identify the job, its restart and its node; torchrun sets them."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BACKLOG = 64
_LEFT_S = 60.0
"""Files older than this whose socket has no listener were left by killed processes."""


class Found(NamedTuple):
    """A socket of a server, listening or connected to, and the key of its connections."""

    connection: socket.socket
    key: bytes


class Rendezvous:
    """A name under which the ranks of this job on this node find each other for one loader.

    The server writes two files with mode 0600 into a directory with mode 0700: a socket and a random key. Both ends of
    a connection prove that they know the key. Other users, and containers with another file system, reach neither.

    Args:
        number: Number of the loader in the program.
        job: Identifies the job; None: the variables that the launcher sets.
    """

    def __init__(self, number: int, job: str | None = None) -> None:
        if job is None:
            job = "\0".join(os.environ.get(name, "") for name in _JOB)
        # The directory may be on a network file system that also holds sockets of other machines.
        self._prefix = _digest(_machine())
        self._stem = f"{self._prefix}-{_digest(job)}-{number}"
        self._finalizer: Any = None

    @property
    def directory(self) -> str:
        """Directory of the files."""
        return os.path.join(_temporary(), f"minato-{os.geteuid()}")

    def listen(self) -> Found:
        """Return the server's listening socket and its key.

        Raises:
            OSError: The name is in use, or the files cannot be written.
            RuntimeError: The directory belongs to another user, or cannot be created.
        """
        key, token = secrets.token_bytes(KEY_BYTES), f"{self._prefix}-{secrets.token_hex(8)}"
        with self._opened() as folder:
            self._sweep(folder)
            if _is_heard(folder, self._stem):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _write(folder, f"{token}.key", key)
                listener.bind(_address(folder, token))
                os.chmod(f"{token}.sock", 0o600, dir_fd=folder)
                listener.listen(_BACKLOG)
                # Files appear complete under their names, and replace those of a killed server.
                for kind in ("key", "sock"):
                    _rename(folder, f"{token}.{kind}", f"{self._stem}.{kind}")
            except BaseException:
                listener.close()
                for name in (f"{token}.key", f"{token}.sock"):
                    _unlink(folder, name)
                raise
        # Unlike atexit, this also runs at the end of a multiprocessing process, and not in forked children.
        self._finalizer = util.Finalize(None, self._remove, exitpriority=0)
        return Found(listener, key)

    def call(self) -> Found | None:
        """Return a client's connection and the key; None if no server listens, or too many processes connect.

        Raises:
            RuntimeError: The directory belongs to another user, or cannot be created.
        """
        with self._opened() as folder:
            key = _read(folder, f"{self._stem}.key")
            if key is None:
                return None
            with suppress(BlockingIOError):
                connection = _connected(folder, self._stem)
                return None if connection is None else Found(connection, key)
        return None

    def end(self) -> None:
        """Remove the files, in the process that created them."""
        if self._finalizer is not None:
            self._finalizer()

    def _remove(self) -> None:
        with suppress(OSError, RuntimeError), self._opened() as folder:
            for kind in ("sock", "key"):
                _unlink(folder, f"{self._stem}.{kind}")

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the checked directory as a descriptor, so that it cannot be exchanged afterwards."""
        path = self.directory
        remedy = "remove it, or set TMPDIR, in all ranks, to a directory of your own"
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"the ranks of this node cannot meet in {path}: {error.strerror}; {remedy}"
            ) from None
        try:
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise RuntimeError(
                    f"the ranks of this node cannot meet in {path}: it belongs to user {found.st_uid} and has mode "
                    f"{found.st_mode & 0o7777:#o}, so that others may have written there; {remedy}"
                )
            yield folder
        finally:
            os.close(folder)

    def _sweep(self, folder: int) -> None:
        """Remove files of killed processes of this machine."""
        for name in os.listdir(folder):
            stem, _, kind = name.rpartition(".")
            ours = kind in ("key", "sock") and name.startswith(self._prefix)
            with suppress(OSError):
                age_s = time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                if ours and age_s > _LEFT_S and not _is_heard(folder, stem):
                    os.unlink(name, dir_fd=folder)


def _machine() -> str:
    """Return an identifier of this machine and its boot."""
    try:
        return _BOOT_ID.read_text()
    except OSError:
        return os.uname().nodename


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise RuntimeError(
            f"the ranks of this node cannot meet: {error.strerror}; set TMPDIR, in all ranks, to a directory that "
            "can be written"
        ) from None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def _address(folder: int, stem: str) -> str:
    """Return a socket's address, independent of the length of the path: an address has at most 107 bytes."""
    return f"/proc/self/fd/{folder}/{stem}.sock"


def _connected(folder: int, stem: str) -> socket.socket | None:
    """Connect to a socket; None if no process listens.

    Raises:
        BlockingIOError: Its queue is full.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(_address(folder, stem))
        return connection
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


def _is_heard(folder: int, stem: str) -> bool:
    """Whether a process listens to a socket."""
    try:
        connection = _connected(folder, stem)
    except BlockingIOError:
        return True
    if connection is not None:
        connection.close()
    return connection is not None


def _write(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)


def _read(folder: int, name: str) -> bytes | None:
    """Return the key; None if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
            key = file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        return None
    return key if len(key) == KEY_BYTES else None


def _rename(folder: int, name: str, other: str) -> None:
    os.replace(name, other, src_dir_fd=folder, dst_dir_fd=folder)


def _unlink(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
