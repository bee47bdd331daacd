"""Exceptions that are raised later than they came."""

from __future__ import annotations

import traceback
from typing import NoReturn

from minato.errors import add_note

__all__ = ["Postponed", "not_the_end"]


def not_the_end(source: str, error: StopIteration) -> RuntimeError:
    """What to raise where code of the user's raised StopIteration, which would end the epoch early (as by PEP 479)."""
    stopped = RuntimeError(f"{source} raised StopIteration")
    stopped.__cause__ = error
    return stopped


class Postponed:
    """An exception that waits for its turn, without the frames it passed: they would keep alive all that they hold.

    What they would have shown becomes a note of the exception.
    """

    def __init__(self, error: Exception) -> None:
        add_note(error, f"raised earlier:\n{''.join(traceback.format_tb(error.__traceback__))}")
        self._error = error.with_traceback(None)

    def reraise(self) -> NoReturn:
        """Raise it, once."""
        error = self._error
        del self._error
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
