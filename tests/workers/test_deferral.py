"""Deferral: when a worker defers and resumes a sample, and that the sample is the same as in one go."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minato import DataLoader
from minato._core import WorkerLedger
from minato._core.codes import READY
from minato._support.counters import shared_integers
from minato.engine.engine import Engine
from minato.observe.meters import Meters
from minato.transforms.compose import Transforms
from minato.transforms.rng import SampleRandomness, numpy_rng
from minato.workers.runner import Deferral, DeferredSample
from minato.workers.worker import Worker
from tests.datasets import TOO_MANY_WORKERS, Filled, flat, lags, late_by, three_draws, wait_until
from tests.scheduling.fakes import Bench, Journal, worker_of
from tests.selection import mostly_slow

SIZE, BATCH = 24, 4
SEED = 7


# -------------------------------------------------------------------------------------- the decision


class View:
    """The part of a ledger that the decision depends on."""

    front = 100

    def __init__(self, waiting: bool = True, unclaimed: int = 100) -> None:
        self.waiting = waiting
        self.placed: set[int] = set()
        self.is_placed = self.placed.__contains__
        self.unclaimed = lambda: unclaimed


def deferral_of(view: View, meters: Meters | None = None, workers: int = 1) -> Deferral:
    ledger = cast(WorkerLedger, view)
    return Deferral(ledger=ledger, meters=meters or Meters(0), num_workers=lambda: workers)


def deferred(position: int) -> DeferredSample:
    return DeferredSample(position, position, None, 1, None, 0, None, (-1, 0), 0)


@pytest.mark.parametrize(
    ("waiting", "unclaimed", "allowed"),
    [(True, 5, True), (True, 4, False), (True, 0, False), (False, 5, False)],
)
def test_a_sample_is_deferred_while_the_consumer_waits_and_the_others_have_work(
    waiting: bool, unclaimed: int, allowed: bool
) -> None:
    deferral = deferral_of(View(waiting, unclaimed), workers=4)
    assert deferral.allows(0) is allowed
    deferral.defer(deferred(0))
    assert deferral.is_due() is not allowed


def test_a_worker_defers_one_sample_at_a_time() -> None:
    deferral = deferral_of(View(), meters := Meters(0))
    assert not deferral.is_due()
    assert deferral.take() is None
    sample = deferred(0)
    deferral.defer(sample)
    assert not deferral.allows(1)
    assert deferral.take() is sample
    assert deferral.take() is None
    assert deferral.allows(1)
    assert deferral.num_deferred == meters.deferred.count == 1


def test_a_sample_whose_batch_is_settled_is_not_deferred_and_is_due() -> None:
    view = View()
    deferral = deferral_of(view)
    deferral.defer(deferred(7))
    assert not deferral.is_due()
    view.placed.update((7, 8))
    assert deferral.is_due()
    deferral.take()
    assert not deferral.allows(8)
    assert deferral.allows(9)


def test_a_sample_that_began_before_its_turn_is_not_deferred() -> None:
    deferral = deferral_of(View())
    assert deferral.allows(99)
    assert not deferral.allows(100)


# -------------------------------------------------------------------- workers that take turns in here


def grid(key: int) -> Any:
    """A fresh array that says which sample it is."""
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


def counted(inner: Any, number: int, calls: Counter[Any], bad: set[int]) -> Any:
    """A transform that counts for which samples it is applied; some raise."""

    def call(pair: tuple[int, Any]) -> tuple[int, Any]:
        key, value = pair
        calls[key, number] += 1
        if key in bad:
            raise ValueError(f"bad {key}")
        return key, inner(value)

    return call


class Keyed:
    """Samples together with their keys."""

    def __getitem__(self, key: int) -> Any:
        return key, grid(key)


class KeyedJournal(Journal):
    """Also keeps the sample of each key."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.samples: dict[int, Any] = {}

    def _samples(self, place: int, k: int, samples: list[Any]) -> None:
        for key, value in samples:
            assert key not in self.samples
            self.samples[key] = value.copy()
        super()._samples(place, k, samples)


