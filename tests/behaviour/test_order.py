"""Which batch comes when: the four orders, how late a sample may be, and what is loaded ahead."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import DistributedSampler

from minato import Arrival, DataLoader, StragglerPolicy
from tests.datasets import (
    TOO_MANY_WORKERS,
    Filled,
    Held,
    InOrder,
    Journal,
    Numbers,
    Sleepy,
    flat,
    indices,
    lags,
    late_by,
    tally,
    wait_until,
)
from tests.selection import each_of, sweep, workers_of

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)


WORKERS = workers_of("inline", "2-processes", "3-threads")
each = each_of(WORKERS)
THREADS = WORKERS["3-threads"]


def blocks(size: int, batch_size: int) -> list[list[int]]:
    """The batches of a sequential sampler."""
    return [list(range(size))[i : i + batch_size] for i in range(0, size, batch_size)]


# ---- the other orders -----------------------------------------------------------------------


@each
def test_batch_order_keeps_batches_together(workers: dict[str, Any]) -> None:
    dataset = Held(24, 1, 3 if workers["num_workers"] else 0)
    batches = dataset.batches_of(DataLoader(dataset, 3, order="batch", **workers))
    assert tally(batches) == tally(blocks(24, 3))
    assert not workers["num_workers"] or batches.index([0, 1, 2]) > 2


@pytest.mark.parametrize("order", ["arrival", "fast_first"])
def test_without_workers_every_order_is_the_samplers(order: str) -> None:
    assert indices(DataLoader(Numbers(10), 3, order=order)) == blocks(10, 3)


@sweep(
    workers={"threads": THREADS, "processes": WORKERS["2-processes"]},
    order=["arrival", "fast_first"],
    max_lag=[0, 1, 2, 4],
)
def test_max_lag_is_never_exceeded(workers: dict[str, Any], order: str, max_lag: int) -> None:
    dataset = WaitsForOthers(60, 3 * (max_lag + 2))
    loader = DataLoader(dataset, 3, order=late_by(order, max_lag), **workers)
    late = lags(indices(loader), 3)
    assert sorted(late) == list(range(60))
    # With one batch in flight nobody can be late.
    assert max(late.values()) == late[0] == (max_lag if max_lag > 1 else 0)


class WaitsForOthers(Journal):
    """Sample 0 takes until so many others have been begun, and two more take long."""

    def __init__(self, size: int, others: int) -> None:
        super().__init__(size, 0.001)
        self.others = others

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        if index == 0:
            wait_until(lambda: len(self.begun()) >= self.others)
        elif index in (31, 32):
            time.sleep(0.05)
        return index


@pytest.mark.parametrize("prefetch_factor", [None, 1, 20])
@pytest.mark.parametrize("max_lag", [2, 3, 8])
def test_max_lag_holds_for_any_number_of_batches_in_flight(
    max_lag: int, prefetch_factor: int | None
) -> None:
    # Some samples are slow, and the consumer too, so that everything which may be loaded ahead is.
    dataset = Sleepy(90, 0.001, {i: 0.03 + 0.01 * (i % 4) for i in range(0, 90, 11)})
    options = {"order": Arrival(max_lag), "prefetch_factor": prefetch_factor}
    batches = []
    for batch in DataLoader(dataset, 3, **options, **THREADS):
        batches.append(batch.tolist())
        time.sleep(0.004)
    late = lags(batches, 3)
    assert sorted(late) == list(range(90))
    assert max(late.values()) <= max_lag


class InStep(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.barrier = threading.Barrier(3)

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(60)
        time.sleep(0.002)  # workers take cheaper samples several at a time
        return index


@pytest.mark.parametrize("max_lag", [2, 3, 5, 40])
def test_samples_in_time_are_not_late(max_lag: int) -> None:
    # Also when max_lag is smaller than the number of batches that would be in flight.
    loader = DataLoader(InStep(48), 4, order=Arrival(max_lag), **THREADS)
    late = lags(indices(loader), 4)
    assert sorted(late) == list(range(48))
    assert sum(lag != 0 for lag in late.values()) <= 24
    assert statistics.mean(map(abs, late.values())) < 0.6


@pytest.mark.parametrize("persistent", [False, True])
def test_max_lag_holds_in_every_epoch(persistent: bool) -> None:
    dataset = Held(40, 0, 0)
    loader = DataLoader(dataset, 2, order=Arrival(3), persistent_workers=persistent, **THREADS)
    for _ in range(3):
        dataset.missing.value = 3
        late = lags(dataset.batches_of(loader), 2)
        assert sorted(late) == list(range(40))
        assert max(late.values()) == late[0] == 3


class SixteenAhead(Journal):
    """Sample 0 is there between samples 16 and 17; others that run at once end at once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.pair, self.three = threading.Barrier(2), threading.Barrier(3)

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        if index == 0:
            wait_until(lambda: len(self.begun()) == 19)
        else:
            (self.pair if index <= 16 else self.three).wait(60)
        return index


