"""When a standby worker steps in, and when it goes back to sleep."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from minato._core.histogram import Histogram
from minato._core.wait import GATE_NBYTES, Gate
from minato.scheduler import standby
from minato.scheduler.roster import Roster
from minato.scheduler.standby import Standby
from tests.scheduler.fakes import Bench

SLOW_NS = 5_000_000
MS = 1_000_000
REGULAR = 3


class Yard:
    """Three workers and two on standby, and a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000 * MS
        monkeypatch.setattr(standby, "now_ns", lambda: self.now)
        self.bench = Bench(workers=REGULAR + 2)
        self.ledger = self.bench.ledger
        self.ledger.slow_ns = SLOW_NS
        self.bench.begin([list(range(8))] * 4)
        memory = np.zeros(Roster.NBYTES + GATE_NBYTES, np.uint8)
        work = Gate(memory, Roster.NBYTES)
        self.late = Histogram()
        self.standby = Standby(memory, 0, work, self.ledger, REGULAR, self.late)

    def begin(self, worker: int, ago_ns: int = 0) -> None:
        """Let a worker be on a sample."""
        words = self.ledger.lease_words(worker)
        words[1] = self.now - ago_ns
        words[0] = worker + 1

    def end(self, worker: int) -> None:
        self.ledger.end(worker, 1, 0, 0)

    @property
    def at_work(self) -> list[int]:
        """Standby workers that would not rest now."""
        return [number for number in (REGULAR, REGULAR + 1) if not self.standby.rests(number)]


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch) -> Yard:
    return Yard(monkeypatch)


def test_nobody_steps_in_for_quick_samples(yard: Yard) -> None:
    for worker in range(REGULAR):
        yard.begin(worker, SLOW_NS - 1)
    assert yard.at_work == []


def test_as_many_step_in_as_are_held_up(yard: Yard) -> None:
    yard.begin(0, SLOW_NS)
    assert yard.at_work == [3]
    yard.begin(2, SLOW_NS + MS)
    assert yard.at_work == [3, 4]
    yard.end(0)
    assert yard.at_work == [3]
    yard.end(2)
    assert yard.at_work == []


def test_a_standby_worker_that_is_held_up_itself_is_stood_in_for(yard: Yard) -> None:
    yard.begin(0, SLOW_NS)
    yard.begin(3, SLOW_NS)
    assert yard.at_work == [3, 4]
    yard.end(0)
    assert yard.at_work == [3]


def test_nobody_steps_in_where_nothing_is_slow(yard: Yard) -> None:
    yard.ledger.slow_ns = 0
    yard.begin(0, 1000 * MS)
    assert yard.at_work == []


def test_nobody_steps_in_where_nothing_is_left(yard: Yard) -> None:
    yard.begin(0, SLOW_NS)
    yard.bench.work_all()
    yard.begin(1, SLOW_NS)
    assert yard.at_work == []


def test_a_threshold_below_a_millisecond_counts_as_one(yard: Yard) -> None:
    yard.ledger.slow_ns = 1000
    yard.begin(0, MS - 1)
    assert yard.at_work == []
    yard.begin(0, MS)
    assert yard.at_work == [3]


def test_it_wakes_by_itself_and_tells_how_late(yard: Yard) -> None:
    yard.begin(0)
    results: list[bool] = []

    def stand_by() -> None:
        results.append(yard.standby.stand_by(3, lambda: False, lambda: True))

    thread = threading.Thread(target=stand_by)
    thread.start()
    thread.join(0.02)
    assert results == []
    yard.now += SLOW_NS + 7000
    thread.join(5)
    assert results == [True]
    assert (yard.late.count, yard.late.max) == (1, 7000)


def test_it_stays_while_the_last_batches_have_work_left(yard: Yard) -> None:
    yard.begin(0, SLOW_NS)
    assert yard.standby.stand_by(3, lambda: True, lambda: True)
    yard.bench.work_all()
    assert not yard.standby.stand_by(3, lambda: True, lambda: True)


def test_it_leaves_when_the_loader_ends(yard: Yard) -> None:
    yard.begin(0, SLOW_NS)
    yard.ledger.shut_down()
    assert not yard.standby.stand_by(3, lambda: True, lambda: True)


def test_it_leaves_without_a_parent(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_PATIENCE_NS", -1)
    assert not yard.standby.stand_by(3, lambda: False, lambda: False)
