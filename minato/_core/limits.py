"""Errors of the system that come from a limit, in words that name the limit and the remedy."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

if sys.platform != "win32":
    import resource

__all__ = [
    "FUTEX_NUMBER",
    "address_space_advice",
    "explaining_limits",
    "futex_error",
    "limit_met",
    "slot_overflow",
    "soft_limit",
]

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAKE = 1
_IS_LINUX = sys.platform == "linux" and sys.maxsize > 1 << 32
FUTEX_NUMBER = _FUTEX_NUMBERS.get(platform.machine()) if _IS_LINUX else None
"""The number of Linux's system call; None where minato does not know it."""


def soft_limit(name: str) -> int | None:
    """The soft limit of this process, by its name in ``resource``; None if there is none."""
    if sys.platform == "win32" or not hasattr(resource, name):
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def futex_error() -> str | None:
    """Why processes cannot sleep on a word in shared memory; None if they can."""
    if FUTEX_NUMBER is None:
        return f"no futex known on {sys.platform}, {platform.machine()}"
    word = ctypes.c_uint32(0)
    arguments = ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0
    if ctypes.CDLL(None, use_errno=True).syscall(FUTEX_NUMBER, *arguments) < 0:
        return os.strerror(ctypes.get_errno())
    return None


def address_space_advice() -> str:
    """What else to do where address space is short, as the end of a sentence; empty if nothing limits it."""
    limit = soft_limit("RLIMIT_AS")
    return (
        ""
        if limit is None
        else f", or raise the limit on address space, which is {limit} bytes (ulimit -v)"
    )


def slot_overflow(slot_nbytes: int) -> str:
    """The text of the error of a batch that does not fit its slot of the arena."""
    return (
        f"a batch needs more than the {slot_nbytes} bytes of address space of its slot: use smaller batches, or keep "
        f"fewer batches and iterators alive, which share the address space{address_space_advice()}"
    )


@contextmanager
def explaining_limits(task: str) -> Iterator[None]:
    """Have an OSError of this block say which limit was met and what to do, as far as that is known.

    Args:
        task: What is tried, as the end of "cannot …".
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and "AF_UNIX path too long" in str(error):  # of the fork server
            raise OSError(
                errno.ENAMETOOLONG,
                f"cannot {task}: a socket in the temporary directory {tempfile.gettempdir()!r} would have too long a "
                "path: set TMPDIR to a shorter one before the program starts, or use multiprocessing_context='fork'",
            ) from None
        reason = limit_met(error.errno)
        if reason is None or error.strerror is None or error.strerror.startswith("cannot "):
            raise
        text = f"cannot {task}: {error.strerror}. {reason}"
        raise type(error)(error.errno, text) from None


def limit_met(number: int | None) -> str | None:
    """Which limit an error of this number has met, and what to do, in sentences; None if that is not known."""
    if number == errno.EMFILE:
        return (
            f"This process may have {soft_limit('RLIMIT_NOFILE')} open files and has no more to spare: raise the limit "
            "(ulimit -n), or use fewer workers, loaders and open files"
        )
    if number == errno.ENFILE:
        return (
            "All processes of this machine together have too many open files (sysctl fs.file-max)"
        )
    if number == errno.EFBIG:
        return (
            f"The limit on the size of files, which is {soft_limit('RLIMIT_FSIZE')} bytes, holds for shared memory "
            "too: raise it (ulimit -f), or use num_workers=0 or workers='thread'"
        )
    if number == errno.ENOMEM:
        limit = soft_limit("RLIMIT_AS")
        if limit is None:
            return (
                "Address space or memory is used up, or the kernel does not commit more (sysctl "
                "vm.overcommit_memory, vm.max_map_count): use fewer iterators, workers and batches at once"
            )
        return (
            f"The limit on address space is {limit} bytes: raise it (ulimit -v), or use fewer iterators, workers and "
            "batches at once"
        )
    if number == errno.EAGAIN:
        return (
            f"This user may have {soft_limit('RLIMIT_NPROC') or 'a limited number of'} processes and threads, or the "
            "container has no more to spare: raise the limit (ulimit -u, pids.max), or use fewer workers"
        )
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return (
            "A security policy of this machine or container (seccomp) refuses it: allow it, or use num_workers=0 or "
            "workers='thread'"
        )
    return None
