"""What a worker does with what it claims."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from minato._core.codes import READY
from minato.transforms.compose import Transforms
from tests.scheduling.fakes import Bench, Journal, worker_of


class Bad(list):
    """A dataset of its keys, some of which raise."""

    def __getitem__(self, key: Any) -> Any:
        if key in (3, 6):
            raise ValueError(f"bad {key}")
        return key * 10


class Setting:
    """One worker, and a dispatcher that gives it work."""

    def __init__(
        self,
        batches: list[list[Any]],
        order: str = "strict",
        collates: bool = False,
        active: int = 1,
        most_workers: int = 8,
    ) -> None:
        self.bench = Bench(order, max_lag=8, fixed=8)
        self.writer = Journal(self.bench, collates)
        parts = self.bench, 0, Bad(), Transforms(), self.writer
        self.worker = worker_of(*parts, active=active, most_workers=most_workers)
        self.runner = self.worker.runner
        self.bench.begin(batches)

    def run(self) -> list[Any]:
        while self.worker.step():
            pass
        return self.writer.journal

    def ready(self) -> list[bool]:
        return [self.bench.ledger.state(i.record) == READY for i in self.bench.dispatcher._open]


def test_cheap_samples_are_claimed_in_runs_once_their_cost_is_known() -> None:
    batches = [list(range(100 * i, 100 * i + 20)) for i in range(1, 8)]
    setting = Setting(batches)
    runs = [entry[2] for entry in setting.run() if entry[0] == "samples"]
    assert len(runs[0]) == 1
    assert max(map(len, runs)) > 1
    assert sum(map(len, runs)) == 140


@pytest.mark.parametrize(
    ("order", "handover_ns", "active", "whole"),
    [
        ("strict", 2e6, 1, True),
        ("strict", 2e6, 5, True),
        ("strict", 2e6, 7, False),  # there is not a batch for each
        ("strict", 1e6, 1, False),
        ("strict", 0.0, 1, False),
        ("arrival", 2e6, 1, False),
    ],
)
def test_samples_that_cost_little_more_than_a_handover_are_not_handed_over(
    order: str, handover_ns: float, active: int, whole: bool
) -> None:
    batches = [list(range(100 * i, 100 * i + 4)) for i in range(1, 8)]
    setting = Setting(batches, order, collates=True, active=active)
    setting.writer.handover_ns = handover_ns
    estimate = setting.runner.cost_estimate
    estimate.draws = False
    for turn in range(3):
        estimate.mean_ns = 1.5e7  # more than the longest run of samples that are handed over
        setting.worker.step()
        if turn == 0:  # by then the worker knows the order
            setting.writer.journal.clear()
    kinds = [entry[0] for entry in setting.writer.journal]
    assert ("collated" in kinds) == whole


@pytest.mark.parametrize(
    ("active", "cost_ns", "runs"),
    [
        (1, 1e5, [8, 8, 8, 8]),
        (2, 1e5, [8, 8, 8, 4, 2, 1, 1]),
        (4, 1e5, [8, 6, 2, 4, 3, 1, 2, 1, 1, 1, 1, 1, 1]),
        (4, 1e3, [8, 8, 8, 8]),  # a few microseconds are less than what a lease costs
        (4, 2e6, [1] * 32),
    ],
)
def test_what_is_left_of_an_epoch_is_divided(active: int, cost_ns: float, runs: list[int]) -> None:
    setting = Setting([[*range(10 * i, 10 * i + 8)] for i in range(1, 5)], active=active)
    estimate = setting.runner.cost_estimate
    estimate.draws, estimate.mean_ns = False, cost_ns
    while setting.worker.step():
        estimate.mean_ns = cost_ns
    written = [entry for entry in setting.writer.journal if entry[0] == "samples"]
    assert [len(samples) for _, _, samples in written] == runs


@pytest.mark.parametrize(("collates", "whole"), [(True, 7), (False, 1)])
def test_a_worker_without_others_takes_whole_batches_first_or_where_samples_are_collated(
    collates: bool, whole: int
) -> None:
    batches = [[*range(100 * i, 100 * i + 4)] for i in range(1, 8)]
    setting = Setting(batches, collates=collates, most_workers=1)
    while setting.worker.step():
        setting.runner.cost_estimate.mean_ns = 1e9
    written = [len(entry[-1]) for entry in setting.writer.journal if entry != "collate"]
    assert written == [4] * whole + [1] * 4 * (7 - whole)


def test_a_worker_leaves_when_it_is_told_to() -> None:
    setting = Setting([[1, 2]])
    setting.bench.ledger.shut_down(drain=True)
    setting.worker.loop(lambda: True)
    assert setting.ready() == [True]
    other = Setting([[1, 2]])
    other.bench.ledger.shut_down()
    other.worker.loop(lambda: True)
    assert other.writer.journal == []


def test_a_worker_does_not_leave_what_is_published_while_it_looks() -> None:
    setting = Setting([])
    look = setting.worker.step

    def step() -> bool:
        found = look()
        if not found and not setting.bench.ledger.draining:
            setting.bench.begin([[1, 2]])
            setting.bench.ledger.shut_down(drain=True)
        return found

    setting.worker.step = step  # type: ignore[method-assign]
    setting.worker.loop(lambda: True)
    assert setting.ready() == [True]


def test_a_worker_leaves_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.workers.worker._PATIENCE_S", 0.01)
    setting = Setting([[1, 2]])
    parent_lives = Mock(side_effect=[True, True, False])
    setting.worker.loop(parent_lives)
    assert parent_lives.call_count == 3
    assert setting.ready() == [True]


def test_an_end_between_two_looks_is_not_slept_through() -> None:
    setting = Setting([])

    class StopsFirst:
        """An event count whose loader ends in the very moment before a worker looks at it."""

        @property
        def events(self) -> int:
            setting.bench.ledger.shut_down()
            return 0

        def wait(self, seen: int, timeout_s: float) -> bool:
            raise AssertionError("it sleeps through the end")

    setting.worker.events = StopsFirst()  # type: ignore[assignment]
    setting.worker.loop(lambda: True)
