"""Loaders where Python has only what macOS or Windows have, in a child process for each.

The interpreter is Linux's. It loads torch; the child then loses the names and files that the other system lacks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from multiprocessing import context, reduction
from typing import Any

import psutil  # chooses its code by the platform
import torch

# Names that macOS's Python lacks, too.
LINUX_ONLY = {
    os: (
        *("eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity"),
        *("sched_setaffinity", "setns", "splice", "unshare", "MFD_CLOEXEC", "O_PATH", "O_TMPFILE"),
    ),
    mmap: ("MADV_DONTDUMP", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_REMOVE", "MAP_NORESERVE", "MAP_POPULATE"),
    select: ("epoll",),
    signal: ("SIGRTMAX", "SIGRTMIN", "sigtimedwait", "sigwaitinfo"),
    socket: ("SO_PEERCRED",),
    time: ("pthread_getcpuclockid",),
}  # fmt: skip
# Names that only Windows's lacks.
UNIX_ONLY = {
    os: (
        *("WNOHANG", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getgroups", "getpgid"),
        *("getpriority", "getsid", "getuid", "killpg", "mkfifo", "nice", "openpty", "posix_spawn", "pread", "pwrite"),
        *("register_at_fork", "sched_yield", "sendfile", "setpriority", "setsid", "statvfs", "sysconf", "uname"),
        *("wait", "wait4", "waitid", "O_ASYNC", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
    ),
    select: ("poll",),
    signal: (
        *("SIGALRM", "SIGBUS", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP"),
        *("SIGUSR1", "SIGUSR2", "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt"),
        *("sigpending", "sigwait"),
    ),
    socket: ("AF_UNIX", "CMSG_SPACE", "recv_fds", "send_fds"),
    reduction: ("DupFd", "recvfds", "sendfds"),
    time: ("clock_gettime", "clock_gettime_ns", "CLOCK_MONOTONIC", "CLOCK_THREAD_CPUTIME_ID"),
}  # fmt: skip
UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty")
NAMES = {"darwin": ("Darwin", "arm64"), "win32": ("Windows", "AMD64")}


class WindowsMap(mmap.mmap):
    """``mmap`` as Windows's Python has it."""

    def __new__(
        cls, fileno: int, length: int, tagname: str | None = None, **how: int
    ) -> WindowsMap:
        assert set(how) <= {"access", "offset"}, how
        return super().__new__(cls, fileno, length, **how)

    @property
    def madvise(self) -> Any:
        raise AttributeError("madvise")


def no_program_library(name: str | None, *arguments: Any, **named: Any) -> Any:
    raise TypeError("LoadLibrary() argument 1 must be str, not None")


def no_linux_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(
        arguments[0], (str, os.PathLike)
    ):
        path = os.fspath(arguments[0])
        if path.startswith(("/proc/", "/sys/")) and "psutil" not in callers():
            raise FileNotFoundError(2, "No such file or directory", path)


def callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_globals.get("__name__", "").partition(".")[0]
        frame = frame.f_back


def become(name: str) -> None:
    missing = [*LINUX_ONLY.items(), *(UNIX_ONLY.items() if name == "win32" else ())]
    for module, names in missing:
        for found in set(names) & set(vars(module)):
            delattr(module, found)
    tempfile._O_TMPFILE_WORKS = False  # found out when torch imported it
    if name == "win32":
        for found in [*vars(mmap)]:
            if found.startswith(("MADV_", "MAP_", "PROT_")):
                delattr(mmap, found)
        mmap.mmap = WindowsMap
        ctypes.CDLL = no_program_library
        for module in UNIX_MODULES:
            sys.modules[module] = None  # to import it is an error
        context._concrete_contexts = {"spawn": context._concrete_contexts["spawn"]}
    sys.addaudithook(no_linux_files)
    sys.platform = name
    system, machine = NAMES[name]
    platform.system, platform.machine = lambda: system, lambda: machine


class Squares(torch.utils.data.Dataset):
    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        if index == self.bad:
            raise ValueError("a bad sample")
        return torch.full((3, 4), index**2), str(index)


def main(name: str) -> None:
    assert psutil.Process().is_running()
    become(name)
    import minato

    assert minato.implementation()[0] == "pure"
    for options in (
        {},
        {"num_workers": 2, "workers": "thread"},
        {"num_workers": 2, "workers": "thread", "order": "arrival", "seed": 1},
        {"num_workers": 2, "workers": "thread", "persistent_workers": True, "timeout": 60},
        {"num_workers": "auto", "workers": "thread", "shuffle": True},
    ):
        loader = minato.DataLoader(Squares(), batch_size=8, **options)
        for _ in range(2):
            seen = []
            for squares, texts in loader:
                indices = [int(text) for text in texts]
                expected = torch.tensor(indices)[:, None, None].pow(2).expand(-1, 3, 4)
                assert torch.equal(squares, expected)
                seen += indices
            assert sorted(seen) == list(range(100))
        assert loader.report().to_dict()
        loader.load_state_dict(loader.state_dict())

    bad = Squares(bad=50)
    for options in ({}, {"num_workers": 2, "workers": "thread"}):
        try:
            loader = minato.DataLoader(bad, batch_size=8, errors="skip", **options)
        except RuntimeError as error:
            assert name == "win32"
            print(f"{name}: {error}")
        else:
            with warnings.catch_warnings(category=minato.MinatoWarning, action="ignore"):
                assert sum(len(texts) for _, texts in loader) == 99
        raised = ""
        try:
            list(minato.DataLoader(bad, batch_size=8, **options))
        except ValueError as error:
            raised = str(error)
        assert "a bad sample" in raised

    for options in (
        {"num_workers": 2},
        {"num_workers": "auto"},
        {"num_workers": 1, "persistent_workers": True},
    ):
        try:
            minato.DataLoader(Squares(), **options)
        except RuntimeError as error:
            print(f"{name}: {error}")
        else:
            raise AssertionError("no error")


if __name__ == "__main__":
    for name in NAMES:
        if os.fork() == 0:
            main(name)
            break
        assert os.wait()[1] == 0, name
