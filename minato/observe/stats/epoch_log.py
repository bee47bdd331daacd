"""What the training process notes of a loader's epochs: how long it waits, what it gets, how things stand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from minato._core.clock import now_ns
from minato._core.histogram import Histogram
from minato.observe.stats.counters import Readings
from minato.observe.stats.reservoir import Reservoir
from minato.observe.stats.slowest import SlowSample, slowest_of
from minato.observe.stats.snapshot import Glance, Labour, Machine, Standing, Watcher

__all__ = ["EpochNotes", "Gauges", "Journal", "TimeLine"]

_KEPT_EPOCHS = 64
"""So many finished epochs are kept one by one; the run is the sum of all."""
_FIRST_INTERVAL_NS = 20_000_000
_MOST_POINTS = 256
"""When a time line holds so many points, every second one is dropped, and it looks half as often from then on."""


class Gauges(Protocol):
    """The counters of an engine, which must be readable after it has ended."""

    def readings(self) -> Readings:
        """What they say now."""

    def slowest(self) -> list[SlowSample]:
        """The slowest samples of each worker."""

    def skipped(self) -> Collection[Any]:
        """The keys of samples that were left out."""

    def decision(self) -> Any:
        """What counts as slow now."""

    def labour(self) -> Labour:
        """What the workers have done; may be asked in any thread."""

    @property
    def held_by_budget(self) -> bool:
        """Whether the memory budget keeps more batches from being opened."""


class TimeLine:
    """How a loader stood over time, in a bounded number of points.

    Attributes:
        points: ``(ns since the epoch's begin, batches and ns waited so far, Standing)``, the oldest first.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, int, int, Standing]] = []
        self._interval_ns = _FIRST_INTERVAL_NS
        self.due_ns = 0
        """When the next point is due, in ns since the epoch's begin."""

    def add(self, at_ns: int, batches: int, waited_ns: int, standing: Standing) -> None:
        """Note how things stand."""
        self.points.append((at_ns, batches, waited_ns, standing))
        if len(self.points) >= _MOST_POINTS:
            del self.points[::2]
            self._interval_ns *= 2
        self.due_ns = at_ns + self._interval_ns


@dataclass
class EpochNotes:
    """One epoch as the training process sees it.

    Attributes:
        epoch: Its number.
        wall_ns: From its begin to the last time that ``next()`` was left.
        start_ns: How long ``iter()`` took to start it.
        first_ns: How long ``next()`` took for the first batch.
        waits: Time inside each ``next()``, in ns.
        steps: Time between two of them, in ns.
        readings: Counters of the workers, and of all of the above.
        line: How it stood over time.
        machine: What it did, as of the last reading.
        decision: What counted as slow in the end (a ``scheduler.policy.Decision``).
        held_by_budget: Whether the memory budget kept more batches from being opened.
        finished: Whether it came to its end.
    """

    epoch: int
    wall_ns: int = 0
    start_ns: int = 0
    first_ns: int = 0
    waits: Histogram = field(default_factory=Histogram)
    steps: Histogram = field(default_factory=Histogram)
    readings: Readings = field(default_factory=Readings)
    line: TimeLine = field(default_factory=TimeLine)
    machine: Machine = field(default_factory=Machine)
    decision: Any = None
    held_by_budget: bool = False
    finished: bool = False


class Journal:
    """Follows a loader through its epochs; one per loader, whatever iterators come and go."""

    def __init__(self) -> None:
        self.past: deque[EpochNotes] = deque(maxlen=_KEPT_EPOCHS)
        """Epochs that are over or were abandoned, the latest last."""
        self.forgotten = Readings()
        """Counters of epochs that are no longer kept."""
        self.slow: list[SlowSample] = []
        self.skipped: set[Any] = set()
        """The samples of all epochs that were left out."""
        self.reservoir = Reservoir()
        """Some of the samples of all epochs in which they could be late."""
        self.machine: Callable[[], Machine] = Machine
        """Tells what the machine does, in any thread."""
        self.storage: Callable[[], Counter[str]] = Counter
        """Tells what sources, reads and the cache have counted."""
        self.watchers: list[Watcher] = []
        """Are told when epochs begin and end."""
        self._length: int | None = None
        self._standing: Standing | None = None
        self._look = False  # somebody wants to know how things stand
        self._now: EpochNotes | None = None
        self._progress: Any = None
        self._gauges: Gauges | None = None
        self._before = Readings()
        self._began_ns = self._entered_ns = self._left_ns = 0
        self._samples = self._bytes = self._pinned_ns = 0

    def begin(self, epoch: int, progress: Any, gauges: Gauges) -> None:
        """An epoch begins; one that was not finished is abandoned.

        Args:
            progress: Knows what becomes of its samples (``coverage()``), how late they are (``lateness``), and how many
                batches there are (``length()``).
        """
        self.settle()
        self._gauges, self._progress = gauges, progress
        progress.lateness.reservoir = self.reservoir
        self._before, _ = self._readings(gauges)
        self._now = EpochNotes(epoch)
        self._samples = self._bytes = self._pinned_ns = 0
        self._look = bool(self.watchers)
        self._length = progress.length() if self._look else None
        self._standing = None
        self._began_ns = self._entered_ns = self._left_ns = now_ns()

    def begun(self) -> None:
        """Its workers have been started."""
        if self._now is not None:
            self._left_ns = now_ns()
            self._now.wall_ns = self._now.start_ns = self._left_ns - self._began_ns
            for watcher in self.watchers:
                watcher.begun()

    def enter(self) -> None:
        """``next()`` is called."""
        self._entered_ns = now = now_ns()
        notes = self._now
        if notes is not None and notes.waits.count:
            notes.steps.record(now - self._left_ns)

    def leave(self, samples: int, nbytes: int, standing: Callable[[], Standing]) -> None:
        """``next()`` returns a batch of so many samples and bytes.

        Args:
            standing: Tells how things stand now.
        """
        self._left_ns = now = now_ns()
        notes = self._now
        if notes is None:
            return
        notes.waits.record(now - self._entered_ns)
        notes.wall_ns = now - self._began_ns
        self._samples += samples
        self._bytes += nbytes
        if notes.wall_ns >= notes.line.due_ns:
            if not notes.line.points:
                notes.first_ns = now - self._entered_ns
            waits = notes.waits
            notes.line.add(notes.wall_ns, waits.count, waits.total, standing())
        if self._look:
            self._look, self._standing = False, standing()

    def pinned(self, duration_ns: int) -> None:
        """A batch was copied to page-locked memory, after ``next()`` of the engine."""
        self._pinned_ns += duration_ns

    def finish(self) -> None:
        """The epoch has come to its end, in a call of ``next()``."""
        if self._now is not None:
            self._now.wall_ns = now_ns() - self._began_ns
            self._now.finished = True
            self.settle()

    def settle(self, gauges: Gauges | None = None) -> None:
        """Take the last reading of the present epoch: it is over, or its engine is about to go.

        Args:
            gauges: Only if they are these; None: whichever they are.
        """
        if self._now is None or (gauges is not None and gauges is not self._gauges):
            return
        notes, self._now = self._read(), None
        if len(self.past) == self.past.maxlen:
            self.forgotten += self.past[0].readings
        self.past.append(notes)
        self._gauges = self._progress = None
        for watcher in self.watchers:
            watcher.settled()

    def glance(self) -> Glance | None:
        """How the present epoch stands, None between two; in any thread, as it changes nothing."""
        notes, gauges, entered_ns, now = self._now, self._gauges, self._entered_ns, now_ns()
        if notes is None or gauges is None:
            return None
        waits = notes.waits
        inside_ns = now - entered_ns if entered_ns > self._left_ns else 0
        self._look = True
        return Glance(
            notes.epoch,
            now - self._began_ns,
            waits.count,
            self._length,
            self._samples,
            self._bytes,
            notes.start_ns + waits.total + max(inside_ns, 0),
            self._standing,
            gauges.labour(),
            self.machine(),
        )

    def notes(self) -> list[EpochNotes]:
        """All epochs that are kept, the present one last."""
        return [*self.past, *([] if self._now is None else [self._read()])]

    def _read(self) -> EpochNotes:
        notes, gauges = self._now, self._gauges
        assert notes is not None
        assert gauges is not None
        readings, notes.machine = self._readings(gauges)
        notes.readings = readings.since(self._before)
        notes.decision, notes.held_by_budget = gauges.decision(), gauges.held_by_budget
        coverage = self._progress.coverage()
        notes.readings.counts.update(
            asked=coverage.requested.samples,
            delivered=coverage.delivered.samples,
            outstanding=coverage.outstanding.samples,
            epochs=1,
            batches=notes.waits.count,
            samples=self._samples,
            bytes=self._bytes,
            wall_ns=notes.wall_ns,
            start_ns=notes.start_ns,
            first_ns=notes.first_ns,
            pinned_ns=self._pinned_ns,
        )
        lateness = self._progress.lateness
        notes.readings.histograms.update(
            wait=notes.waits, step=notes.steps, lag=lateness.latest, late=lateness.late
        )
        self.slow = slowest_of([*self.slow, *gauges.slowest()])
        self.skipped.update(gauges.skipped())
        return notes

    def _readings(self, gauges: Gauges) -> tuple[Readings, Machine]:
        """All counters, those of the machine and of the storage too."""
        readings, machine = gauges.readings(), self.machine()
        readings.counts.update(machine.counts)
        readings.counts.update(self.storage())
        return readings, machine
