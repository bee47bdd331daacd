"""Connections that are opened where and when they are needed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

__all__ = ["Connections"]

T = TypeVar("T")

_inherited: list[Any] = []
"""Connections of the parent process: were they collected here, they would be closed for the parent too."""


class Connections(Generic[T]):
    """Opens connections at first use, in each process its own, and keeps them for the next use.

    Neither a forked child nor a pickle takes connections along.

    Args:
        open_one: Opens one.
        close_one: Closes one.
        shared: Whether one connection serves all threads at once; otherwise each use has one for itself.
    """

    def __init__(
        self, open_one: Callable[[], T], close_one: Callable[[T], object], shared: bool = False
    ) -> None:
        self._open_one = open_one
        self._close_one = close_one
        self._shared = shared
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[T] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_open_one", "_close_one", "_shared")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @contextmanager
    def lease(self) -> Iterator[T]:
        """Have a connection for the ``with`` block.

        One in which the block raised is closed and not used again, unless it was a LookupError: that says that
        something is not there, which takes a sound connection.
        """
        connection = self._take()
        try:
            yield connection
        except LookupError:
            self._give_back(connection)
            raise
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(connection)

    def _take(self) -> T:
        if self._owner != os.getpid():
            _inherited.append(self._idle)
            self._reset()
        with self._lock:
            if self._idle:
                return self._idle[0] if self._shared else self._idle.pop()
            if self._shared:
                self._idle.append(self._open_one())
                return self._idle[0]
        return self._open_one()

    def _give_back(self, connection: T) -> None:
        if not self._shared:
            with self._lock:
                self._idle.append(connection)

    def _drop(self, connection: T) -> None:
        with self._lock:
            if self._shared:
                # Others still use it: it is closed when the last of them lets go of it.
                self._idle = [other for other in self._idle if other is not connection]
                return
        with contextlib.suppress(Exception):  # it is broken, as an earlier error has reported
            self._close_one(connection)

    def close(self) -> None:
        """Close what is not in use."""
        if self._owner != os.getpid():
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._close_one(connection)
