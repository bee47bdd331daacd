"""The file of a trace: events that several processes append to."""

from __future__ import annotations

import errno
import os
import weakref

from minato._support.files import open_lines, open_regular, write_all

__all__ = ["LIMIT_BYTES", "EventFile", "begin", "check"]

LIMIT_BYTES = 256 << 20
"""Size limit of a trace: about half a million samples with three transforms, which the viewer opens easily."""


def begin(path: str) -> None:
    """Truncate or create a trace, and open its array of events, which the format allows to stay open.

    Raises:
        ValueError: The file is no trace; it stays unchanged.
        OSError: It cannot be written.
    """
    descriptor = _opened(path)
    try:
        os.ftruncate(descriptor, 0)
        write_all(descriptor, b"[\n", path)
    finally:
        os.close(descriptor)


def check(path: str) -> None:
    """Create the file with mode 0600 if it does not exist; raises like ``begin``."""
    os.close(_opened(path))


def _opened(path: str) -> int:
    return open_lines(path, b'[\n{"ph":', "a trace (trace=)")


class EventFile:
    """A trace's file, as one thread of one process appends to it.

    Events are appended by a single system call, so that lines do not mix and survive the process. If the file cannot
    be written, recording ends, and ``error`` holds the reason.

    Args:
        limit_bytes: It is not written to any more when it would become larger, but for what other processes write in
            the same microseconds.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        self.error: OSError | None = None
        self.open = False
        """Whether what is appended is written."""
        self.limit_bytes = limit_bytes
        try:
            self._descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self.error = error
            return
        self.open = True
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, lines: str, at_the_end: str) -> None:
        """Add lines, or, if there is no room for them, only this last one and then nothing more."""
        if not self.open:
            return
        data = lines.encode("ascii")
        try:
            if os.fstat(self._descriptor).st_size + len(data) > self.limit_bytes:
                self.open = False
                data = at_the_end.encode("ascii")
            if os.write(self._descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.open, self.error = False, error
