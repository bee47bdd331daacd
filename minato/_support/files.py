"""Files that minato writes: links are not followed, foreign content stays, and a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from minato._core.limits import explaining_limits
from minato._core.segment import anonymous_file
from minato.errors import add_note

if sys.platform != "win32":
    import fcntl
    import grp
    import pwd

_PRIVATE = 0o600  # mode of files that hold keys, samples or texts of errors
_CHUNK_BYTES = 4096
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_POLL_S = 0.01  # between two looks at the lock of a file: flock() has no time limit

_Path = str | os.PathLike[str]


def open_regular(path: _Path, flags: int) -> int:
    """``os.open`` for a regular file, made with mode 0600, by no symbolic link to write; OSError, which names it."""
    name = os.fspath(path)
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if writes:
        flags |= os.O_NOFOLLOW
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block forever.
        descriptor = os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK, _PRIVATE)
    except OSError as error:
        if writes and os.path.islink(name):
            reason = "Is a symbolic link, which minato does not write through: name the file itself"
            raise OSError(errno.ELOOP, reason, name) from None
        if error.errno != errno.ENXIO:  # a pipe without a reader, or a socket
            raise
        raise _not_regular(name) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(name)
    return descriptor


def _not_regular(name: str) -> OSError:
    return OSError(errno.EINVAL, "Is not a regular file", name)


def open_lines(path: _Path, begins: bytes, what: str) -> int:
    """Open a file of lines to append to it, or make it with mode 0600.

    ``begins`` are the first bytes of every such file, and ``what`` names it: ``"a recorded order (Record)"``.
    ValueError: it has other content, which is untouched. OSError: it cannot be opened, or is a link or no regular file.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        add_note(error, f"{what} cannot be written: give a file in a directory where you may write")
        raise
    try:
        # A process that was killed may have left less than the first line.
        if not begins.startswith(os.pread(descriptor, len(begins), 0)):
            raise ValueError(
                f"{os.fspath(path)!r} holds something else than {what}, and is left as it is: name another file"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def cut_torn_line(descriptor: int) -> None:
    """Remove an incomplete last line, which a killed process or a full disk has left."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        step = min(end, _CHUNK_BYTES)
        newline = os.pread(descriptor, step, end - step).rfind(b"\n")
        if newline >= 0:
            end += newline + 1 - step
            break
        end -= step
    if end < size:
        os.ftruncate(descriptor, end)


def gets_lock(descriptor: int, patience_s: float) -> bool:
    """Whether this process gets the exclusive lock of an open file before its patience ends."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(_POLL_S)


def write_all(descriptor: int, data: bytes, path: _Path) -> None:
    """Write all of ``data``; OSError: a part could not be written; the message names the file."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def write_atomically(
    path: _Path,
    content: str,
    *,
    sync: bool = False,
    recognised: Callable[[bytes], bool] | None = None,
) -> None:
    """Write a text to a file, whole or not at all: beside ``path``, under a name that cannot be guessed, until then.

    A symbolic link at ``path`` is replaced, not followed. A file of this user that it replaces keeps its mode; a new
    one has mode 0600, under the umask. With ``sync``, it is on the disk before it takes its place. ``recognised`` tells
    whether a file that begins with these 64 bytes may be replaced; None: any may.

    ValueError: the present file is not recognised, and stays unchanged. OSError: it cannot be written, or the path
    names no regular file; the message names it.
    """
    target, mode = Path(path), _PRIVATE
    with contextlib.suppress(FileNotFoundError):
        found = target.lstat()
        if stat.S_ISREG(found.st_mode):
            if found.st_uid == os.geteuid():
                mode = stat.S_IMODE(found.st_mode)
        elif not stat.S_ISLNK(found.st_mode):
            raise _not_regular(str(target))
        if recognised is not None:
            with open(open_regular(target, os.O_RDONLY), "rb") as present:
                head = present.read(64)
            if head and not recognised(head):
                raise ValueError(
                    f"{str(target)!r} holds something else, and is left as it is: name another file"
                )
    unfinished = target.with_name(f".minato-{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(unfinished, flags, mode)
        try:
            with open(descriptor, "w+b") as file:
                file.write(content.encode())
                file.flush()
                if sync:
                    os.fsync(descriptor)
            os.replace(unfinished, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                unfinished.unlink()
    except OSError as error:
        if error.filename in (None, str(unfinished)):
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise


def anonymous_log() -> int:
    """A descriptor that appends to a file without a name, in memory where the system can."""
    with explaining_limits("keep a log in memory"):
        descriptor = anonymous_file(0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


class OwnDescriptor:
    """A descriptor that is closed with this object, and goes to a child that inherits it or is being started."""

    def __init__(self, descriptor: int) -> None:
        self.number = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> OwnDescriptor:
    return OwnDescriptor(sent.detach())


def check_private(path: _Path) -> None:
    """Check that no other user could have written ``path``, a file or directory, or can put another one in its place.

    It and the directories above it must belong to this user or to root, and neither others nor a group, except one of
    this user alone, may write to them. A directory above it may be like ``/tmp``, where users cannot replace each
    other's files. Missing directories are skipped. PermissionError, which names the directory and the remedy: another
    user may have written there. OSError: it cannot be looked at.
    """
    place = Path(path).absolute()
    for part in (place, *place.parents):
        try:
            found = part.lstat()
            if stat.S_ISLNK(found.st_mode):
                check_private(part.resolve())
                _check_part(part, found.st_uid, found.st_gid, 0, above=True)
            else:
                _check_part(part, found.st_uid, found.st_gid, found.st_mode, above=part != place)
        except FileNotFoundError:
            continue


def _check_part(part: Path, owner: int, group: int, mode: int, above: bool) -> None:
    if owner not in (0, os.geteuid()) and not (above and owner == unmapped_user()):
        raise _not_private(part, f"belongs to user {owner}", f"chown {os.geteuid()}")
    if above and mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH:
        raise _not_private(part, "may be written to by all users", "chmod o-w")
    if mode & stat.S_IWGRP and not _is_own_group(group):
        raise _not_private(part, f"may be written to by group {group}", "chmod g-w")


@functools.cache
def unmapped_user() -> int | None:
    """The number of all users without one, also of the host's root, in a container with its own users; else None."""
    try:
        if _UID_MAP.read_text().split() == ["0", "0", str(0xFFFFFFFF)]:
            return None
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return None


def _not_private(part: Path, how: str, remedy: str) -> PermissionError:
    return PermissionError(
        f"{str(part)!r} {how}, who could put code there that minato would run: {remedy} it, or choose another place"
    )


@functools.cache
def _is_own_group(number: int) -> bool:
    """Whether a group is the private group of this user, which many systems make for each."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
