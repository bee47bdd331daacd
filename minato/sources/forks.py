"""A library whose threads do not survive a fork (obstore's runtime is one for the whole process)."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["in_a_fork", "used_here"]

T = TypeVar("T")

_used = False
_parent_used = False


def used_here() -> None:
    """Say that this process uses the library.

    Raises:
        RuntimeError: It was forked from one that did, so that the call would hang.
    """
    global _used
    if _parent_used:
        raise RuntimeError(
            "this process was forked from one that had read objects already, and obstore's threads do not come along: "
            "give the loader multiprocessing_context='forkserver' or workers='thread', or read nothing before "
            "its workers start"
        )
    _used = True


def _after_fork() -> None:
    global _parent_used
    _parent_used = _used


os.register_at_fork(after_in_child=_after_fork)


def in_a_fork(call: Callable[[], T]) -> T:
    """Call a function in a child process, so that this one can still be forked afterwards.

    Where this process uses the library already, it calls it itself. The result, or what was raised, is pickled.
    """
    if _used or _parent_used or sys.platform != "linux" or _runtime_runs():
        return call()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(_outcome(call), pipe)
        finally:
            os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            outcome: tuple[T, BaseException | None] = pickle.load(pipe)
    finally:
        os.waitpid(child, 0)
    result, error = outcome
    if error is not None:
        raise error
    return result


def _runtime_runs() -> bool:
    """Whether this process has threads of such a runtime, started by whomever."""
    names = Path("/proc/self/task").glob("*/comm")
    return any(name.read_text(errors="replace").startswith("tokio") for name in names)


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the library's own classes need not travel
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return None, error
