"""What is noted of the epochs of a loader."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest

from minato import CostBatches, DataLoader, ErrorBudgetError, ErrorPolicy
from minato._core import Histogram
from minato.observe.epoch_log import EpochLog, EpochRecord, LoaderUse, RunningEpoch
from minato.observe.machine import MachineSnapshot
from minato.observe.meters import SlowSample
from minato.observe.metrics import values_of
from minato.observe.observers import Counts, LoaderSnapshot, Metrics
from minato.sampling.progress import Progress
from minato.scheduling.slow_samples import ThresholdDecision
from tests.datasets import Failing
from tests.selection import each

MACHINE = MachineSnapshot({"disk_read_bytes": 9}, 5, 10, (("A", 7),))
STANDING = LoaderSnapshot(2, 4, 1, 6, 1000, 10_000)


class MetricsSource:
    """Counters that grow by what they are told."""

    def __init__(self, *, stands_still: bool = False) -> None:
        self.stands_still = stands_still
        self.busy_ns = 0
        self.times = Histogram()
        self.held_by_budget = False

    def work(self, duration_ns: int) -> None:
        self.busy_ns += duration_ns
        self.times.record(duration_ns)

    def metrics(self) -> Metrics:
        return Metrics(Counts(busy_ns=self.busy_ns), {"total": self.times.snapshot()})

    def slowest(self) -> list[SlowSample]:
        return [SlowSample(3, self.times.max, 0, -1, 0)]

    def stages(self) -> tuple[tuple[int, int], ...]:
        return ((self.times.count, self.busy_ns),)

    def quick_counts(self) -> dict[str, int]:
        return {"busy_ns": self.busy_ns}

    def decision(self) -> Any:
        return ThresholdDecision(0, 0.0, 0.0, "uniform")


def epoch(journal: EpochLog, source: MetricsSource, number: int, batches: int) -> RunningEpoch:
    running = journal.begin(number, Progress(number), source)
    running.started()
    for _ in range(batches):
        running.enter()
        source.work(100)
        running.leave(4, 50, lambda: STANDING)
    return running


def records_of(journal: EpochLog) -> list[EpochRecord]:
    epochs, _ = journal.look()
    return [record for record, _ in epochs]


@pytest.mark.parametrize("stands_still", [False, True])
def test_an_epoch_holds_what_was_added_during_it(stands_still: bool) -> None:
    journal, source = EpochLog(), MetricsSource(stands_still=stands_still)
    journal.machine = lambda: MACHINE
    source.work(7)
    for number in (0, 1):
        running = epoch(journal, source, number, 3)
        running.enter()
        running.finish()
    for notes in records_of(journal):
        counts = notes.metrics.counts
        names = ("batches", "samples", "bytes", "busy_ns")
        assert [counts[name] for name in names] == [3, 12, 150, 300]
        for name in ("total", "wait", "step"):  # the last step ends with the epoch
            assert notes.metrics.histograms[name].count == 3
        assert counts["wall_ns"] >= counts["start_ns"] + notes.waits.total + notes.steps.total
        assert notes.finished
        assert notes.use.last == STANDING
        assert notes.machine == MACHINE
    assert journal.slow == [SlowSample(3, 100, 0, -1, 0)]
    whole = journal.look()[1]
    assert whole.counts["epochs"] == 2
    assert whole.histograms["total"].count == 6


def test_what_fails_between_two_epochs_is_of_the_later_one() -> None:
    """As workers run ahead."""
    journal, source, skipped = EpochLog(), MetricsSource(), 0

    def counts() -> dict[str, int]:
        return {"busy_ns": source.busy_ns, "skipped": skipped}

    source.metrics = lambda: Metrics(Counts(counts()))  # type: ignore[method-assign]
    source.quick_counts = counts  # type: ignore[method-assign]
    for number in (0, 1):
        running = epoch(journal, source, number, 3)
        skipped += 1
        running.enter()
        running.finish()
        skipped += 2
        source.work(7)
    epoch(journal, source, 2, 1)
    figures = [each.metrics.counts for each in records_of(journal)]
    assert [(each["skipped"], each["busy_ns"]) for each in figures] == [
        (1, 300),
        (3, 300),
        (2, 100),
    ]
    assert (journal.totals().counts["skipped"], journal.totals().counts["busy_ns"]) == (6, 700)


def test_an_abandoned_epoch_is_kept_when_its_engine_goes_or_the_next_begins() -> None:
    journal, source, others = EpochLog(), MetricsSource(), MetricsSource()
    epoch(journal, source, 0, 2)
    journal.end(others)  # another engine's end
    assert not journal.past
    journal.end(source)
    epoch(journal, others, 1, 1)
    running = epoch(journal, others, 2, 1)
    assert [(each.epoch, each.finished) for each in records_of(journal)] == [
        (number, False) for number in range(3)
    ]
    journal.end(others)
    running.enter()  # an iterator that outlives its engine's notes
    running.leave(1, 1, lambda: STANDING)
    running.finish()
    assert [each.waits.count for each in records_of(journal)] == [2, 1, 1]


def test_epochs_that_run_at_a_time_have_their_own_figures() -> None:
    journal, engines = EpochLog(), [MetricsSource(), MetricsSource()]
    first = epoch(journal, engines[0], 0, 2)
    second = epoch(journal, engines[1], 1, 1)
    assert [each.waits.count for each in records_of(journal)] == [2, 1]
    assert (journal.totals().epoch, journal.totals().counts["batches"]) == (1, 3)
    journal.end(engines[1])  # its iterator is dropped
    second.enter()
    assert (journal.totals().epoch, journal.totals().running, journal.stages()) == (1, False, ())
    assert [each.epoch for each in records_of(journal)] == [0, 1]
    first.enter()
    assert (journal.totals().epoch, journal.totals().running) == (0, True)
    first.leave(4, 50, lambda: STANDING)
    first.enter()
    first.finish()
    shown = [(each.epoch, each.waits.count, each.finished) for each in records_of(journal)]
    assert shown == [(1, 1, False), (0, 3, True)]
    assert journal.totals().counts["batches"] == 4
    assert [each.metrics.counts["busy_ns"] for each in records_of(journal)] == [100, 200]


@each
def test_a_look_at_a_batch_in_the_midst_of_an_epoch_takes_nothing_from_its_figures(
    workers: dict[str, Any],
) -> None:
    loader = DataLoader(range(40), 4, **workers)  # type: ignore[arg-type]
    for number, _ in enumerate(loader):
        if number == 2:
            next(iter(loader))
    assert [each.throughput.batches for each in loader.report().epochs] == [1, 10]
    assert loader.metrics()["batches_total"] == 11


@pytest.mark.parametrize("stands_still", [False, True])
def test_old_epochs_become_part_of_the_run_alone(stands_still: bool) -> None:
    journal, engines = EpochLog(), [MetricsSource(stands_still=stands_still) for _ in range(2)]
    waited_ns = 0
    for number in range(150):
        source = engines[number >= 90]
        running = epoch(journal, source, number, 1)
        assert journal.totals().counts["batches"] == number + 1
        running.enter()
        running.finish()
        assert [each.epoch for each in records_of(journal)] == [*range(number + 1)][-64:]
        whole = journal.look()[1]
        totals = journal.totals()
        for name in ("batches", "samples", "bytes", "busy_ns"):
            assert totals.counts[name] == whole.counts[name]
        assert totals.counts["batches"] == whole.histograms["wait"].count == number + 1
        assert whole.histograms["total"].count == number + 1
        assert not totals.running
        assert totals.batches == 1
        assert totals.counts["waited_ns"] >= waited_ns + totals.waited_ns > waited_ns
        waited_ns = totals.counts["waited_ns"]


def test_the_state_of_a_loader_is_averaged_over_time() -> None:
    use, looks = LoaderUse(), 0
    for at_ns in range(0, 10_000_000_000, 1_000_000):
        if at_ns >= use.due_ns:
            looks += 1
            late = at_ns > 8_000_000_000
            use.add(at_ns, LoaderSnapshot(4 if late else 2, 6, 3, 6, 100 * looks, 0))
    assert 200 < looks < 800
    assert (use.workers, use.in_flight, use.memory_bytes) == ((2, 4), 6, 100 * looks)
    assert use.occupancy == pytest.approx(0.5)
    use.add(20_000_000_000, LoaderSnapshot(1, 6, 6, 6, 0, 0))
    assert use.occupancy == pytest.approx(0.75, abs=0.01)
    assert use.workers == (1, 4)


def test_an_epoch_can_be_looked_at_while_it_runs() -> None:
    journal, source = EpochLog(), MetricsSource()
    assert not journal.totals().running
    assert journal.stages() == ()
    running = epoch(journal, source, 5, 3)
    first = journal.totals()
    assert (first.epoch, first.running, first.batches, first.samples) == (5, True, 3, 12)
    assert (first.counts["bytes"], first.counts["busy_ns"]) == (150, 300)
    assert (first.loader, journal.stages()) == (STANDING, ((3, 300),))
    assert first.waited_ns <= first.wall_ns
    running.enter()
    inside, later = journal.totals(), journal.totals()
    # The call that has not returned counts.
    assert later.waited_ns > inside.waited_ns > first.waited_ns
    running.finish()
    ended = journal.totals()
    assert (ended.running, ended.batches, ended.counts["batches"]) == (False, 3, 3)
    assert journal.stages() == ()


def test_an_epoch_that_ends_while_another_thread_looks_has_its_figures() -> None:
    journal, source = EpochLog(), MetricsSource()
    running, metrics = epoch(journal, source, 0, 2), source.metrics

    def meanwhile() -> Metrics:
        source.metrics, found = metrics, metrics()  # type: ignore[method-assign]
        source.work(100)
        running.enter()
        running.finish()
        return found

    source.metrics = meanwhile  # type: ignore[method-assign]
    journal.look()
    (record,) = records_of(journal)
    assert (record.finished, record.metrics.counts["busy_ns"]) == (True, 300)


def test_epochs_add_up_to_the_run_while_the_loop_goes_on() -> None:
    journal = EpochLog()
    running = epoch(journal, MetricsSource(), 0, 2)
    ((_, metrics),), whole = journal.look()
    running.enter()
    running.leave(4, 50, lambda: STANDING)
    assert metrics.counts == whole.counts
    assert metrics.histograms["wait"].count == whole.histograms["wait"].count == 2


@pytest.mark.parametrize("seed", range(20))
def test_all_time_is_waited_or_not(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls that return, those that raise and the copies between them, whenever somebody looks."""
    draw, now_ns = random.Random(seed), 1
    for module in ("minato.observe.epoch_log", "minato.sampling.progress"):
        monkeypatch.setattr(f"{module}.now_ns", lambda: now_ns)
    journal, source = EpochLog(), MetricsSource()
    running = journal.begin(0, Progress(0), source)
    running.started()
    waits, steps, waited, pinned, step = 0, 0, 0, 0, 0
    for _ in range(100):
        kind = draw.choice(["batch", "interrupted", "again", "error", "step", "pin"])
        calls, duration = kind not in ("step", "pin"), draw.randrange(1, 9)
        if calls:
            now_ns += 1
            running.enter()
            steps, step = steps + (step + 1 if waits else 0), 0
        now_ns += duration
        waited += duration if calls else 0
        assert journal.totals().waited_ns == waited
        if kind in ("batch", "again"):
            running.leave(1, 1, lambda: STANDING)
            waits += 1
            if kind == "again":  # interrupted after that, twice
                for _ in range(2):
                    running.fail()
                    running.enter()
                running.leave(1, 1, lambda: STANDING)
        elif kind == "interrupted":  # where it looks at the loader; the batch comes again
            running.record.calls.is_wanted = True
            with pytest.raises(KeyboardInterrupt):
                running.leave(1, 1, Mock(side_effect=KeyboardInterrupt))
            running.fail()
        elif kind == "error":
            running.fail()
        elif kind == "pin":
            running.pinned(duration)
            pinned, step = pinned + duration, 0
        else:
            step += duration
        assert journal.totals().waited_ns == journal.totals().counts["waited_ns"] == waited
        (record,) = records_of(journal)
        assert (record.waited_ns, record.waits.count, record.pinned_ns) == (waited, waits, pinned)
        assert record.steps.total == steps
        assert record.calls.wall_ns >= waited + pinned
    running.fail()  # after the return of the call: it is interrupted there
    assert journal.totals().waited_ns == waited
    journal.end(source)
    assert journal.totals().counts["waited_ns"] == waited


