"""Exceptions that are raised later than they occur."""

from __future__ import annotations

import traceback
from typing import NoReturn

from minato.errors import add_note

__all__ = ["Postponed", "not_the_end"]


def not_the_end(source: str, error: StopIteration) -> RuntimeError:
    """Return the RuntimeError that replaces a StopIteration of user code, which would end the epoch (PEP 479)."""
    stopped = RuntimeError(f"{source} raised StopIteration")
    stopped.__cause__ = error
    return stopped


class Postponed:
    """An exception that is raised later, without its frames, which would keep their objects alive.

    The traceback becomes a note of the exception, as text.
    """

    def __init__(self, error: Exception) -> None:
        add_note(error, f"raised earlier:\n{''.join(traceback.format_tb(error.__traceback__))}")
        self._error = error.with_traceback(None)

    def reraise(self) -> NoReturn:
        """Raise the exception."""
        error = self._error
        try:
            raise error
        finally:
            del error, self  # its traceback holds this frame
