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

KEY_BYTES = 32
_TORCHELASTIC = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_JOB = ("MASTER_ADDR", "MASTER_PORT", *_TORCHELASTIC, "GROUP_RANK")
"""Variables that identify the job, its restart and its node; torchrun sets them."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KINDS = (".key", ".sock")
_BACKLOG = 64
_LEFT_S = 60.0  # files older than this whose socket has no listener were left by killed processes


class Found(NamedTuple):
    """A socket of a server, listening or connected to, and the key of its connections."""

    connection: socket.socket
    key: bytes


class Rendezvous:
    """A name under which the ranks of this job on this node find each other for one loader, by its number.

    The server writes two files with mode 0600 into a directory with mode 0700: a socket and a random key. Both ends of
    a connection prove that they know the key. Other users, and containers with another file system, reach neither.
    The job is identified by the variables that the launcher sets, unless it is given.
    """

    def __init__(self, number: int, job: str | None = None) -> None:
        if job is None:
            job = "\0".join(os.environ.get(name, "") for name in _JOB)
        # The directory may be on a network file system that also holds sockets of other machines.
        machine = os.uname().nodename
        with suppress(OSError):
            machine = _BOOT_ID.read_text()
        self._prefix = _digest(machine)
        self._stem = f"{self._prefix}-{_digest(job)}-{number}"
        self._finalizer: Any = None

    @property
    def directory(self) -> str:
        """Directory of the files; RuntimeError: there is none for temporary files."""
        try:
            return os.path.join(tempfile.gettempdir(), f"minato-{os.geteuid()}")
        except OSError as error:
            raise RuntimeError(
                f"the ranks of this node cannot meet: {error.strerror}; set TMPDIR, in all ranks, to a directory that "
                "can be written"
            ) from None

    def listen(self) -> Found:
        """The server's listening socket and its key.

        OSError: The name is in use, or the files cannot be written. RuntimeError: As of :meth:`call`.
        """
        key, token = secrets.token_bytes(KEY_BYTES), f"{self._prefix}-{secrets.token_hex(8)}"
        with self._opened() as folder:
            self._sweep(folder)
            if _is_heard(folder / f"{self._stem}.sock"):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                (folder / f"{token}.key").touch(0o600, exist_ok=False)
                (folder / f"{token}.key").write_bytes(key)
                listener.bind(str(folder / f"{token}.sock"))
                (folder / f"{token}.sock").chmod(0o600)
                listener.listen(_BACKLOG)
                # Files appear complete under their names, and replace those of a killed server.
                for kind in _KINDS:
                    (folder / f"{token}{kind}").replace(folder / f"{self._stem}{kind}")
            except BaseException:
                listener.close()
                _remove(folder, token)
                raise
        # Unlike atexit, this also runs at the end of a multiprocessing process, and not in forked children.
        self._finalizer = util.Finalize(None, self._remove, exitpriority=0)
        return Found(listener, key)

    def call(self) -> Found | None:
        """A client's connection and the key; None if no server listens, or too many processes connect.

        RuntimeError: The directory belongs to another user, or cannot be created.
        """
        with self._opened() as folder, suppress(FileNotFoundError, BlockingIOError):
            key = (folder / f"{self._stem}.key").read_bytes()
            connection = _connected(folder / f"{self._stem}.sock")
            if connection is not None:
                return Found(connection, key)
        return None

    def end(self) -> None:
        """Remove the files, in the process that created them."""
        if self._finalizer is not None:
            self._finalizer()

    def _remove(self) -> None:
        with suppress(OSError, RuntimeError), self._opened() as folder:
            _remove(folder, self._stem)

    @contextmanager
    def _opened(self) -> Iterator[Path]:
        """Open the checked directory, and give its path in this process.

        It cannot be exchanged afterwards. Its path is short: a socket's address has at most 107 bytes.
        """
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
            yield Path(f"/proc/self/fd/{folder}")
        finally:
            os.close(folder)

    def _sweep(self, folder: Path) -> None:
        """Remove files of killed processes of this machine."""
        for file in folder.iterdir():
            if file.suffix in _KINDS and file.name.startswith(self._prefix):
                with suppress(OSError):
                    age_s = time.time() - file.lstat().st_mtime
                    if age_s > _LEFT_S and not _is_heard(file.with_suffix(".sock")):
                        file.unlink()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def _remove(folder: Path, stem: str) -> None:
    for kind in _KINDS:
        (folder / f"{stem}{kind}").unlink(missing_ok=True)


def _connected(address: Path) -> socket.socket | None:
    """Connect to a socket; None if no process listens. BlockingIOError: its queue is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(str(address))
        return connection
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise


def _is_heard(address: Path) -> bool:
    try:
        connection = _connected(address)
    except BlockingIOError:
        return True
    if connection is not None:
        connection.close()
    return connection is not None
