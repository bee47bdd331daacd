"""Samples stage by stage: which are measured, and where one can be deferred."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from minato import DataLoader
from minato._core import Lease, now_ns
from minato.observe.meters import Meters
from minato.transforms.compose import Transforms
from minato.workers import runner
from minato.workers.runner import DeferredSample, StageRunner
from tests.datasets import Numbers


class Defers:
    """A deferral that refuses so many times, then allows."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.asked: list[int] = []
        self.samples: list[DeferredSample] = []

    def allows(self, position: int) -> bool:
        self.asked.append(position)
        return len(self.asked) > self.refusals

    def defer(self, sample: DeferredSample) -> None:
        self.samples.append(sample)


def stepper_of(
    *steps: Callable[[Any], Any], deferral: Defers | None = None
) -> tuple[StageRunner, Meters, Lease]:
    lease, meters, chain = Lease(), Meters(len(steps)), Transforms(steps)
    lease.begin(39, now_ns())
    parts: Any = {"lease": lease, "meters": meters, "deferral": deferral}
    return StageRunner(list(range(10)), chain, **parts), meters, lease


def plus(number: int) -> Callable[[Any], Any]:
    return lambda value: value + number


def counts(meters: Meters) -> list[int]:
    return [histogram.count for histogram in meters.all]


def test_every_stage_of_a_measured_sample_is_recorded() -> None:
    stage_runner, meters, lease = stepper_of(plus(1), plus(10))
    assert [stage_runner.measured(key) for key in (3, 4)] == [14, 15]
    # Not the total, which the runner knows.
    assert counts(meters) == [0, 2, 2, 2, 2, 0, 0, 0, 2, 2]
    assert meters.size.total == 16
    assert meters.transforms.total == 4
    assert lease.step == 2  # all transforms are done


def test_the_lease_names_the_stage_that_runs() -> None:
    seen: list[int] = []

    def look(value: Any) -> Any:
        seen.append(lease.step)
        return value

    stage_runner, _, lease = stepper_of(look, look)
    stage_runner.measured(0)
    assert seen == [0, 1]


def test_without_a_chain_the_dataset_is_all_there_is() -> None:
    stage_runner, meters, _ = stepper_of(deferral=(deferral := Defers(0)))
    assert stage_runner.measured(3) == 3
    assert counts(meters) == [0, 1, 1, 1, 1, 0, 0, 0]
    stage_runner.slow_ns = 1
    assert stage_runner.measured(3) == 3
    assert deferral.asked == []  # nothing is left of it that could wait


@pytest.mark.parametrize("way", ["straight", "measured"])
def test_a_slow_sample_is_deferred_between_any_two_stages(way: str) -> None:
    deferral = Defers(0)
    stage_runner, meters, _ = stepper_of(plus(1), plus(10), plus(100), deferral=deferral)
    stage_runner.slow_ns, stage_runner.capture = 1, lambda: "state"
    sample = getattr(stage_runner, way)(3)
    found = []
    while type(sample) is DeferredSample:
        assert deferral.samples[-1] is sample
        found.append((sample.position, sample.index, sample.value, sample.step, sample.randomness))
        deferred, sample = sample, stage_runner.resume(sample)
        assert deferred.value is None  # it may have been changed in place
        if type(sample) is DeferredSample:
            assert sample.active_ns >= deferred.active_ns
    assert found == [(39, 3, value, step, "state") for step, value in enumerate((3, 4, 14))]
    assert sample == 114
    times = int(way == "measured")
    assert counts(meters) == [0, *[times] * 4, 0, 0, 0, *[times] * 3]
    assert len(stage_runner.longest) == times


def test_time_spent_before_a_sample_was_deferred_counts() -> None:
    stage_runner, _, _ = stepper_of(plus(1), plus(10), deferral=Defers(0))
    stage_runner.slow_ns = 10**12
    quick = DeferredSample(39, 3, 3, 0, None, 0, None, (-1, 0), 0)
    assert stage_runner.resume(quick) == 14
    slow = DeferredSample(39, 3, 3, 0, None, 10**12, None, (-1, 0), 0)
    again = stage_runner.resume(slow)
    assert (again.step, again.value) == (1, 4)


def test_quick_samples_and_refused_ones_are_not_deferred() -> None:
    deferral = Defers(5)
    stage_runner, meters, _ = stepper_of(plus(1), plus(10), deferral=deferral)
    assert stage_runner.straight(3) == 14
    assert not any(counts(meters))  # a straight sample is not measured
    stage_runner.slow_ns = 10**15
    assert stage_runner.straight(3) == 14
    assert deferral.asked == []
    stage_runner.slow_ns = 1
    assert stage_runner.straight(3) == 14
    assert deferral.asked == [39, 39]  # and not when it is complete
    assert deferral.samples == []


def test_what_a_stage_raises_comes_out_and_its_time_is_not_recorded() -> None:
    stage_runner, meters, lease = stepper_of(plus(1), lambda value: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stage_runner.measured(3)
    assert lease.step == 1
    assert meters.cpu.count == meters.steps[1].count == 0


LENGTH = 60


class Pause:
    """A transform that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, sample: Any) -> Any:
        time.sleep(self.seconds)
        return sample


def costs_of(size: int, batch_size: int, **options: Any) -> dict[str, Any]:
    """What all workers of an epoch measured."""
    iterator: Any = iter(DataLoader(Numbers(size), batch_size, **options))
    engine = iterator._source
    assert len(list(iterator)) == size // batch_size
    costs: dict[str, Any] = engine._metrics.metrics().histograms
    assert costs["total"].count == size
    return costs


def test_what_samples_cost_is_measured_in_all_workers() -> None:
    costs = costs_of(LENGTH, 4, transforms=[Pause(0.006), str], num_workers=2)
    for name in ("0 Pause", "1 str", "dataset", "cpu"):
        assert costs[name].count == LENGTH
    assert costs["bytes"].total == LENGTH * 8
    assert 4_000_000 <= costs["0 Pause"].percentile(0.5) <= costs["total"].max
    assert costs["1 str"].percentile(0.5) < costs["0 Pause"].percentile(0.5)


def test_of_rather_expensive_samples_every_eighth_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_WORTH_MEASURING_NS", 1 << 60)
    monkeypatch.setattr(runner, "_EXPENSIVE", 1 << 60)  # however long they take on this machine
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}  # with the patched module
    costs = costs_of(400, 4, transforms=[Pause(0.001)], **workers)
    assert costs["0 Pause"].count == 400 // 8


@pytest.mark.parametrize("step", [str, lambda value: value * random.random()], ids=["str", "draws"])
@pytest.mark.parametrize(("num_workers", "every"), [(0, 256), (1, 32)])
def test_of_cheap_samples_few_are_measured(
    num_workers: int, every: int, step: Callable[[Any], Any]
) -> None:
    workers = {"multiprocessing_context": "fork"} if num_workers else {}
    costs = costs_of(20_000, 50, transforms=[step], num_workers=num_workers, **workers)
    assert 20_000 / 50 / every <= costs["dataset"].count < 2_000