def test_samples_are_no_later_than_they_need_to_be() -> None:
    # Meanwhile the two other workers have finished 8 batches.
    loader = DataLoader(SixteenAhead(119), 2, order=Arrival(32), **THREADS)
    late = lags(indices(loader), 2)
    assert 2 <= late[0] <= 16
    assert statistics.mean(abs(lag) for lag in late.values()) < 1


def test_fast_first_lets_slow_samples_wait() -> None:
    mean_lag = {}
    slow = StragglerPolicy(after_s=0.02)  # so that no other counts, and each of them does
    for order in ("arrival", "fast_first"):
        dataset = SlowEveryFifth(300)
        options = {"order": order, "prefetch_factor": 10, "stragglers": slow}
        iterator = iter(DataLoader(dataset, 5, **options, **THREADS))
        # First the costs are learnt. Then thirty batches are open, and nobody waits for one of them.
        batches = [next(iterator)]
        wait_until(lambda dataset=dataset: len(dataset.begun()) >= 155)
        batches += [next(iterator) for _ in range(29)]
        wait_until(lambda dataset=dataset: len(dataset.begun()) == 300)
        late = lags(indices([*batches, *iterator]), 5)
        assert sorted(late) == list(range(300))
        mean_lag[order] = statistics.mean(late[i] for i in range(150, 300) if i % 5 == 4)
    assert abs(mean_lag["arrival"]) < 2
    assert mean_lag["fast_first"] > 5


class SlowEveryFifth(Journal):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.03 if index % 5 == 4 else 0.001)
        return super().__getitem__(index)


# ---- loading ahead --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["thread", "process"])
def test_workers_run_ahead_of_a_straggler(method: str) -> None:
    dataset = WaitsForOthers(60, 60)
    iterator = iter(DataLoader(dataset, 2, num_workers=2, workers=method))
    assert next(iterator).tolist() == [0, 1]
    assert dataset.begun() == list(range(60))  # torch's stop after two batches per worker
    assert indices(iterator) == blocks(60, 2)[1:]


class HeadSleeps(Journal):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.15 if index == 0 else 0)
        return super().__getitem__(index)


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_explicit_prefetch_factor_is_obeyed(
    method: str, num_workers: int, prefetch_factor: int
) -> None:
    dataset = HeadSleeps(80)
    workers = {"num_workers": num_workers, "workers": method}
    loader = DataLoader(dataset, 2, prefetch_factor=prefetch_factor, **workers)
    for number, batch in enumerate(loader):
        assert batch.tolist() == [2 * number, 2 * number + 1]
        most = min(2 * (number + 1 + num_workers * prefetch_factor), 80)
        assert len(dataset.begun()) <= most
        if number in (0, 5, 39):  # all that it allows is done while the consumer computes
            wait_until(lambda most=most: len(dataset.begun()) == most)
            time.sleep(0.02)
            assert dataset.begun() == list(range(most))


