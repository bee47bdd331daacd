"""What workers measure: histograms, their sum, and the samples that took longest."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato.observe.meters import (
    KEPT,
    UNKNOWN,
    CostStats,
    Meters,
    SlowestSamples,
    SlowSample,
    share_above,
    slowest_of,
)
from tests.observe.histograms import histogram

STEPS = ("Crop", "Flip")


def sample(meters: Meters, crop_ns: int, flip_ns: int) -> None:
    meters.total.record(crop_ns + flip_ns + 10)
    meters.cpu.record(crop_ns)
    meters.size.record(4096)
    meters.transforms.record(2)
    meters.dataset.record(10)
    meters.steps[0].record(crop_ns)
    meters.steps[1].record(flip_ns)


def test_workers_are_added_up_by_part():
    workers = [Meters(2), Meters(2, bytearray(Meters.nbytes(2)))]
    sample(workers[0], 1000, 20)
    sample(workers[1], 3000, 22)
    profile = CostStats(STEPS)
    profile.update(workers)
    names = "total cpu bytes transforms dataset deferred window_full reading 0_Crop 1_Flip"
    assert " ".join(name.replace(" ", "_") for name in profile.run) == names
    assert profile.run["total"].max == 3032
    assert profile.run["transforms"].percentile(0.5) == 2


def test_what_has_not_grown_is_not_read_again():
    meters, profile = Meters(2), CostStats(STEPS)
    sample(meters, 1000, 20)
    profile.update([meters])
    before = profile.run
    meters.steps[1].record(30)
    assert profile.update([meters]) is profile.run  # if no other thread has replaced it since
    assert (before["1 Flip"].count, profile.run["1 Flip"].count) == (1, 2)
    assert profile.run["0 Crop"] is before["0 Crop"]


def test_meters_of_shared_memory_are_seen_from_both_sides():
    memory = bytearray(3 * Meters.nbytes(1))
    part = memoryview(memory)[Meters.nbytes(1) : 2 * Meters.nbytes(1)]
    Meters(1, part).steps[0].record(7)
    assert Meters(1, part).steps[0].count == 1
    assert not any(memory[: Meters.nbytes(1)])


@settings(max_examples=100)
@given(st.lists(st.integers(0, 31), max_size=200), st.integers(0, 32))
def test_the_share_above_is_exact_where_buckets_are(drawn, limit):
    exact = sum(value > limit for value in drawn) / max(len(drawn), 1)
    assert share_above(histogram(*drawn), limit) == pytest.approx(exact, abs=1 / 2000)


# ---- the slowest samples --------------------------------------------------------------------


def test_the_slowest_are_kept_whatever_the_order() -> None:
    costs = [1000 * cost for cost in range(1, 101)]
    random.Random(3).shuffle(costs)
    memory = bytearray(Meters.nbytes(0))
    written = Meters(0, memory).slowest
    assert written.floor_ns == 20_000  # cheaper ones share readings of the clock
    for cost in costs:
        written.offer(cost, 0, cost, -1, cost // 2)
    assert written.floor_ns == 81_000
    found = slowest_of(Meters(0, memory).slowest.read())  # as another process sees it
    assert [(each.key, each.cost_ns, each.stage_ns) for each in found] == [
        (cost, cost, cost // 2) for cost in range(100_000, 80_000, -1000)
    ]


def test_of_a_key_the_slowest_time_counts() -> None:
    slowest = SlowestSamples()
    slowest.offer(7, 0, 50, 2, 40)
    slowest.offer(7, 1, 90, -1, 80)
    slowest.offer(7, 2, 60, 1, 10)
    assert slowest.read() == [SlowSample(7, 90, 1, -1, 80)]
    other = SlowSample(7, 95, 3, UNKNOWN, 0)
    assert slowest_of([*slowest.read(), other]) == [other]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(-2, KEPT - 3), st.integers(1, 99)), max_size=120))
def test_each_index_has_one_row(offers: list[tuple[int, int]]) -> None:
    """Index 0 too, whose name empty rows have; a worker that takes over knows as much."""
    memory, costs = bytearray(Meters.nbytes(0)), dict[int, int]()
    slowest = Meters(0, memory).slowest
    for number, (index, cost_ns) in enumerate(offers):
        if number % 40 == 39:
            slowest = Meters(0, memory).slowest
        slowest.offer(index, 0, cost_ns, -1, 0)
        costs[index] = max(costs.get(index, 0), cost_ns)
        found = [(each.key, each.cost_ns) for each in slowest.read()]
        assert sorted(found) == sorted(costs.items())


def test_keys_of_any_kind() -> None:
    slowest = SlowestSamples()
    keys = [0, -5, "0", "cat.jpg", ("a", 1), 1 << 70, "x" * 200]
    for cost, key in enumerate(keys, 1):
        slowest.offer(key, 0, cost, -1, 0)
    found = [each.key for each in reversed(slowest_of(slowest.read()))]
    assert found[:2] == [0, -5]
    assert found[2:] == ["'0'", "'cat.jpg'", "('a', 1)", str(1 << 70), "'" + "x" * 63]


def test_no_more_than_twenty() -> None:
    assert len(slowest_of(SlowSample(i, i + 1, 0, -1, 0) for i in range(50))) == KEPT


def test_a_new_worker_goes_on_with_what_a_dead_one_has_left() -> None:
    memory = bytearray(Meters.nbytes(0))
    before = Meters(0, memory).slowest
    for cost in range(1, KEPT + 1):
        before.offer(cost, 0, 30_000 + cost, -1, 0)
    after = Meters(0, memory).slowest
    after.offer(KEPT, 1, 30_003, -1, 0)
    assert after.floor_ns == 30_001
    after.offer("new", 1, 30_100, -1, 0)
    assert after.floor_ns == 30_002
    assert [each.key for each in slowest_of(after.read())] == ["'new'", *range(KEPT, 1, -1)]
