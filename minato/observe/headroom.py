"""How fast training would be with an ideal loader."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minato._core import now_ns
from minato._support.values import digits, seconds
from minato.checks import given_whole

_REPLAYED = 4
_WARM_UP = 2
"""Steps of each kind that are not timed: compilation, first allocations, the start of workers."""


class Headroom:
    """Batches for a training loop: first from a loader, then a few of them replayed.

    ValueError, TypeError: ``steps`` is no integer of at least 1.
    """

    def __init__(self, batches: Callable[[], Iterable[object]], steps: int) -> None:
        self._batches, self._steps = batches, given_whole("steps", steps, 1)
        self._loaded_ns: list[int] = []
        self._replayed_ns: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        kept: list[Any] = []

        def loaded() -> Iterator[Any]:
            for batch in itertools.islice(self._batches(), self._steps + _WARM_UP):
                if len(kept) < _REPLAYED:
                    kept.append(batch)
                yield batch

        self._loaded_ns, self._replayed_ns = [], []
        yield from _timed(loaded(), self._loaded_ns)
        replayed = itertools.islice(itertools.cycle(kept), len(self._loaded_ns))
        yield from _timed(replayed, self._replayed_ns)

    @property
    def loaded_s(self) -> float:
        """Median time of a step with the loader, from one request for a batch to the next; 0 if none was timed."""
        return _median(self._loaded_ns)

    @property
    def replayed_s(self) -> float:
        """The same with replayed batches."""
        return _median(self._replayed_ns)

    @property
    def speedup(self) -> float:
        """Speed-up of training by an ideal loader; near 1 if the loader is fast enough."""
        return self.loaded_s / self.replayed_s if self.replayed_s else 1.0

    def to_dict(self) -> dict[str, float]:
        """The figures as plain data."""
        return {name: getattr(self, name) for name in ("loaded_s", "replayed_s", "speedup")}

    def __repr__(self) -> str:
        if not self.replayed_s:
            return f"<Headroom of {self._steps} steps: not timed>"
        return f"<Headroom: {seconds(self.loaded_s)} a step, ideal {seconds(self.replayed_s)}>"

    def __str__(self) -> str:
        if not self.replayed_s:
            return (
                "No step was timed: run a training loop of more than two batches over this object."
            )
        return (
            f"A step takes {seconds(self.loaded_s)}, and {seconds(self.replayed_s)} with an ideal loader: "
            f"at most {digits(self.speedup)}× faster."
        )


def _timed(batches: Iterator[object], times: list[int]) -> Iterator[Any]:
    """The batches; appends the time of each step in ns to ``times``."""
    start_ns = now_ns()
    for batch in batches:
        yield batch
        end_ns = now_ns()
        times.append(end_ns - start_ns)
        start_ns = end_ns


def _median(times: list[int]) -> float:
    return statistics.median(times[_WARM_UP:]) / 1e9 if len(times) > _WARM_UP else 0.0
