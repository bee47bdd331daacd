"""A terminal that exists in memory, for tests of what is drawn on one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pyte

__all__ = ["Terminal", "terminal"]


class Terminal:
    """What a user of a program would see. It is always read: nobody who writes to it has to wait."""

    def __init__(self, master: int, stream: TextIO, rows: int, columns: int) -> None:
        self.stream = stream
        self._master = master
        self._reading = threading.RLock()
        self._ended = threading.Event()
        self._screen = pyte.HistoryScreen(columns, rows)
        self._feed = pyte.ByteStream(self._screen)
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        with self._reading:
            self._screen.resize(rows, columns)

    def look(self) -> list[str]:
        """The rows of the screen, after all that was written."""
        with self._reading:
            while select.select([self._master], [], [], 0.0)[0]:
                self._feed.feed(os.read(self._master, 1 << 16))
            return [row.rstrip() for row in self._screen.display]

    def _read(self) -> None:
        while not self._ended.wait(0.05):
            self.look()

    @contextmanager
    def read(self) -> Iterator[None]:
        reader = threading.Thread(target=self._read, name="terminal")
        reader.start()
        try:
            yield
        finally:
            self._ended.set()
            reader.join()

    def all(self) -> list[str]:
        """What has scrolled away, and the rows of the screen."""
        with self._reading:
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
            term = Terminal(master, stream, rows, columns)
            with term.read():
                yield term
    finally:
        os.close(master)
