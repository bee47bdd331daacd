"""The slowest samples by index, kept by each worker in shared memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final, NamedTuple

from minato._support.text import text_of
from minato._support.values import integer_of

__all__ = ["KEPT", "NBYTES", "UNKNOWN", "SlowSample", "SlowestSamples", "slowest_of"]

KEPT: Final = 20
"""Number of samples that are kept."""
UNKNOWN: Final = -2
"""The stage of a sample whose stages were not timed; -1 is the dataset, from 0 on the transforms."""
_TEXT = 64
_INT64 = 1 << 63
_ROW = struct.Struct(f"5q{_TEXT}s")
"""Cost in ns, epoch, stage, its time in ns, index; and the text of an index that is no integer."""
_ROW_WORDS = _ROW.size // 8
NBYTES: Final = KEPT * _ROW.size
"""Bytes of one worker's rows."""


class SlowSample(NamedTuple):
    """The cost of one sample.

    Attributes:
        key: The index in the dataset: an integer, or the text of another index, cut after 64 bytes.
        cost_ns: Its active time, waiting excluded.
        epoch: The epoch in which it took that long.
        stage: Its slowest stage: a transform's number, -1 for the dataset, or ``UNKNOWN``.
        stage_ns: The time of that stage.
    """

    key: int | str
    cost_ns: int
    epoch: int
    stage: int
    stage_ns: int


class SlowestSamples:
    """Rows that one worker writes; of each index the slowest time counts.

    Args:
        buffer: Writable memory of :data:`NBYTES` bytes, aligned to 8; zeros are no rows. None: memory of its own.
    """

    def __init__(self, buffer: Any = None) -> None:
        self._memory = memoryview(bytearray(NBYTES) if buffer is None else buffer).cast("B")
        self._shared = self._memory.cast("q")
        self._costs: list[int] = []  # the writer's own copy, which is faster to read
        self._names: list[tuple[int, bytes]] = []
        self._row_of: dict[tuple[int, bytes], int] = {}
        self.floor_ns = 0
        """The cost that a sample must exceed to be kept; valid in the writer only."""

    def offer(self, index: object, epoch: int, cost_ns: int, stage: int, stage_ns: int) -> None:
        """Keep a sample if it is among the slowest."""
        if not self._costs:
            self._take_over()
        costs, name = self._costs, _identity(index)
        row = self._row_of.get(name)
        if row is None:
            row = costs.index(min(costs))
        if cost_ns <= costs[row]:
            return
        self._shared[row * _ROW_WORDS] = 0  # a concurrent reader must not see half a row
        _ROW.pack_into(self._memory, row * _ROW.size, 0, epoch, stage, stage_ns, *name)
        self._shared[row * _ROW_WORDS] = cost_ns
        self._row_of.pop(self._names[row], None)
        self._row_of[name], self._names[row], costs[row] = row, name, cost_ns
        self.floor_ns = min(costs)

    def _take_over(self) -> None:
        """Continue with the rows of an earlier worker, which may have died."""
        rows = list(_ROW.iter_unpack(self._memory))
        costs = [cost_ns for cost_ns, *_ in rows]
        names = [(number, text.rstrip(b"\0")) for *_, number, text in rows]
        row_of = {name: row for row, name in enumerate(names) if costs[row]}
        # At once: an interruption leaves no half.
        self._costs, self._names, self._row_of = costs, names, row_of
        self.floor_ns = min(costs)

    def read(self) -> list[SlowSample]:
        """The samples, unordered."""
        return [
            SlowSample(
                text.rstrip(b"\0").decode(errors="replace") if text[0] else number, cost_ns, *rest
            )
            for cost_ns, *rest, number, text in _ROW.iter_unpack(bytes(self._memory))
            if cost_ns > 0
        ]


def slowest_of(samples: Iterable[SlowSample]) -> list[SlowSample]:
    """The slowest of several workers and epochs, each index once, the slowest first."""
    found: dict[int | str, SlowSample] = {}
    for sample in sorted(samples, key=attrgetter("cost_ns"), reverse=True):
        found.setdefault(sample.key, sample)
    return list(found.values())[:KEPT]


def _identity(index: object) -> tuple[int, bytes]:
    number = integer_of(index)
    if number is not None and -_INT64 <= number < _INT64:
        return number, b""
    return 0, (text_of(index).encode()[:_TEXT].rstrip(b"\0") or b"?")
