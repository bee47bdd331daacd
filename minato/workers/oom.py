"""What to do when the system ends workers because memory ran out."""

from __future__ import annotations

from minato._system import memory_kills, memory_limit_bytes
from minato.scheduling.prefetch_window import Window

__all__ = ["Shortage"]


class Shortage:
    """Loads less ahead after each such death.

    Args:
        window: Bounds the batches in flight.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._kills = memory_kills()

    def relieve(self) -> str:
        """Look whether it happened since the last look, and act; returns what to tell the user, or nothing."""
        kills = memory_kills()
        if kills == self._kills:
            return ""
        self._kills = kills
        window = self._window
        what = (
            f" Memory ran out: all processes together may take {memory_limit_bytes()} bytes, and batches that are "
            f"loaded ahead memory_budget={window.budget_bytes} of these."
        )
        if window.shrink():
            return f"{what} From now on batches in flight are at most {window.limit}."
        return f"{what} Use fewer workers, smaller batches, or less memory in the dataset."
