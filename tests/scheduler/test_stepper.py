"""Samples stage by stage: what is measured, and where one can be left."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from minato._core.clock import now_ns
from minato.chain.chain import Chain
from minato.scheduler.stepper import Partial, Stepper
from minato.stats.profile import Meters


def stepper_of(
    *steps: Callable[[Any], Any], dataset: Any = None
) -> tuple[Stepper, Meters, array[int]]:
    lease, meters = array("q", [40, now_ns(), -1]), Meters(len(steps))
    words = memoryview(lease)
    return Stepper(dataset or list(range(10)), Chain(steps), words, meters), meters, lease


def plus(number: int) -> Callable[[Any], Any]:
    return lambda value: value + number


def counts(meters: Meters) -> list[int]:
    return [histogram.count for histogram in meters.all]


def test_every_stage_of_a_measured_sample_is_recorded() -> None:
    stepper, meters, lease = stepper_of(plus(1), plus(10))
    assert [stepper.measured(key) for key in (3, 4)] == [14, 15]
    # Not the total, which the runner knows.
    assert counts(meters) == [0, 2, 2, 2, 2, 0, 0, 0, 2, 2]
    assert meters.size.total == 16
    assert meters.transforms.total == 4
    assert lease[2] == 2  # all transforms are done


def test_a_straight_sample_is_not_measured() -> None:
    stepper, meters, _ = stepper_of(plus(1), plus(10))
    assert stepper.straight(3) == 14
    assert not any(counts(meters))


def test_the_lease_names_the_stage_that_runs() -> None:
    seen: list[int] = []

    def look(value: Any) -> Any:
        seen.append(lease[2])
        return value

    stepper, _, lease = stepper_of(look, look)
    stepper.measured(0)
    assert seen == [0, 1]


def test_without_a_chain_the_dataset_is_all_there_is() -> None:
    stepper, meters, _ = stepper_of()
    assert stepper.measured(3) == 3
    assert counts(meters) == [0, 1, 1, 1, 1, 0, 0, 0]
    stepper.slow_ns, stepper.may_leave = 1, lambda position, nbytes: True
    assert stepper.measured(3) == 3  # nothing is left of it that could wait


@pytest.mark.parametrize("way", ["straight", "measured"])
def test_a_slow_sample_is_left_between_any_two_stages(way: str) -> None:
    stepper, meters, _ = stepper_of(plus(1), plus(10), plus(100))
    stepper.slow_ns, stepper.may_leave = 1, lambda position, nbytes: True
    stepper.capture = lambda: "state"
    partial = getattr(stepper, way)(3)
    found = []
    while type(partial) is Partial:
        assert stepper.left[-1] is partial
        found.append((partial.position, partial.key, partial.value, partial.step))
        assert partial.randomness == "state"
        before_ns = partial.active_ns
        partial = stepper.resume(partial)
        if type(partial) is Partial:
            assert partial.active_ns >= before_ns
    assert found == [(39, 3, 3, 0), (39, 3, 4, 1), (39, 3, 14, 2)]
    assert partial == 114
    measured = way == "measured"
    times = int(measured)
    assert counts(meters) == [0, *[times] * 4, 0, 0, 0, *[times] * 3]
    assert stepper.dearest == ([stepper.dearest[0]] if measured else [])


def test_quick_samples_and_refused_ones_are_not_left() -> None:
    stepper, _, _ = stepper_of(plus(1), plus(10))
    asked: list[tuple[int, int]] = []

    def refuse(position: int, nbytes: int) -> bool:
        asked.append((position, nbytes))
        return False

    stepper.may_leave = refuse
    assert stepper.straight(3) == 14
    stepper.slow_ns = 10**15
    assert stepper.straight(3) == 14
    assert asked == []
    stepper.slow_ns = 1
    assert stepper.straight(3) == 14
    assert asked == [(39, 8), (39, 8)]  # and not when it is complete
    assert stepper.left == []


def test_time_spent_before_a_sample_was_left_counts() -> None:
    stepper, _, _ = stepper_of(plus(1), plus(10))
    stepper.slow_ns, stepper.may_leave = 10**12, lambda position, nbytes: True
    quick = Partial(39, 3, 3, 8, 0, None, 0, None)
    assert stepper.resume(quick) == 14
    slow = Partial(39, 3, 3, 8, 0, None, 10**12, None)
    again = stepper.resume(slow)
    assert type(again) is Partial
    assert (again.step, again.value) == (1, 4)
    assert slow.value is None  # it may have been changed in place


def test_what_a_stage_raises_comes_out_and_its_time_is_not_recorded() -> None:
    stepper, meters, lease = stepper_of(plus(1), lambda value: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stepper.measured(3)
    assert lease[2] == 1
    assert meters.cpu.count == meters.steps[1].count == 0
