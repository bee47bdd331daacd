"""The samples that took longest."""

from __future__ import annotations

import random

from minato.observe.stats.slowest import (
    KEPT,
    NBYTES,
    UNKNOWN,
    SlowestSamples,
    SlowSample,
    slowest_of,
)


def test_the_slowest_are_kept_whatever_the_order() -> None:
    costs = list(range(1, 101))
    random.Random(3).shuffle(costs)
    memory = bytearray(NBYTES)
    written = SlowestSamples(memory)
    for cost in costs:
        written.offer(1000 + cost, 0, cost, -1, cost // 2)
    assert written.floor_ns == 81
    found = slowest_of(SlowestSamples(memory).read())  # as another process sees it
    assert [(each.key, each.cost_ns, each.stage_ns) for each in found] == [
        (1000 + cost, cost, cost // 2) for cost in range(100, 80, -1)
    ]


def test_of_a_key_the_slowest_time_counts() -> None:
    slowest = SlowestSamples()
    slowest.offer(7, 0, 50, 2, 40)
    slowest.offer(7, 1, 90, -1, 80)
    slowest.offer(7, 2, 60, 1, 10)
    assert slowest.read() == [SlowSample(7, 90, 1, -1, 80)]
    other = SlowSample(7, 95, 3, UNKNOWN, 0)
    assert slowest_of([*slowest.read(), other]) == [other]


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
    memory = bytearray(NBYTES)
    before = SlowestSamples(memory)
    for cost in range(1, KEPT + 1):
        before.offer(cost, 0, cost, -1, 0)
    after = SlowestSamples(memory)
    after.offer(KEPT, 1, 3, -1, 0)
    assert after.floor_ns == 1
    after.offer("new", 1, 100, -1, 0)
    assert after.floor_ns == 2
    assert [each.key for each in slowest_of(after.read())] == ["'new'", *range(KEPT, 1, -1)]
