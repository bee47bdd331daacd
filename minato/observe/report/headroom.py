"""How fast training could be if data were free."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minato._core.clock import now_ns

__all__ = ["HeadRoom"]

_CACHED = 4
"""Batches that are replayed."""
_WARM_UP = 2
"""Steps of each kind that do not count: compilation, first allocations, the start of workers."""


class HeadRoom:
    """Batches for a training loop: at first from a loader, then a few of these again and again.

    Args:
        batches: Called when iteration starts.
        steps: How many steps of each kind count.

    Raises:
        ValueError: ``steps`` is less than 1.
    """

    def __init__(self, batches: Callable[[], Iterable[Any]], steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} is too few: give at least 1")
        self._batches = batches
        self._steps = steps
        self._loaded_ns: list[int] = []
        self._free_ns: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        kept: list[Any] = []

        def keeping() -> Iterator[Any]:
            for batch in itertools.islice(self._batches(), self._steps + _WARM_UP):
                if len(kept) < _CACHED:
                    kept.append(batch)
                yield batch

        self._loaded_ns, self._free_ns = [], []
        yield from _timed(keeping(), self._loaded_ns)
        yield from _timed(
            itertools.islice(itertools.cycle(kept), len(self._loaded_ns)), self._free_ns
        )

    @property
    def loaded_s(self) -> float:
        """Median time of a step with the loader, from asking for its batch to asking for the next; 0: none counted."""
        return _median(self._loaded_ns)

    @property
    def free_s(self) -> float:
        """The same with batches that are there already."""
        return _median(self._free_ns)

    @property
    def gain(self) -> float:
        """How many times as fast training would be with a perfect loader; near 1: the loader is good enough."""
        return self.loaded_s / self.free_s if self.free_s else 1.0

    def to_dict(self) -> dict[str, float]:
        """The figures as plain data."""
        return {"loaded_s": self.loaded_s, "free_s": self.free_s, "gain": self.gain}

    def __str__(self) -> str:
        if not self.free_s:
            return "Nothing was timed: run a training loop over this first."
        return (
            f"A step takes {1e3 * self.loaded_s:.3g} ms, and would take {1e3 * self.free_s:.3g} ms if data were "
            f"free: {self.gain:.3g} times as fast."
        )


def _timed(batches: Iterator[Any], times: list[int]) -> Iterator[Any]:
    """The batches; the time of each step in ns is added to ``times``."""
    begun_ns = now_ns()
    for batch in batches:
        yield batch
        ended_ns = now_ns()
        times.append(ended_ns - begun_ns)
        begun_ns = ended_ns


def _median(times: list[int]) -> float:
    return statistics.median(times[_WARM_UP:]) / 1e9 if len(times) > _WARM_UP else 0.0