def test_the_call_that_finds_the_end_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1
    for module in ("minato.observe.epoch_log", "minato.sampling.progress"):
        monkeypatch.setattr(f"{module}.now_ns", lambda: now_ns)
    journal, source = EpochLog(), MetricsSource()
    progress = Progress(0)
    now_ns += 20  # in the sampler's __iter__()
    running = journal.begin(0, progress, source)
    running.started()
    running.enter()
    running.leave(4, 50, lambda: STANDING)
    now_ns += 3
    running.enter()
    now_ns += 50
    running.finish()
    (record,) = records_of(journal)
    assert (record.waited_ns, record.calls.wall_ns) == (70, 73)
    assert journal.totals().waited_ns == 70


def test_what_workers_do_while_the_end_is_noted_lowers_no_total() -> None:
    journal, source = EpochLog(), MetricsSource()
    running, seen = epoch(journal, source, 0, 1), [0]

    def decision() -> Any:  # asked after the counters were read
        source.work(7)
        seen.append(journal.totals().counts["busy_ns"])
        return Mock()

    source.decision = decision  # type: ignore[method-assign]
    running.enter()
    running.finish()
    assert seen == [0, 107]
    assert journal.totals().counts["busy_ns"] == 107


@each
@pytest.mark.parametrize("measured", [False, True])
def test_nobody_waits_after_a_call_that_raised(workers: dict[str, Any], measured: bool) -> None:
    size = CostBatches(4, lambda sample: 1) if measured else 4
    policy = ErrorPolicy("skip", max_failures=1)
    loader = DataLoader(Failing(40, {1: ValueError, 2: OSError}), size, errors=policy, **workers)
    with pytest.raises(ErrorBudgetError):
        list(iterator := iter(loader))
    log = loader._minato_history.epoch_log
    before = log.totals()
    assert before.running
    assert log.totals().waited_ns == before.waited_ns == records_of(log)[-1].waited_ns
    del iterator


