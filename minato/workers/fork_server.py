"""A fork server of minato's own: worker processes are forked from a process that has imported what they need.

The server of :mod:`multiprocessing` does not import the main module (Python 3.11 to 3.13.0), checks nothing of what
it preloads, and gives its children the environment of its own start. This one imports the main module, torch and minato
once, unless that opens files or starts threads, which forked children cannot share. It is started when the first loader
is built, or with the first worker where that is not safe, serves all loaders of the process, and ends with it.

Time until the first batch of 12 workers, of a script that imports pandas and scipy.stats: 8.4 s, against 24.3 s with
the server of :mod:`multiprocessing` that preloads torch and minato. Of a script that imports torch alone: 5.5 s against
5.0 s (the shortest of at least four runs in turn; Python 3.11, two cores that other programs used too).
"""

from __future__ import annotations

import fcntl
import gc
import inspect
import io
import json
import logging
import multiprocessing
import os
import signal
import stat
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import context as contexts
from multiprocessing import (
    forkserver,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

import torch

from minato._compat import (
    hold_server_key,
    importing_main,
    set_popen_of_spawning,
    user_preload,
)
from minato._support.main_module import is_guarded
from minato._support.objects import attribute

__all__ = ["fork_server_context", "preload", "server_pid", "start_early"]

_log = logging.getLogger("minato")

_VARIABLE = "MINATO_FORK_SERVER"
"""``0`` in the environment of the training process: multiprocessing's own server is used."""
_PRELOAD = "_MINATO_PRELOAD"
"""In the environment of the server alone: what it imports, as JSON."""
_WORKER = "minato.workers.worker_process"
"""The module with the main function of the workers."""
_FORK_SAFE = {"jemalloc_bg_thd"}
"""Threads, by the kernel's name, that their library (pyarrow's jemalloc) starts again in a forked child."""


class _Server(forkserver.ForkServer):
    """The server; ``ensure_running`` starts it."""

    _forkserver_pid: int | None
    _forkserver_alive_fd: int | None

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = [_WORKER]
        self.set_forkserver_preload([__name__])

    def let_go(self) -> None:
        """Close a forked child's copy of the pipe whose end ends the server."""
        if self._forkserver_alive_fd is not None:
            os.close(self._forkserver_alive_fd)

    def ensure_running(self) -> None:
        """Start the server, unless it runs."""
        preparation = spawn.get_preparation_data("minato fork server")
        del preparation["authkey"]  # each child gets it with its own preparation
        wanted = {"modules": [*user_preload(), *self.modules], "preparation": preparation}
        resource_tracker.ensure_running()  # its start unblocks the signal
        os.environ[_PRELOAD] = json.dumps(wanted, default=str)
        # Ctrl-C goes to all processes of the terminal. The server ignores it once it serves; until then it is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.environ.pop(_PRELOAD, None)

    @property
    def pid(self) -> int | None:
        """The server's pid; None before its first start."""
        return self._forkserver_pid


_server = _Server()


def _forget_parents_server() -> None:
    # A process can only wait for its own children: a forked child of the program starts a server of its own.
    global _server
    _server.let_go()
    _server = _Server()


os.register_at_fork(after_in_child=_forget_parents_server)


def server_pid() -> int | None:
    """The pid of the fork server; None if no worker was started with it."""
    return _server.pid


class _Popen(popen_forkserver.Popen):
    """A child of our server instead of multiprocessing's."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        data = io.BytesIO()
        set_popen_of_spawning(self)
        try:
            reduction.dump(_Preparation(preparation), data)
            reduction.dump(process_obj, data)
        finally:
            set_popen_of_spawning(None)
        self.sentinel, write_end = _server.connect_to_new_process(self._fds)
        # The child sees by the other end that this process has ended.
        kept = os.dup(write_end)
        self.finalizer = util.Finalize(self, _close_all, (kept, self.sentinel))
        with open(write_end, "wb") as pipe:
            pipe.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Preparation:
    """Arrives as what a child prepares itself with, and gives it this process's environment instead of the server's."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_environment, (self._data, dict(os.environ))


def _in_environment(data: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    return data


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class ForkServerProcess(contexts.ForkServerProcess):  # the name that datasets see
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # the name that multiprocessing calls
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = ForkServerProcess


def fork_server_context(context: BaseContext, used: Iterable[Any]) -> BaseContext:
    """The context that starts the workers of a loader: for ``forkserver`` one with our server.

    Args:
        context: The loader's.
        used: Objects whose modules the workers need: their main function, dataset, transforms.
    """
    if not _serves(context):
        return context
    _name_modules(used)
    return _Context()


def start_early(context: BaseContext | None, used: Iterable[Any]) -> None:
    """Start the server, without waiting for it, while the program still prepares its training.

    Does nothing where the workers do not come from the server, or where an import of the main module in another process
    may not be safe: outside of ``if __name__ == "__main__"``.

    Args:
        context: The loader's; None: the default one, which this call does not fix.
        used: As in :func:`fork_server_context`.
    """
    if not _serves(context) or multiprocessing.current_process().daemon:
        return
    # RuntimeError: a child is importing the main module. Other errors are raised when the iteration starts.
    with suppress(RuntimeError, OSError):
        if _main_is_safe():
            _name_modules(used)
            _server.ensure_running()


def _serves(context: BaseContext | None) -> bool:
    if os.environ.get(_VARIABLE) == "0":
        return False
    if context is not None:
        return type(context) is ForkServerContext
    chosen = multiprocessing.get_start_method(allow_none=True)
    return (chosen or multiprocessing.get_all_start_methods()[0]) == "forkserver"


def _main_is_safe() -> bool:
    """Whether the running statement of the main module is its guard, or no child imports the main module."""
    main = sys.modules["__main__"]
    if main.__name__ == "__mp_main__":  # this child has imported it
        return True
    if not any("_main_" in name for name in spawn.get_preparation_data("")):
        return True
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(main):
            return is_guarded(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return False


def _name_modules(used: Iterable[Any]) -> None:
    _server.modules = sorted({*_server.modules, *filter(None, map(_module_of, used))})


def _module_of(value: object) -> str | None:
    name = attribute(value, "__module__")
    return name if isinstance(name, str) and name not in ("__main__", "__mp_main__") else None


def preload() -> None:
    """Import what workers need; runs in the server, before it serves."""
    text = os.environ.pop(_PRELOAD, None)
    if text is None or not any("multiprocessing.forkserver" in each for each in sys.orig_argv):
        return
    _import(json.loads(text))
    _flush()  # a child would write what is buffered once more
    gc.freeze()  # the collector of a child would write to every object, and so copy the pages that it shares
    # A Ctrl-C that came meanwhile is dropped; from here on the server ignores it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


def _import(wanted: dict[str, Any]) -> None:
    preparation = wanted["preparation"]
    spawn.prepare({name: value for name, value in preparation.items() if "_main_" not in name})
    before, opened = _threads(), set(_files())
    try:
        with importing_main():
            spawn.prepare(preparation)
            for name in wanted["modules"]:
                with suppress(ImportError):  # the worker raises it
                    __import__(name)
    except BaseException as error:
        told = str(error).strip().splitlines()
        cause = f"it raised {type(error).__name__}: {told[0] if told else 'no message'}"
    else:
        files = [path for descriptor, path in _files().items() if descriptor not in opened]
        if _has_device():
            cause = "it initialised a device"
        elif files:
            cause = f"it opened {files[0]}, whose position or connection all workers would share"
        elif (_threads() - before) and (_left_by_a_fork() - before):
            cause = "it started threads"
        else:
            return
    # Threads do not survive a fork, but the locks that they held do. What is open is one thing for all children, as is
    # its position. Start again without the main module.
    _log.warning(
        "the fork server cannot import the main module, so each worker imports it again: %s. Put what the script does "
        "under if __name__ == '__main__'",
        cause,
    )
    kept = {name: value for name, value in preparation.items() if "_main_" not in name}
    own = [name for name in wanted["modules"] if name.startswith("minato.")]
    os.environ[_PRELOAD] = json.dumps({"modules": own, "preparation": kept})
    _flush()
    hold_server_key()
    os.execv(sys.executable, sys.orig_argv)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def _threads() -> set[int]:
    """The threads of this process, by the kernel's numbers, without those that are safe."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() not in _FORK_SAFE:
                found.add(int(task.name))
    return found


def _files() -> dict[int, str]:
    """The open files and connections of this process that forked children would use together, by descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the directory itself
            descriptor, path = int(entry.name), os.readlink(entry)
            mode = os.fstat(descriptor).st_mode
            appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND  # a log
            is_memory = path.startswith(("/memfd:", "/dev/shm/"))
            if not (stat.S_ISCHR(mode) or stat.S_ISDIR(mode) or appends or is_memory):
                found[descriptor] = path
    return found


def _left_by_a_fork() -> set[int]:
    """The threads that remain after a fork: OpenBLAS, which NumPy and SciPy bring, ends its own before each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CPython 3.12 warns of forks where threads run
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _threads()


def _has_device() -> bool:
    return bool(torch.cuda.is_initialized())


if multiprocessing.parent_process() is None:  # in a worker, the variable is not its own
    preload()