def test_budget_bounds_what_is_loaded_ahead() -> None:
    dataset = Wide(400)
    batch_bytes = 4 * 1024 * 10
    loader = DataLoader(dataset, 10, memory_budget=6 * batch_bytes + 1000, **THREADS)
    ahead = []
    for number, _ in enumerate(loader):
        time.sleep(0.005)
        ahead.append(len(dataset.begun()) // 10 - number - 1)
        if number == 20:  # however slow the machine is
            wait_until(lambda: len(dataset.begun()) // 10 - 21 >= 3)
    # The size of a batch is known once the first one has come.
    assert max(ahead[2:]) <= 6


class Wide(Journal):
    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.full((1024,), float(super().__getitem__(index)))


def test_nothing_is_sampled_ahead_without_workers() -> None:
    dataset = Journal(20)
    for number, _ in enumerate(DataLoader(dataset, 2)):
        assert dataset.begun() == list(range(2 * number + 2))


# ---- loading the next epoch ahead -----------------------------------------------------------


def distributed(size: int) -> DistributedSampler[int]:
    return DistributedSampler(Numbers(size), num_replicas=2, rank=0, shuffle=True)


FORETOLD: dict[str, Any] = {
    "sequential": {},
    "seed": {"shuffle": True, "seed": 5},
    "distributed": {"sampler": distributed(24)},
    "batch-sampler": {
        "batch_size": 1,
        "batch_sampler": torch.utils.data.BatchSampler(distributed(24), 2, False),
    },
}
UNKNOWN: dict[str, Any] = {
    "shuffled": {"shuffle": True},
    "own-sampler": {"sampler": InOrder(24)},
    "list": {"sampler": list(range(24))},
    "own-batch-sampler": {"batch_size": 1, "batch_sampler": blocks(24, 2)},
}


def ahead(workers: dict[str, Any]) -> dict[str, Any]:
    """The workers, if any, persist and begin the next epoch early."""
    stay = workers["num_workers"] > 0
    return {**workers, "persistent_workers": "next_epoch" if stay else False}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_order_that_is_not_known_ahead_is_not_begun_ahead(name: str) -> None:
    for method in ("thread", "process"):
        workers = {"num_workers": 2, "workers": method, "persistent_workers": "next_epoch"}
        with pytest.raises(ValueError, match="needs an order that is known in advance"):
            DataLoader(Numbers(24), **{"batch_size": 2, **UNKNOWN[name]}, **workers)


@pytest.mark.parametrize("name", FORETOLD)
@pytest.mark.parametrize("method", ["thread", "process"])
def test_next_epoch_is_begun_before_this_one_ends_on_request(method: str, name: str) -> None:
    dataset = Journal(24)
    workers = {"num_workers": 2, "workers": method, "persistent_workers": "next_epoch"}
    loader = DataLoader(dataset, **{"batch_size": 2, **FORETOLD[name]}, **workers)
    delivered: Counter[int] = Counter()
    for epoch in range(3):
        sampler = loader.batch_sampler.sampler if name == "batch-sampler" else loader.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        seen = flat(indices(loader))
        assert len(seen) == len(set(seen)) == len(loader) * 2
        if name == "distributed":
            assert seen == list(sampler)
        delivered.update(seen)
        wait_until(lambda: len(dataset.begun()) >= delivered.total() + 8)
        assert not delivered - Counter(dataset.begun())
    del loader


@each
def test_samplers_that_surprise(workers: dict[str, Any]) -> None:
    sampler = distributed(40)
    loader = DataLoader(Numbers(40), 4, sampler=sampler, **ahead(workers))
    # The epoch rises by one, stays, jumps, and falls.
    for epoch in (0, 1, 1, 7, 8, 3, 3, 4):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        assert flat(indices(loader)) == expected


@each
def test_dataset_that_grows_between_epochs(workers: dict[str, Any]) -> None:
    dataset = Numbers(10)
    loader = DataLoader(dataset, 3, **ahead(workers))
    for size in (10, 10, 13, 13, 4, 0, 7):
        dataset.size = size
        assert indices(loader) == blocks(size, 3)


@each
def test_set_epoch_jumps(workers: dict[str, Any]) -> None:
    loader, other = (
        DataLoader(Numbers(20), 4, shuffle=True, seed=9, **ahead(workers)) for _ in range(2)
    )
    epochs = [indices(loader) for _ in range(4)]
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 4
    for epoch in (2, 2, 0, 3, 1):
        other.set_epoch(epoch)
        assert indices(other) == epochs[epoch]
    other.set_epoch(1)
    assert [indices(other), indices(other), indices(other)] == epochs[1:]


@each
@pytest.mark.parametrize("order", ["strict", "batch", "arrival", "fast_first"])
def test_breaks_between_epochs_that_were_begun_ahead(order: str, workers: dict[str, Any]) -> None:
    loader, reference = (
        DataLoader(Filled(26, 3), 4, shuffle=True, seed=3, **options)
        for options in ({"order": order, **ahead(workers)}, {})
    )
    for stop in (6, 7, 0, 1, 7, 7) * 2:
        expected = [int(row[0]) for batch in reference for row in batch]
        seen = []
        for number, batch in enumerate(loader):
            seen += [int(row[0]) for row in batch]
            if number == stop:
                break
        else:
            assert sorted(seen) == list(range(26))
        assert len(seen) == len(set(seen))
        if order == "strict":
            assert seen == expected[: len(seen)]
