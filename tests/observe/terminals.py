"""A terminal that exists in memory, for tests of what is drawn on one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pyte

__all__ = ["Terminal", "terminal"]


class Terminal:
    """What a user would see.

    Attributes:
        stream: A program's standard error on it.
    """

    def __init__(self, master: int, stream: TextIO, rows: int, columns: int) -> None:
        self.stream = stream
        self._master = master
        self._screen = pyte.HistoryScreen(columns, rows)
        self._feed = pyte.ByteStream(self._screen)
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        self._screen.resize(rows, columns)

    def look(self, wait_s: float = 0.0) -> list[str]:
        """The rows of the screen, after all that was written."""
        while select.select([self._master], [], [], wait_s)[0]:
            self._feed.feed(os.read(self._master, 1 << 16))
            wait_s = 0.0
        return [row.rstrip() for row in self._screen.display]

    def all(self) -> list[str]:
        """What has scrolled away, and the rows of the screen."""
        rows = self.look()
        columns = range(self._screen.columns)
        history = ["".join(row[i].data for i in columns) for row in self._screen.history.top]
        return [*(row.rstrip() for row in history), *rows]

    @property
    def region(self) -> tuple[int, int] | None:
        """The rows that scroll, from 0; None: all."""
        margins = self._screen.margins
        return None if margins is None else (margins.top, margins.bottom)


@contextmanager
def terminal(rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w", buffering=1) as stream:
            yield Terminal(master, stream, rows, columns)
    finally:
        os.close(master)
