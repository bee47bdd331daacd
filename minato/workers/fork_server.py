"""A fork server of minato's own: worker processes are forked from a process that has imported what they need.

The server of :mod:`multiprocessing` has imported almost nothing, so that each of its children imports torch, minato and
the main module again, which takes a core for a second or two. This one imports them once, and a worker starts within
milliseconds. It is started with the first worker, serves all loaders of the process, and ends with it.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import context as contexts
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

import torch

from minato._compat import importing_main, set_popen_of_spawning, user_preload

__all__ = ["fork_server_context", "preload", "server_pid"]

_log = logging.getLogger("minato")

_VARIABLE = "MINATO_FORK_SERVER"
"""``0`` in the environment of the training process: multiprocessing's own server is used."""
_PRELOAD = "_MINATO_PRELOAD"
"""In the environment of the server alone: what it imports, as JSON."""


class _Server(forkserver.ForkServer):
    """The server; ``ensure_running`` starts it."""

    _forkserver_pid: int | None

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.set_forkserver_preload([__name__])

    def ensure_running(self) -> None:
        """Start the server, unless it runs."""
        preparation = spawn.get_preparation_data("minato fork server")
        del preparation["authkey"]  # each child gets it with its own preparation
        wanted = {"modules": [*user_preload(), *self.modules], "preparation": preparation}
        os.environ[_PRELOAD] = json.dumps(wanted, default=str)
        try:
            super().ensure_running()
        finally:
            os.environ.pop(_PRELOAD, None)

    @property
    def pid(self) -> int | None:
        """The server's pid; None before its first start."""
        return self._forkserver_pid


_server = _Server()


def _forget_parents_server() -> None:
    # A process can only wait for its own children: a forked child of the program starts a server of its own.
    global _server
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
            reduction.dump(preparation, data)
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
    if type(context) is not ForkServerContext or os.environ.get(_VARIABLE) == "0":
        return context
    _server.modules = sorted({*_server.modules, *filter(None, map(_module_of, used))})
    return _Context()


def _module_of(value: Any) -> str | None:
    name = getattr(value, "__module__", None)
    return name if isinstance(name, str) and name not in ("__main__", "__mp_main__") else None


def preload() -> None:
    """Import what workers need; runs in the server, before it serves."""
    text = os.environ.pop(_PRELOAD, None)
    if text is None or not any("multiprocessing.forkserver" in each for each in sys.orig_argv):
        return
    wanted = json.loads(text)
    preparation = wanted["preparation"]
    spawn.prepare({name: value for name, value in preparation.items() if "_main_" not in name})
    threads = _num_threads()
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
        if _num_threads() <= threads and not _has_device():
            return
        cause = "it started threads or initialised a device"
    # Threads do not survive a fork, but the locks do that they held: start again without the main module.
    _log.warning(
        "the fork server cannot import the main module, so each worker imports it again: %s. Put what the script does "
        "under if __name__ == '__main__'",
        cause,
    )
    kept = {name: value for name, value in preparation.items() if "_main_" not in name}
    own = [name for name in wanted["modules"] if name.startswith("minato.")]
    os.environ[_PRELOAD] = json.dumps({"modules": own, "preparation": kept})
    os.execv(sys.executable, sys.orig_argv)


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _has_device() -> bool:
    return bool(torch.cuda.is_initialized())


if multiprocessing.parent_process() is None:  # in a worker, the variable is not its own
    preload()
