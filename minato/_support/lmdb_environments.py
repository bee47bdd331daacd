"""LMDB environments of this process: a process may open each of them only once, and must not use its parent's."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minato._fork_safety import held_off_forks, interrupted_calls

__all__ = ["environment", "one_at_a_time"]

_lock = threading.RLock()
_opened: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""By device and inode, as several paths may lead to a file. An environment closes when nothing refers to it."""
_interrupted: dict[tuple[int, int], Any] = {}
"""Environments of the parent in a child whose fork has interrupted calls: closing one would wait for them forever."""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one thread of this process call LMDB, and hold forks off meanwhile: a child would wait for it forever.

    Opening an environment or a database beside other calls on the same file, or closing it, hangs threads.
    """
    with held_off_forks(), _lock:
        yield


def environment(path: Path, **how: Any) -> Any:
    """The environment at a path, opened as ``lmdb.open`` does with these arguments unless this process has it open.

    Hold forks off in each call of an environment, and open its databases in ``one_at_a_time``. Drop the last reference
    to one that may be opened again in there, too. A forked child drops its parent's transactions first of all.

    Raises:
        FileNotFoundError: There is none, and ``create=False``.
        lmdb.Error: It cannot be opened.
    """
    import lmdb  # before the lock: a thread may wait for another that imports it

    with _lock:
        file = path / "data.mdb" if how.get("subdir", True) else path
        found = None
        if file.exists():
            found = _opened.get(_identity(file))
            if _identity(file) in _interrupted:
                raise lmdb.Error(
                    f"{str(path)!r} cannot be opened: this process was forked while a thread of its parent was in a "
                    "call of LMDB or SQLite that took too long; start it by multiprocessing_context='forkserver'"
                )
        elif not how.get("create", True):
            raise FileNotFoundError(file)
        if found is None:
            found = lmdb.open(str(path), **how)
            _opened[_identity(file)] = found
        return found


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    if interrupted_calls():
        _interrupted.update(_opened)
    else:
        for inherited in list(_opened.values()):
            inherited.close()  # py-lmdb opens no file twice; sources have dropped the transactions that this would end
    _opened.clear()


os.register_at_fork(after_in_child=_after_fork)
