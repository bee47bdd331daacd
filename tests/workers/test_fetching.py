"""``FetchOptions``: limits for all workers, a slow start, second requests for stragglers."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato import FetchOptions
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.workers.reads import Hedging, Read
from minato.workers.shared_state import SharedReadLimit
from tests.datasets import Journal, Numbers, flat, wait_until
from tests.threads import run_together


class Counted(Numbers):
    """Counts the reads under way in all processes; none ends before ``least`` have been."""

    def __init__(self, size: int, least: int) -> None:
        super().__init__(size)
        self.least = least
        self.running = multiprocessing.Value("q", 0)
        self.most = multiprocessing.Value("q", 0)

    def __getitem__(self, index: int) -> int:
        with self.running.get_lock():
            self.running.value += 1
            self.most.value = max(self.most.value, self.running.value)
        wait_until(lambda: self.most.value >= self.least)
        time.sleep(0.002 + 0.004 * (index % 3))
        with self.running.get_lock():
            self.running.value -= 1
        return index


@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize(("num_workers", "method"), [(0, "process"), (3, "process"), (2, "thread")])
def test_all_workers_share_one_limit(num_workers: int, method: str, collate: Any) -> None:
    dataset = Counted(120, num_workers or 4)
    options: Any = {"num_workers": num_workers, "workers": method, "collate_fn": collate}
    fetching = FetchOptions(8, max_in_flight=5)
    loader = minato.DataLoader(dataset, 4, fetch_concurrency=fetching, **options)
    assert [*map(int, flat(loader))] == list(range(120))
    assert dataset.most.value <= 5


def test_a_limit_is_kept_by_all_that_take_at_once() -> None:
    workers, most = 4, 9
    memory = np.zeros(SharedReadLimit.nbytes(workers), np.uint8)
    peaks: list[int] = []

    def hammer(number: int) -> None:
        random, held = np.random.default_rng(number), 0
        read_limit = SharedReadLimit(memory, 0, workers, most)
        for _ in range(1500):
            held += read_limit.take(number, int(random.integers(1, 5)))
            assert held >= 1  # one is always its own
            peaks.append(held)
            back = int(random.integers(0, held + 1))
            read_limit.give_back(number, back)
            held -= back
        read_limit.give_back(number, held)

    run_together(*(functools.partial(hammer, number) for number in range(workers)), limit_s=60)
    assert max(peaks) <= most - workers + 1
    alone = SharedReadLimit(memory, 0, workers, most)
    assert alone.take(0, 100) == most - workers + 1
    assert [alone.take(number, 3) for number in (0, 1, 2, 3)] == [0, 1, 1, 1]
    alone.begin(0)  # the worker has died, and another takes its number
    assert alone.take(2, 100) == most - workers


@pytest.mark.parametrize("slow_start", [1, 4])
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_a_slow_start_asks_for_little_more_than_was_delivered(slow_start: int, order: str) -> None:
    size, batch_size = 400, 5
    dataset = Journal(size)
    options: Any = {"num_workers": 2, "order": order, "prefetch_factor": 8}
    fetching = FetchOptions(6, slow_start=slow_start)
    loader = minato.DataLoader(dataset, batch_size, fetch_concurrency=fetching, **options)
    seen: list[int] = []

    def gets_going() -> bool:
        return len(dataset.begun()) > len(seen) + 2 * batch_size

    for k, batch in enumerate(loader):
        seen += batch.tolist()
        # next() asks for one more before it returns the batch, and what it returns counts as delivered.
        batches = 1 + (k + 1) + (k + 1) // slow_start
        assert len(dataset.begun()) <= batches * batch_size
        if k == 40:
            wait_until(gets_going)
    assert sorted(seen) == list(range(size))


def test_a_slow_start_neither_grows_nor_opens_before_its_time() -> None:
    window = PrefetchWindow(num_workers=2, fixed=None, budget_bytes=1 << 30, slow_start=2)
    assert window.most == 1
    assert not window.grow()  # it would only be asked again and again
    for _ in range(2):
        window.observe(100)
    assert window.most == 2


class Stuck(Numbers):
    """The first read of some samples waits for the second one, and may then raise."""

    def __init__(self, size: int, stuck: tuple[int, ...], error: bool = False) -> None:
        super().__init__(size)
        self.stuck = stuck
        self.error = error
        self.second = {index: threading.Event() for index in stuck}
        self.reads = dict.fromkeys(range(size), 0)
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.reads[index] += 1
            count = self.reads[index]
        if index in self.stuck and count == 1:
            assert self.second[index].wait(60)
            if self.error:
                raise OSError("late and broken")
        elif index in self.stuck:
            self.second[index].set()
        return index


class StuckLater(Stuck):
    async def __aget__(self, index: int) -> int:
        self.reads[index] += 1
        if index in self.stuck and self.reads[index] == 1:
            while not self.second[index].is_set():
                await asyncio.sleep(0.001)
            if self.error:
                raise OSError("late and broken")
        elif index in self.stuck:
            self.second[index].set()
        return index


@pytest.mark.parametrize("kind", [Stuck, StuckLater])
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "workers": "thread"}])
def test_a_straggler_is_asked_for_again(
    kind: Any, error: bool, workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kind(200, (150, 190), error)
    find = Hedging.straggler

    def straggler(hedging: Hedging, in_flight: Iterable[Read], now_ns: int) -> Any:
        """The first request, however late its thread runs, is the first that the dataset knows of."""
        reads = list(in_flight)
        known = [read for read in reads if dataset.reads[read.index]]
        found, again_s = find(hedging, known, now_ns)
        return found, again_s if found or len(known) == len(reads) else 0.001

    monkeypatch.setattr(Hedging, "straggler", straggler)
    fetching = FetchOptions(4, hedge_percentile=95)
    loader = minato.DataLoader(dataset, batch_size=10, fetch_concurrency=fetching, **workers)
    assert torch.cat(list(loader)).tolist() == list(range(200))
    report = fetching.report()
    assert report.reads == 200
    assert 2 <= report.hedged < 200
    assert report.hedges_won <= report.hedged
    if error:
        assert report.hedges_won >= 2
    assert [dataset.reads[index] for index in (150, 190)] == [2, 2]
    assert 202 <= sum(dataset.reads.values()) <= 200 + report.hedged


class Hangs(Numbers):
    """The first read of one sample waits until the test ends."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked, self.over = multiprocessing.Value("b", 0), multiprocessing.Value("b", 0)

    def __getitem__(self, index: int) -> int:
        if index == 150:
            with self.asked.get_lock():
                first, self.asked.value = not self.asked.value, 1
            # Not an Event, whose set() would wait for a process that ended.
            while first and not self.over.value:
                time.sleep(0.01)
        return index


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1}, {"num_workers": 1, "workers": "thread"}]
)
def test_a_read_whose_second_request_was_answered_delays_no_end(
    workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # For a read that is still needed.
    monkeypatch.setattr("minato.workers.reads._GRACE_S", 100.0)
    dataset = Hangs(200)
    fetching = FetchOptions(4, hedge_percentile=95)
    loader = minato.DataLoader(dataset, 10, fetch_concurrency=fetching, **workers)
    found = []
    for batch in loader:
        found += batch.tolist()
        last_s = time.monotonic()
    ended_s = time.monotonic()
    dataset.over.value = 1
    assert found == list(range(200))
    assert ended_s - last_s < 50


def test_worker_processes_report_too() -> None:
    fetching = FetchOptions(3, max_in_flight=4, slow_start=2, hedge_percentile=90)
    for context in ("fork", "forkserver"):
        before = fetching.report().reads
        options: Any = {"num_workers": 2, "multiprocessing_context": context}
        loader = minato.DataLoader(Numbers(30), 4, fetch_concurrency=fetching, **options)
        assert torch.cat(list(loader)).tolist() == list(range(30))
        assert fetching.report().reads == before + 30


@pytest.mark.parametrize(
    ("concurrency", "fetching", "arguments", "message"),
    [
        (0, {}, {}, "concurrency=0 is too small"),
        (2, {"max_in_flight": 0}, {}, "max_in_flight=0 is too small"),
        (2, {"slow_start": 0}, {}, "slow_start=0 is too small"),
        (2, {"hedge_percentile": 100}, {}, "hedge_percentile=100 is not between 1 and 100$"),
        (
            1,
            {"hedge_percentile": 95},
            {},
            "hedge_percentile=95 .* concurrency=1 allows each worker one",
        ),
        (
            *(4, {"hedge_percentile": 95, "max_in_flight": 2}, {"num_workers": 2}),
            "hedge_percentile=95 .* max_in_flight=2 allows each worker one",
        ),
        (2, {"max_in_flight": 2}, {"num_workers": 3}, "fewer than 3 workers"),
        (1, {"slow_start": 2}, {"compat": "torch"}, r"FetchOptions\(concurrency=1, .*contradicts"),
    ],
)
def test_what_is_not_possible_is_refused(
    concurrency: int, fetching: Any, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        options = FetchOptions(concurrency, **fetching)
        minato.DataLoader(Numbers(4), fetch_concurrency=options, **arguments)


def test_in_a_jam_second_requests_are_few() -> None:
    hedging = Hedging(90)
    reads = [Read(key, 0, None, None) for key in range(100)]
    for read in reads:
        read.started_ns = 1
    assert hedging.straggler(reads, 10**12) == (None, None)  # nothing is known yet
    for _ in range(100):
        hedging.note(1000)
    late_ns = 10**9
    again = 0
    while (straggler := hedging.straggler(reads, late_ns)[0]) is not None:
        straggler.hedge()
        hedging.on_hedge()
        again += 1
    assert again == 2
    hedging.on_answer()
    assert hedging.straggler(reads, late_ns) == (None, None)
    hedging.on_answer()
    assert hedging.straggler(reads, late_ns)[0] is reads[2]
    young = Read(0, 0, None, None)
    young.started_ns = late_ns
    assert hedging.straggler([young], late_ns) == (None, pytest.approx(1e-3, rel=0.1))
