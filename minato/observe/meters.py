"""What samples cost: measured by each worker in shared memory, and summed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from minato._core import HISTOGRAM_NBYTES, Histogram
from minato._core.segment import Memory
from minato._support.items import Item
from minato._support.values import integer_of, text_of

EMPTY: Final = Histogram()
"""An empty, read-only histogram: many that stay empty share it instead of six kilobytes each."""
KEPT: Final = 20  # number of the slowest samples that are kept
UNKNOWN: Final = -2
"""The stage of a sample whose stages were not timed; -1 is the dataset, from 0 on the transforms."""
_LEAST_NS = 20_000
"""Several cheaper samples may share one reading of the clock: nobody knows which of them was slow."""
_HALVINGS = 12  # a share is found to 1 / 2**12
_TEXT = 64
_INT64 = 1 << 63
_ROW = struct.Struct(f"5q{_TEXT}s")
"""Cost in ns, epoch, stage, its time in ns, index; and the text of an index that is no integer."""
_ROW_WORDS = _ROW.size // 8
_SLOWEST_NBYTES = KEPT * _ROW.size
_FIXED = ("total", "cpu", "bytes", "transforms", "dataset", "deferred", "window_full", "reading")
_COUNT = attrgetter("count")


# ---- histograms -----------------------------------------------------------------------------


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of several histograms."""
    whole = Histogram()
    for histogram in histograms:
        whole.merge(histogram)
    return whole


def share_above(values: Histogram, limit: int) -> float:
    """The share of recorded values that are larger than ``limit``, from 0 to 1, to about a four-thousandth.

    Values in the same bucket as the limit (1/32 of it) count as one with its middle.
    """
    if values.count == 0 or values.max <= limit:
        return 0.0
    below, above = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        if values.percentile(middle) > limit:
            above = middle
        else:
            below = middle
    # A quantile is a value that occurs, so even the smallest may be above the limit.
    return 1.0 if below == 0.0 else 1.0 - above


# ---- the slowest samples --------------------------------------------------------------------


class SlowSample(NamedTuple):
    """The cost of one sample.

    Attributes:
        key: The index in the dataset: an integer, or the text of another index or of an item, cut after 64 bytes.
        cost_ns: Its active time, waiting excluded.
        stage: Its slowest stage: a transform's number, -1 for the dataset, or ``UNKNOWN``.
    """

    key: int | str
    cost_ns: int
    epoch: int
    stage: int
    stage_ns: int


class SlowestSamples:
    """Rows that one worker writes; of each index the slowest time counts.

    Args:
        buffer: Writable memory of ``KEPT`` rows, aligned to 8; zeros are no rows. None: memory of its own.
    """

    def __init__(self, buffer: Memory | None = None) -> None:
        self._memory = memoryview(bytearray(_SLOWEST_NBYTES) if buffer is None else buffer).cast(
            "B"
        )
        self._shared = self._memory.cast("q")
        self._costs: list[int] = []  # the writer's own copy, which is faster to read
        self._names: list[tuple[int, bytes]] = []
        self._row_of: dict[tuple[int, bytes], int] = {}
        self.floor_ns = _LEAST_NS
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
        if costs[row]:  # an empty row has the name of index 0
            self._row_of.pop(self._names[row], None)
        self._row_of[name], self._names[row], costs[row] = row, name, cost_ns
        self.floor_ns = max(min(costs), _LEAST_NS)

    def _take_over(self) -> None:
        """Continue with the rows of an earlier worker, which may have died."""
        rows = list(_ROW.iter_unpack(self._memory))
        costs = [cost_ns for cost_ns, *_ in rows]
        names = [(number, text.rstrip(b"\0")) for *_, number, text in rows]
        row_of = {name: row for row, name in enumerate(names) if costs[row]}
        # At once: an interruption leaves no half.
        self._costs, self._names, self._row_of = costs, names, row_of
        self.floor_ns = max(min(costs), _LEAST_NS)

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
    text = str(index) if type(index) is Item else text_of(index)
    return 0, (text.encode()[:_TEXT].rstrip(b"\0") or b"?")


# ---- the meters of a worker, and their sum --------------------------------------------------


class Meters:
    """The histograms that one worker writes.

    Attributes:
        total: Active time of each sample in ns: all its parts, waiting excluded.
        cpu: CPU time of the worker's thread for it, in ns.
        size: Bytes of the sample before the transforms.
        transforms: Number of applied transforms.
        dataset: Time of ``dataset[i]`` in ns.
        deferred: Time from the deferral of a sample to its resumption, in ns.
        window_full: Idle time in ns in which the prefetch window was full, so that no batch could be opened.
        reading: Time of each item of a reader in ns, the same for all of one call; not part of ``total``.
        steps: Time of each transform in ns.

    Args:
        buffer: Writable memory of ``Meters.nbytes(num_steps)`` bytes, aligned to 8; zeros are empty meters.
            None: private memory.
    """

    def __init__(self, num_steps: int, buffer: Memory | None = None) -> None:
        count = len(_FIXED) + num_steps
        nbytes = self.nbytes(num_steps)
        memory = memoryview(bytearray(nbytes) if buffer is None else buffer).cast("B")
        self.all = [
            Histogram(memory[i * HISTOGRAM_NBYTES : (i + 1) * HISTOGRAM_NBYTES])
            for i in range(count)
        ]
        """In this order: total, cpu, size, transforms, dataset, deferred, window_full, reading, then the steps."""
        self.total, self.cpu, self.size, self.transforms, self.dataset, *rest = self.all
        self.deferred, self.window_full, self.reading, *self.steps = rest
        self.slowest = SlowestSamples(memory[count * HISTOGRAM_NBYTES :])

    @property
    def source(self) -> Histogram:
        """The time of the dataset for each sample, or of a reader for each item."""
        return self.reading if self.reading.count else self.dataset

    @staticmethod
    def nbytes(num_steps: int) -> int:
        """Bytes of one worker's meters: about 6 KiB for each transform and 54 KiB for the rest."""
        return (len(_FIXED) + num_steps) * HISTOGRAM_NBYTES + _SLOWEST_NBYTES


class CostStats:
    """The costs of the samples of a run.

    Args:
        step_names: A name of each transform.
    """

    def __init__(self, step_names: Sequence[str] = ()) -> None:
        steps = (f"{number} {name}" for number, name in enumerate(step_names))
        self.run = dict.fromkeys((*_FIXED, *steps), EMPTY)
        """The histograms by name: the fixed ones, then ``0 First``, ``1 Second`` …"""
        self._counts = [0] * len(self.run)

    def update(self, workers: Sequence[Meters]) -> dict[str, Histogram]:
        """Read the meters of all workers; a histogram that was read before stays as it was.

        Returns ``run``, which another thread may replace by an older one.
        """
        rows = [list(map(_COUNT, worker.all)) for worker in workers]
        counts = rows[0] if len(rows) == 1 else [*map(sum, zip(*rows, strict=True))]
        run, known = self.run, self._counts
        if counts != known:
            run = {**run}
            for place, name in enumerate(run):
                if counts[place] != known[place]:
                    each = [worker.all[place] for worker in workers]
                    run[name] = (each[0] if len(each) == 1 else merged(each)).snapshot()
            self.run, self._counts = run, [each.count for each in run.values()]
        return run