def straight(steps: list[Any]) -> dict[int, Any]:
    """The samples of a run without any stop."""
    randomness, found = SampleRandomness(SEED), {}
    for key in range(SIZE):
        randomness.bind(0, key)
        found[key] = functools.reduce(lambda value, step: step(value), steps, grid(key))
    return found


class Case:
    """A few workers, taking turns in this thread, that defer samples where ``chance`` says."""

    def __init__(
        self,
        steps: list[Any],
        order: str,
        chance: random.Random,
        mean_ns: float,
        bad: set[int] = frozenset(),  # type: ignore[assignment]
        workers: int = 2,
    ) -> None:
        self.bench = Bench(order, max_lag=8, fixed=SIZE // BATCH, workers=workers)
        self.calls: Counter[Any] = Counter()
        self.meters = Meters(len(steps))
        self.writer = KeyedJournal(self.bench)
        self.share = chance.random()
        chain = Transforms(tuple(counted(s, i, self.calls, bad) for i, s in enumerate(steps)))
        self.hire = lambda number: self._worker(number, chain, chance, mean_ns)
        self.workers = [self.hire(number) for number in range(workers)]
        self.bench.ledger.slow_ns = 1  # every sample is slow
        self.bench.ledger.waiting = True
        batches = [list(range(i, i + BATCH)) for i in range(0, SIZE, BATCH)]
        self.bench.begin(batches, seed=SEED)

    def _worker(
        self, number: int, chain: Transforms, chance: random.Random, mean_ns: float
    ) -> Worker:
        ledger = self.bench.workers[number]
        # As if there were no other workers: so samples are deferred as often as can be.
        deferral = Deferral(ledger=ledger, meters=self.meters, num_workers=lambda: 0)
        allows = deferral.allows
        deferral.allows = lambda position: (  # type: ignore[method-assign]
            chance.random() < self.share and allows(position)
        )
        how: Any = {"deferral": deferral, "make_randomness": SampleRandomness}
        how |= {"meters": self.meters, "active": len(self.bench.workers)}
        worker = worker_of(self.bench, number, Keyed(), chain, self.writer, **how)
        estimate = worker.runner.cost_estimate
        estimate.mean_ns = mean_ns
        estimate.draws = {1.0: False, 1e5: None, 4e6: True}[mean_ns]
        return worker

    def kill(self, number: int) -> None:
        """A worker is killed between two leases."""
        self.bench.ledger.release(number)
        self.workers[number] = self.hire(number)

    def run(self, turns: random.Random) -> None:
        idle = 0
        while idle < 4 * len(self.workers):
            self.bench.ledger.waiting = turns.random() < 0.9
            idle = 0 if turns.choice(self.workers).step() else idle + 1
        while any(worker.step() for worker in self.workers):
            pass

    def assert_all_ready(self) -> None:
        states = {self.bench.ledger.state(item.record) for item in self.bench.dispatcher._open}
        assert states == {READY}

    def assert_whole(self, expected: dict[int, Any]) -> None:
        """Every sample came, as it is in one go."""
        assert sorted(self.writer.samples) == list(range(SIZE))
        for key, value in expected.items():
            np.testing.assert_array_equal(self.writer.samples[key], value)
        self.assert_all_ready()

    @property
    def errors(self) -> list[tuple[Any, str]]:
        return [entry[1:] for entry in self.writer.journal if entry[0] == "error"]


ORDERS = ["arrival", "fast_first"]


def has_deferred(worker: Worker) -> int:
    deferral = worker._deferral
    return 0 if deferral is None else deferral.num_deferred


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=50)
@given(
    steps=st.lists(st.sampled_from(TRANSFORMS), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    mean_ns=st.sampled_from([1.0, 1e5, 4e6]),
)
def test_wherever_samples_are_deferred_they_are_the_same_and_each_transform_runs_once(
    order: str, steps: list[Any], seed: int, mean_ns: float
) -> None:
    with SampleRandomness(SEED).saved():
        expected = straight(steps)
        case = Case(steps, order, random.Random(seed), mean_ns)
        case.run(random.Random(seed + 1))
    case.assert_whole(expected)
    assert case.errors == []
    # Cheap samples are run again, bound, when one is seen to draw for the first time.
    if mean_ns > 1000:
        assert set(case.calls.values()) == {1}
        assert len(case.calls) == SIZE * len(steps)
        assert case.meters.total.count == SIZE


def always(
    steps: list[Any], order: str = "arrival", chance: random.Random | None = None, **options: Any
) -> Case:
    """Workers that defer each sample that they may."""
    case = Case(steps, order, chance or random.Random(0), 4e6, **options)
    case.share = 1.0
    return case


def test_a_worker_defers_a_sample_and_completes_it_later() -> None:
    with SampleRandomness(SEED).saved():
        case = always([add_in_place, draw_from_all], workers=1)
        (worker,) = case.workers
        worker.step()
        assert case.writer.samples == {} == case.calls
        worker.step()  # one sample is deferred already
        assert sorted(case.writer.samples) == [1]
        case.bench.ledger.waiting = False
        worker.step()
        assert sorted(case.writer.samples) == [0, 1]
        case.run(random.Random(0))
    assert has_deferred(worker) == case.meters.deferred.count > 1
    assert sorted(case.writer.samples) == list(range(SIZE))
    assert case.bench.ledger.activity(0).samples == SIZE


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=50)
@given(
    steps=st.lists(st.sampled_from(TRANSFORMS), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    deaths=st.integers(1, 4),
)
def test_whichever_worker_dies_with_a_deferred_sample_they_are_the_same(
    order: str, steps: list[Any], seed: int, deaths: int
) -> None:
    with SampleRandomness(SEED).saved():
        expected = straight(steps)
        chance = random.Random(seed)
        case = always(steps, order, chance, workers=3)
        for _ in range(deaths):
            for _ in range(chance.randrange(SIZE)):
                chance.choice(case.workers).step()
            case.kill(chance.randrange(3))
        case.run(chance)
    case.assert_whole(expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_sample_that_raises_after_it_was_deferred(order: str) -> None:
    for seed in range(5):
        with SampleRandomness(SEED).saved():
            case = always([add_in_place, grow], order, random.Random(seed), bad={5})
            case.run(random.Random(seed))
        assert case.errors == [(5, "bad 5")]
        assert sorted(case.writer.samples) == [key for key in range(SIZE) if key != 5]
        case.assert_all_ready()


def test_a_deferred_sample_of_a_dead_worker_runs_again_from_the_start() -> None:
    with SampleRandomness(SEED).saved():
        case = always([draw_from_all, add_in_place])
        dead, alive = case.workers
        dead.step()
        assert case.bench.ledger.release(0) == 1
        while alive.step():
            pass
        expected = straight([draw_from_all, add_in_place])
    case.assert_whole(expected)
    assert Counter(number for (_, number) in case.calls.elements()) == {0: SIZE, 1: SIZE}


def test_a_deferred_sample_is_completed_before_the_next_epoch_begins() -> None:
    with SampleRandomness(SEED).saved():
        case = always([add_in_place, grow], workers=1)
        (worker,) = case.workers
        worker.step()
        assert has_deferred(worker) == 1
        case.bench.dispatcher.cancel_all()
        case.bench.begin([[100, 101]], epoch=1)
        worker.step()
        assert 0 in case.writer.samples
        assert has_deferred(worker) == 3  # the first one twice
        case.run(random.Random(0))
    assert sorted(case.writer.samples) == [0, 100, 101]


# ------------------------------------------------------------------------------------- whole loaders

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

LENGTH = 60
METHODS = {"processes": {}, "threads": {"workers": "thread"}}


def pause(sample: Any) -> Any:
    """A transform that takes its time."""
    time.sleep(0.0005)
    return sample


def draw(sample: Any) -> Any:
    """A transform that draws where draws are bound to samples."""
    sample[2:] += three_draws()[:3]
    return sample


def square(sample: Any) -> Any:
    """A transform that must not be applied twice."""
    return np.concatenate([sample[:1], sample[1:] ** 2])


@pytest.fixture
def everything_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any stage, time is up."""

    def update(engine: Any) -> None:
        engine.ledger.slow_ns = 1

    monkeypatch.setattr(Engine, "_update_threshold", update)


def samples_of(loader: DataLoader[Any], epochs: int = 1) -> list[list[Any]]:
    return [sorted(torch.cat(list(loader)).tolist()) for _ in range(epochs)]


def num_deferred(loader: Any) -> int:
    return sum(meters.deferred.count for meters in loader._minato_history.engines[-1]().meters)


@pytest.mark.usefixtures("everything_is_slow")
@mostly_slow(
    ("method", "order"),
    [
        *(("processes", "strict"), ("processes", "arrival")),
        *(("threads", "batch"), ("threads", "fast_first")),
        *(("threads", "strict"), ("threads", "arrival")),
        *(("processes", "batch"), ("processes", "fast_first")),
    ],
    quick=4,
)
def test_deferred_samples_are_what_they_are_in_one_go(method: str, order: str) -> None:
    how = METHODS[method]
    counts = shared_integers(LENGTH)

    def count(sample: Any) -> Any:
        """Over all processes; it changes the sample in place."""
        counts[int(sample[0])] += 1
        sample[1] += 1
        return sample

    chain = [count, square, pause, *([] if how else [draw]), square]
    options: dict[str, Any] = {"batch_size": 4, "transforms": chain, "seed": 3}
    expected = samples_of(DataLoader(Filled(LENGTH, 5), **options), epochs=2)
    assert (counts == 2).all()
    options.update(num_workers=2, order=order, **how)
    assert samples_of(DataLoader(Filled(LENGTH, 5), **options)) == expected[:1]
    assert (counts == 3).all()
    loader = DataLoader(Filled(LENGTH, 5), **options, persistent_workers=True)
    assert samples_of(loader, epochs=2) == expected
    if order not in ORDERS:
        assert num_deferred(loader) == 0
    else:  # none is where the loop does not wait
        wait_until(lambda: num_deferred(loader) or not list(loader))


@pytest.mark.usefixtures("everything_is_slow")
@pytest.mark.parametrize("order", ORDERS)
def test_order_bounds_hold_for_deferred_samples(order: str) -> None:
    loader = DataLoader(
        Filled(LENGTH, 5),
        4,
        transforms=[pause, pause, pause],
        num_workers=3,
        order=late_by(order, 2),
    )
    batches = [[int(row[0]) for row in batch] for batch in loader]
    assert sorted(flat(batches)) == list(range(LENGTH))
    assert max(lags(batches, 4).values()) <= 2


@pytest.mark.usefixtures("everything_is_slow")
@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_the_deferred_sample_of_a_killed_worker_is_not_lost() -> None:
    died = shared_integers(1)

    def die_once(sample: Any) -> Any:
        if int(sample[0]) == 23 and not died[0]:
            died[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    expected = samples_of(
        DataLoader(Filled(LENGTH, 5), 4, transforms=[square, draw, square], seed=3)
    )
    options: Any = {"transforms": [square, pause, draw, die_once, square], "seed": 3}
    loader = DataLoader(Filled(LENGTH, 5), 4, num_workers=2, order="fast_first", **options)
    assert samples_of(loader) == expected
    assert died[0]
