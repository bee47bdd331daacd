"""Virtual time: a heap of what happens when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Calls functions at their time, in order; those of the same time in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action(*arguments)`` in so many seconds."""
        self.events += 1
        heappush(self._heap, (self.now_s + delay_s, self.events, action, arguments))

    def run(self, until_s: float = float("inf")) -> None:
        """Let time pass until nothing is left to happen, or it is ``until_s``."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, arguments = heappop(heap)
            action(*arguments)
