"""The samples that took longest, by key: kept by each worker in shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["KEPT", "NBYTES", "UNKNOWN", "SlowSample", "Slowest", "slowest_of"]

KEPT: Final = 20
"""So many samples are kept."""
UNKNOWN: Final = -2
"""The stage of a sample whose stages were not timed; -1 is the dataset, from 0 on the transforms."""
_TEXT = 64
_INT64 = 1 << 63
_ROW = np.dtype(
    [
        ("cost_ns", np.int64),
        ("epoch", np.int64),
        ("stage", np.int64),
        ("stage_ns", np.int64),
        ("number", np.int64),
        ("text", f"S{_TEXT}"),  # of a key that is no integer; empty for one that is
    ]
)
NBYTES: Final = KEPT * _ROW.itemsize
"""Bytes of one worker's rows."""


@dataclass(frozen=True)
class SlowSample:
    """What one sample took.

    Attributes:
        key: What the dataset was asked for: an integer, or the text of another key, cut after 64 bytes.
        cost_ns: Its active time, waiting excluded.
        epoch: The epoch in which it took that long.
        stage: Which stage took most of it: a transform's number, -1 for the dataset, ``UNKNOWN``.
        stage_ns: How long that took.
    """

    key: int | str
    cost_ns: int
    epoch: int
    stage: int
    stage_ns: int


class Slowest:
    """Rows that one worker writes; of each key the slowest time counts.

    Args:
        buffer: Writable memory of :data:`NBYTES` bytes, aligned to 8; zeros are no rows. None: memory of its own.
    """

    def __init__(self, buffer: Any = None) -> None:
        memory = bytearray(NBYTES) if buffer is None else buffer
        self._rows = np.frombuffer(memory, _ROW)
        self._shared_costs = self._rows["cost_ns"]
        self._costs: list[int] = []  # the writer's own copy, which is quicker to look at
        self._names: list[tuple[int, bytes]] = []
        self.floor_ns = 0
        """What a sample must exceed to be kept; of use to the writer only."""

    def offer(self, key: Any, epoch: int, cost_ns: int, stage: int, stage_ns: int) -> None:
        """Keep a sample if it is among the slowest."""
        costs, names, name = self._costs, self._names, _named(key)
        if not costs:  # a worker that has died may have left some
            costs += self._shared_costs.tolist()
            names += zip(self._rows["number"].tolist(), self._rows["text"].tolist(), strict=True)
        row = next((i for i in range(KEPT) if names[i] == name and costs[i]), -1)
        if row < 0:
            row = costs.index(min(costs))
        if cost_ns > costs[row]:
            self._shared_costs[row] = 0  # whoever reads now does not find half a row
            self._rows[row] = (0, epoch, stage, stage_ns, *name)
            self._shared_costs[row] = costs[row] = cost_ns
            names[row] = name
        self.floor_ns = min(costs)

    def read(self) -> list[SlowSample]:
        """What is kept, in no order."""
        rows = self._rows.copy()
        return [
            SlowSample(text.decode(errors="replace") if text else number, cost_ns, *rest)
            for cost_ns, *rest, number, text in rows[rows["cost_ns"] > 0].tolist()
        ]


def slowest_of(samples: Iterable[SlowSample]) -> list[SlowSample]:
    """The slowest of several workers and epochs, each key once, the slowest first."""
    found: dict[int | str, SlowSample] = {}
    for sample in samples:
        known = found.get(sample.key)
        if known is None or sample.cost_ns > known.cost_ns:
            found[sample.key] = sample
    return sorted(found.values(), key=lambda sample: -sample.cost_ns)[:KEPT]


def _named(key: Any) -> tuple[int, bytes]:
    if type(key) is int and -_INT64 <= key < _INT64:
        return key, b""
    return 0, (repr(key).encode()[:_TEXT].rstrip(b"\0") or b"?")