@pytest.mark.parametrize("size", [4, CostBatches(4, lambda sample: 1)])
def test_an_interrupted_call_hides_no_batch(size: Any) -> None:
    interruptions = iter([KeyboardInterrupt])

    def interrupted(sample: int) -> int:
        for error in interruptions:
            raise error
        return sample

    loader = DataLoader(range(12), size, transforms=[interrupted])  # type: ignore[arg-type]
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert len([*iterator]) == loader.metrics()["batches_total"] == 3


@each
def test_no_batch_is_in_flight_where_samples_wait_for_the_end(workers: dict[str, Any]) -> None:
    loader = DataLoader(range(10), CostBatches(4, lambda sample: 1), **workers)  # type: ignore[arg-type]
    for _ in loader:
        values = loader.metrics()  # the next batch says how things stand
    assert values["batches_total"] == 3
    assert (values["in_flight_batches"], values["ready_batches"]) == (0, 0)


def test_the_loader_is_that_of_a_recent_batch() -> None:
    journal = EpochLog()
    running = journal.begin(0, Progress(0), MetricsSource())
    running.started()
    for ready in range(5):
        running.enter()
        running.leave(4, 50, lambda ready=ready: STANDING._replace(ready=ready))
        values = values_of(journal.totals())
        assert (values["ready_batches"], values["in_flight_bytes"]) == (ready, 1000)
    running.enter()
    running.finish()
    assert values_of(journal.totals())["ready_batches"] == 4


def test_how_things_stand_is_looked_up_only_for_those_who_look() -> None:
    journal, source = EpochLog(), MetricsSource()
    loader = Mock(return_value=STANDING)
    running = journal.begin(0, Progress(0), source)
    running.started()
    for _ in range(100):
        running.enter()
        running.leave(1, 1, loader)
    assert loader.call_count < 100  # for the time line
