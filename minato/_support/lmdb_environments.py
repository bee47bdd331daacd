"""LMDB environments of this process: a process may open each of them only once, and must not use its parent's."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

__all__ = ["environment"]

_lock = threading.Lock()
_opened: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""By device and inode, as several paths may lead to a file. An environment closes when nothing refers to it."""


def environment(path: Path, **how: Any) -> Any:
    """The environment at a path, opened as ``lmdb.open`` does with these arguments unless this process has it open.

    Hold forks off in each call of an environment (``held_off_forks``): a child would wait for it forever.

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
    _lock = threading.Lock()
    for inherited in list(_opened.values()):
        inherited.close()  # py-lmdb sees that it belongs to the parent, and only forgets it
    _opened.clear()


os.register_at_fork(after_in_child=_after_fork)
