"""Samples that are left between transforms and taken up again are what they would be in one go."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minato._core.codes import ERROR_BLOB, MUST_COLLATE, READY, SAMPLE_BLOB
from minato._core.wait import Gate
from minato.chain.chain import Chain
from minato.chain.rng import SampleRandomness, numpy_rng
from minato.scheduler.fetch import Fetcher
from minato.scheduler.parking import Parking
from minato.scheduler.runner import Runner
from minato.scheduler.stepper import Stepper
from minato.scheduler.worker import Worker
from minato.stats.profile import Meters
from tests.scheduler.fakes import Bench

SIZE, BATCH = 24, 4
SEED = 7


class Grids:
    """Fresh arrays that say which sample they are."""

    def __getitem__(self, key: int) -> Any:
        return np.full(3, float(key))


def add_in_place(value: Any) -> Any:
    value += 1
    return value


def scale_in_place(value: Any) -> Any:
    np.multiply(value, 1.5, out=value)
    return value


def draw_from_all(value: Any) -> Any:
    return value + random.random() + np.random.standard_normal() + float(torch.rand(()))


def draw_a_gauss(value: Any) -> Any:
    return value + random.gauss(0, 1)


def draw_from_own(value: Any) -> Any:
    value += numpy_rng().random(value.shape)
    return value


def grow(value: Any) -> Any:
    return np.concatenate([value, value[-1:]])


TRANSFORMS = (add_in_place, scale_in_place, draw_from_all, draw_a_gauss, draw_from_own, grow)


class Counted:
    """A transform that counts for which samples it is applied; some raise."""

    def __init__(self, inner: Any, number: int, calls: Counter[Any], bad: set[int]) -> None:
        self.inner = inner
        self.number = number
        self.calls = calls
        self.bad = bad

    def __call__(self, pair: tuple[int, Any]) -> tuple[int, Any]:
        key, value = pair
        self.calls[key, self.number] += 1
        if key in self.bad:
            raise ValueError(f"bad {key}")
        return key, self.inner(value)


class Keyed:
    """Samples together with their keys."""

    def __getitem__(self, key: int) -> Any:
        return key, Grids()[key]


class Sink:
    """Keeps what comes to each place."""

    def __init__(self, bench: Bench) -> None:
        self.collates = self.holds = False
        self.run_again: Any = None
        self.samples: dict[int, Any] = {}
        self.errors: list[tuple[Any, str]] = []
        self._ledger = bench.ledger

    def write_run(self, batch: int, k: int, place: int, samples: list[Any]) -> None:
        for i, (key, value) in enumerate(samples):
            assert key not in self.samples
            self.samples[key] = value.copy()
            self._ledger.attach(place + i, 64 | SAMPLE_BLOB, 0)

    def write_error(
        self, batch: int, place: int, error: BaseException, key: Any, state: Any = None
    ) -> None:
        self.errors.append((key, str(error)))
        self._ledger.attach(place, 64 | ERROR_BLOB, 0)

    def finished(self, batch: int, outcome: int) -> None:
        if outcome == MUST_COLLATE:
            self._ledger.set_ready(batch, 64 | SAMPLE_BLOB, 0)


def straight(steps: list[Any], binds: bool) -> dict[int, Any]:
    """The samples of a run without any stop."""
    randomness, found = SampleRandomness(SEED), {}
    for key in range(SIZE):
        if binds:
            randomness.bind(0, key)
        value = Grids()[key]
        for step in steps:
            value = step(value)
        found[key] = value
    return found


class Case:
    """A few workers, taking turns in this thread, that leave their samples where ``leaves`` says."""

    def __init__(
        self,
        steps: list[Any],
        order: str,
        leaves: random.Random,
        usual_ns: float,
        bad: set[int] = frozenset(),  # type: ignore[assignment]
        workers: int = 2,
    ) -> None:
        self.bench = Bench(order, max_lag=8, fixed=SIZE // BATCH, workers=workers)
        self.calls: Counter[Any] = Counter()
        self.meters = Meters(len(steps))
        self.sink = Sink(self.bench)
        self.share = leaves.random()
        self.most_parked = 0
        chain = Chain(tuple(Counted(s, i, self.calls, bad) for i, s in enumerate(steps)))
        self.hire = lambda number: self._worker(number, chain, order, leaves, usual_ns)
        self.workers = [self.hire(number) for number in range(workers)]
        self.bench.ledger.slow_ns = 1  # any boundary is late
        batches = [list(range(i, i + BATCH)) for i in range(0, SIZE, BATCH)]
        self.bench.begin(batches, seed=SEED)

    def _worker(
        self, number: int, chain: Chain, order: str, leaves: random.Random, usual_ns: float
    ) -> Worker:
        ledger = self.bench.ledger
        lease = ledger.lease_words(number)
        stepper = Stepper(Keyed(), chain, lease, self.meters)
        # As if nobody else were there: so samples are left as often as can be.
        alone = functools.partial(int, 0)
        bound = order in ("strict", "batch")
        parking = Parking(ledger, stepper.left, True, bound, workers=alone)

        def may_leave(position: int, nbytes: int) -> bool:
            self.most_parked = max(self.most_parked, len(parking) + len(stepper.left))
            return leaves.random() < self.share and parking.may_leave(position, nbytes)

        stepper.may_leave = may_leave
        runner = Runner(lease, SampleRandomness, self.meters, stepper, None, False, Exception)
        runner.habits.usual_ns = usual_ns
        runner.habits.draws = False if usual_ns < 1000 else None
        return Worker(
            number,
            ledger,
            Gate(self.bench.segment.array, ledger.work_gate_offset),
            Fetcher(Keyed(), chain, batched=True),
            runner,
            self.sink,  # type: ignore[arg-type]
            ledger.keys,
            parking,
        )

    def kill(self, number: int) -> None:
        """A worker is killed between two leases."""
        self.bench.ledger.release(number)
        self.workers[number] = self.hire(number)

    def run(self, turns: random.Random) -> None:
        idle = 0
        while idle < 4 * len(self.workers):
            idle = 0 if turns.choice(self.workers).step() else idle + 1
        while any(worker.step() for worker in self.workers):
            pass

    def all_ready(self) -> bool:
        return all(
            self.bench.ledger.state(item.record) == READY for item in self.bench.dispatcher._open
        )


@pytest.mark.parametrize("order", ["strict", "batch", "arrival", "fast_first"])
@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.sampled_from(TRANSFORMS), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    usual_ns=st.sampled_from([1.0, 1e5, 4e6]),
)
def test_wherever_samples_are_left_they_are_the_same_and_each_transform_runs_once(
    order: str, steps: list[Any], seed: int, usual_ns: float
) -> None:
    with SampleRandomness(SEED).saved():
        expected = straight(steps, binds=True)
        chance = random.Random(seed)
        case = Case(steps, order, chance, usual_ns)
        case.run(random.Random(seed + 1))
    assert sorted(case.sink.samples) == list(range(SIZE))
    for key, value in expected.items():
        np.testing.assert_array_equal(case.sink.samples[key], value)
    assert case.all_ready()
    assert case.sink.errors == []
    # Cheap samples are run again, bound, when one is seen to draw for the first time.
    if usual_ns > 1000:
        assert set(case.calls.values()) == {1}
        assert len(case.calls) == SIZE * len(steps)
        assert case.meters.total.count == SIZE
    assert case.most_parked <= 4


def test_samples_really_are_left() -> None:
    class Always(random.Random):
        def random(self) -> float:
            return 0.0 if hasattr(self, "drawn") else setattr(self, "drawn", True) or 0.9

    with SampleRandomness(SEED).saved():
        case = Case([add_in_place, draw_from_all], "arrival", Always(), 4e6, workers=1)
        case.workers[0].step()
        assert case.sink.samples == {}
        case.run(random.Random(0))
    assert case.most_parked == 4
    assert sorted(case.sink.samples) == list(range(SIZE))
    assert case.bench.ledger.activity(0)[0] == SIZE


@pytest.mark.parametrize("order", ["batch", "arrival", "fast_first"])
@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.sampled_from(TRANSFORMS), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    deaths=st.integers(1, 4),
)
def test_whoever_dies_with_samples_set_aside_they_are_the_same(
    order: str, steps: list[Any], seed: int, deaths: int
) -> None:
    with SampleRandomness(SEED).saved():
        expected = straight(steps, binds=True)
        chance = random.Random(seed)
        case = Case(steps, order, chance, 4e6, workers=3)
        case.share = 1.0
        for _ in range(deaths):
            for _ in range(chance.randrange(SIZE)):
                chance.choice(case.workers).step()
            case.kill(chance.randrange(3))
        case.run(chance)
    assert sorted(case.sink.samples) == list(range(SIZE))
    for key, value in expected.items():
        np.testing.assert_array_equal(case.sink.samples[key], value)
    assert case.all_ready()


@pytest.mark.parametrize("order", ["batch", "arrival"])
def test_a_sample_that_raises_after_it_was_left(order: str) -> None:
    for seed in range(5):
        with SampleRandomness(SEED).saved():
            case = Case([add_in_place, grow], order, random.Random(seed), 4e6, bad={5})
            case.run(random.Random(seed))
        assert case.sink.errors == [(5, "bad 5")]
        assert sorted(case.sink.samples) == [key for key in range(SIZE) if key != 5]
        assert case.all_ready()


def test_what_a_dead_worker_had_left_is_run_again_from_the_start() -> None:
    class Never(random.Random):
        def random(self) -> float:
            return 0.999

    with SampleRandomness(SEED).saved():
        case = Case([draw_from_all, add_in_place], "arrival", Never(), 4e6)
        case.share = 1.0
        dead, alive = case.workers
        for _ in range(3):
            dead.step()
        assert case.bench.ledger.release(0) == 3
        while alive.step():
            pass
        expected = straight([draw_from_all, add_in_place], binds=True)
    for key, value in expected.items():
        np.testing.assert_array_equal(case.sink.samples[key], value)
    assert case.all_ready()
    assert Counter(number for (_, number) in case.calls.elements()) == {0: SIZE, 1: SIZE}


def test_the_last_pass_is_finished_before_the_next_begins() -> None:
    class Never(random.Random):
        def random(self) -> float:
            return 0.0

    with SampleRandomness(SEED).saved():
        case = Case([add_in_place, grow], "arrival", Never(), 4e6, workers=1)
        case.share = 1.0
        (worker,) = case.workers
        for _ in range(4):
            worker.step()
        assert len(case.calls) == 0
        assert len(worker._parking) == 4
        case.bench.dispatcher.cancel_all()
        case.bench.begin([[100, 101]], epoch=1)
        worker.step()
        assert sorted(case.sink.samples)[:4] == [0, 1, 2, 3]
        assert len(worker._parking) == 1
        case.run(random.Random(0))
    assert sorted(case.sink.samples) == [0, 1, 2, 3, 100, 101]
