"""What is noted of the epochs of a loader."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from minato._core.histogram import Histogram
from minato.observe.stats.counters import Readings
from minato.observe.stats.epoch_log import Journal, TimeLine
from minato.observe.stats.slowest import SlowSample
from minato.observe.stats.snapshot import Labour, Machine, Standing
from minato.sampling.coverage import Progress

MACHINE = Machine({"disk_read_bytes": 9}, 5, 10, (("A", 7),))
STANDING = Standing(2, 4, 1, 6, 1000, 10_000)


class Gauges:
    """Counters that grow by what they are told."""

    def __init__(self) -> None:
        self.busy_ns = 0
        self.times = Histogram()
        self.held_by_budget = False

    def work(self, duration_ns: int) -> None:
        self.busy_ns += duration_ns
        self.times.record(duration_ns)

    def readings(self) -> Readings:
        return Readings(Counter(busy_ns=self.busy_ns), {"total": self.times.snapshot()})

    def slowest(self) -> list[SlowSample]:
        return [SlowSample(3, self.times.max, 0, -1, 0)]

    def labour(self) -> Labour:
        return Labour(self.busy_ns)

    def skipped(self) -> list[int]:
        return [5]

    def decision(self) -> Any:
        return SimpleNamespace(phase="uniform")


def epoch(journal: Journal, gauges: Gauges, number: int, batches: int) -> None:
    journal.begin(number, Progress(number), gauges)
    journal.begun()
    for _ in range(batches):
        journal.enter()
        gauges.work(100)
        journal.leave(4, 50, lambda: STANDING)


def test_an_epoch_holds_what_was_added_during_it() -> None:
    journal, gauges = Journal(), Gauges()
    journal.machine = lambda: MACHINE
    gauges.work(7)
    for number in (0, 1):
        epoch(journal, gauges, number, 3)
        journal.enter()
        journal.finish()
    for notes in journal.notes():
        counts = notes.readings.counts
        assert (counts["batches"], counts["samples"], counts["bytes"]) == (3, 12, 150)
        assert counts["busy_ns"] == 300
        assert notes.readings.histograms["total"].count == 3
        assert notes.readings.histograms["wait"].count == 3
        assert notes.readings.histograms["step"].count == 3  # the last one ends with the epoch
        assert counts["wall_ns"] >= counts["start_ns"] + notes.waits.total + notes.steps.total
        assert notes.finished
        assert notes.line.points[0][-1] == STANDING
        assert notes.machine == MACHINE
    assert journal.slow == [SlowSample(3, 100, 0, -1, 0)]
    whole = sum((notes.readings for notes in journal.notes()), journal.forgotten)
    assert whole.counts["epochs"] == 2
    assert whole.histograms["total"].count == 6


def test_an_abandoned_epoch_is_kept_when_its_engine_goes_or_the_next_begins() -> None:
    journal, gauges, others = Journal(), Gauges(), Gauges()
    epoch(journal, gauges, 0, 2)
    journal.settle(others)  # another engine's end
    assert not journal.past
    journal.settle(gauges)
    epoch(journal, others, 1, 1)
    epoch(journal, others, 2, 1)
    assert [(each.epoch, each.finished) for each in journal.notes()] == [
        (0, False),
        (1, False),
        (2, False),
    ]
    journal.settle(others)
    journal.enter()  # an iterator that outlives its engine's notes
    journal.leave(1, 1, lambda: STANDING)
    journal.finish()
    assert len(journal.notes()) == 3


def test_old_epochs_become_part_of_the_run_alone() -> None:
    journal, gauges = Journal(), Gauges()
    for number in range(70):
        epoch(journal, gauges, number, 1)
        journal.finish()
    assert [each.epoch for each in journal.notes()] == list(range(6, 70))
    whole = sum((notes.readings for notes in journal.notes()), journal.forgotten)
    assert whole.counts["batches"] == 70


def test_a_time_line_is_bounded_and_spans_all_of_the_time() -> None:
    line = TimeLine()
    for at_ns in range(0, 10_000_000_000, 1_000_000):
        if at_ns >= line.due_ns:
            line.add(at_ns, 0, 0, STANDING)
    assert 100 < len(line.points) <= 256
    times = [point[0] for point in line.points]
    assert times == sorted(times)
    assert times[0] < 200_000_000
    assert times[-1] > 9_800_000_000


class Watched:
    """Notes what it is told, and how things stood then."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.told: list[tuple[str, int]] = []
        journal.watchers.append(self)

    def begun(self) -> None:
        glance = self.journal.glance()
        assert glance is not None
        self.told.append(("begun", glance.batches))

    def settled(self) -> None:
        assert self.journal.glance() is None
        self.told.append(("settled", self.journal.past[-1].epoch))


def test_an_epoch_can_be_looked_at_while_it_runs() -> None:
    journal, gauges = Journal(), Gauges()
    watched = Watched(journal)
    journal.machine = lambda: MACHINE
    assert journal.glance() is None
    epoch(journal, gauges, 5, 3)
    first = journal.glance()
    assert first is not None
    assert (first.epoch, first.batches, first.samples, first.nbytes) == (5, 3, 12, 150)
    assert (first.standing, first.labour, first.machine) == (STANDING, Labour(300), MACHINE)
    assert first.waited_ns <= first.at_ns
    journal.enter()
    inside = journal.glance()
    assert inside is not None
    later = journal.glance()
    assert later is not None
    assert (
        later.waited_ns > inside.waited_ns > first.waited_ns
    )  # the call that has not returned counts
    journal.finish()
    assert watched.told == [("begun", 0), ("settled", 5)]


def test_how_things_stand_is_looked_up_only_for_those_who_look() -> None:
    journal, gauges = Journal(), Gauges()
    looks: list[int] = []

    def standing() -> Standing:
        looks.append(1)
        return STANDING

    journal.begin(0, Progress(0), gauges)
    journal.begun()
    for _ in range(100):
        journal.enter()
        journal.leave(1, 1, standing)
    assert len(looks) < 100  # for the time line
    journal.glance()
    before = len(looks)
    journal.enter()
    journal.leave(1, 1, standing)
    assert len(looks) > before
