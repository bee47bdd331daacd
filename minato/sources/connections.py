"""Connections that each process opens at first use."""

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
"""Connections of the parent process: their collection here would close them for the parent too."""


class Connections(Generic[T]):
    """Opens connections at first use and keeps them for the next; each process has its own.

    Neither a forked child nor a pickle inherits connections.

    Args:
        open_one: Opens a connection.
        close_one: Closes a connection.
        shared: Whether all threads share one connection; otherwise each lease has a connection of its own.
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
        """A connection for the ``with`` block.

        If the block raises, the connection is closed and not used again. A LookupError is an exception to this: a
        missing key says nothing against the connection.
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

    def opened(self) -> T | None:
        """The connection that all threads share, if this process has opened it; never waits."""
        if self._owner != os.getpid():
            return None
        return next(iter(self._idle), None)

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
        if self._is_inherited(connection):
            return
        if not self._shared:
            with self._lock:
                self._idle.append(connection)

    def _drop(self, connection: T) -> None:
        if self._is_inherited(connection):
            return
        with self._lock:
            if self._shared:
                # Other threads may use it: it closes when it is collected.
                self._idle = [other for other in self._idle if other is not connection]
                return
        with contextlib.suppress(Exception):  # it is broken, and the error of the block says so
            self._close_one(connection)

    def _is_inherited(self, connection: T) -> bool:
        """Whether a child that was forked within a lease ends it; then the parent alone uses the connection."""
        if self._owner == os.getpid():
            return False
        _inherited.append(connection)
        return True

    def close(self) -> None:
        """Close the connections that are not in use."""
        if self._owner != os.getpid():
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._close_one(connection)
