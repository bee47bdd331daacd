"""Which samples begin before their turn, and by how much."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from minato.scheduler.foresight import Foresight, Record
from tests.scheduler.fakes import Bench

MS = 1_000_000


class Model:
    """Knows the costs that it is given, and writes down what it is told."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = costs
        self.observed: list[tuple[int, float]] = []

    def predict(self, index: int, size: None, plans: tuple[()]) -> float | None:
        return self.costs.get(index)

    def observe(self, index: int, size: None, plans: tuple[()], cost_ns: float) -> None:
        self.observed.append((index, cost_ns))


def order_of_claims(
    bench: Bench, batches: list[list[int]], model: Model, **known: Any
) -> list[int]:
    """Keys in the order in which a worker claims them."""
    foresight = Foresight(bench.ledger, model, known.get("record", Record()), num_workers=2)
    bench.ledger.slow_ns = int(known.get("slow_ns", 3 * MS))
    foresight.mean_ns = known.get("mean_ns", 1.0 * MS)
    bench.dispatcher._foresight = foresight
    bench.begin(batches)
    found = []
    while (lease := bench.ledger.claim(0, 1)) is not None:
        batch, k, _ = lease
        found += bench.ledger.keys(batch, k, 1)
    return found


BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
EARLY = [5, 0, 1, 2, 3, 9, 4, 6, 7, 8, 10, 11]


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_long_samples_begin_as_much_earlier_as_they_are_longer(order: str) -> None:
    model = Model({5: 4.0 * MS, 9: 3.5 * MS, 10: 2.0 * MS})
    # Of the others, two workers do 6 in 3 ms and 5 in 2.5 ms; 2 ms is not slow.
    assert order_of_claims(Bench(order, 8), BATCHES, model) == EARLY


def test_nothing_is_marked_while_little_is_known_or_to_be_gained() -> None:
    model = Model({5: 4.0 * MS})
    in_turn = list(range(12))
    assert order_of_claims(Bench(), BATCHES, model, mean_ns=0.0) == in_turn
    assert order_of_claims(Bench(), BATCHES, model, slow_ns=0) == in_turn
    # Samples are so cheap that looking at each would be felt.
    assert order_of_claims(Bench(), BATCHES, model, mean_ns=0.1 * MS) == in_turn
    assert order_of_claims(Bench(), BATCHES, Model({})) == in_turn
    # Of what was expected to be slow, too little was.
    wrong = Record(slow=5, expected=40, both=5)
    assert order_of_claims(Bench(), BATCHES, model, record=wrong) == in_turn
    # Slow, but no slower than the mean of a few very slow ones.
    assert order_of_claims(Bench(), BATCHES, model, mean_ns=5.0 * MS) == in_turn


def test_costs_are_learned_from_full_batches() -> None:
    bench, model, record = Bench(), Model({20: 9.0 * MS, 21: 8.0 * MS}), Record()
    foresight = Foresight(bench.ledger, model, record, num_workers=1)
    bench.begin([[20, 21]])
    lease = bench.claim(0, 2)
    bench.ledger.note_costs(0, array("q", [5 * MS, 13 * MS // 2]), 2)
    bench.finish(lease)
    foresight.learn(lease.batch)
    assert model.observed == []  # not yet known whether that is worth while
    foresight.mean_ns, bench.ledger.slow_ns = 5.0 * MS, 6 * MS
    foresight.learn(lease.batch)
    assert model.observed == [(20, 5 * MS), (21, 6.5 * MS)]
    assert (record.slow, record.expected, record.both) == (1, 2, 1)
    assert list(record.pairs) == [(9.0 * MS, 5 * MS), (8.0 * MS, 13 * MS // 2)]
    assert (record.hit_rate, record.precision) == (1.0, 0.5)


def test_old_expectations_count_less() -> None:
    record = Record()
    for _ in range(2000):
        record.note(3.0, 1.0, threshold_ns=2.0)
    assert record.is_bad
    assert record.expected <= 1024
    for _ in range(1000):
        record.note(3.0, 3.0, threshold_ns=2.0)
    assert not record.is_bad


def test_samples_of_the_next_pass_do_not_go_before_those_of_this_one() -> None:
    bench, model = Bench(), Model({5: 40.0 * MS, 9: 40.0 * MS})
    foresight = Foresight(bench.ledger, model, Record(), num_workers=2)
    bench.ledger.slow_ns, foresight.mean_ns = 3 * MS, 1.0 * MS
    bench.dispatcher._foresight = foresight
    bench.begin([[0, 1], [2, 3]], expected=([[4, 5], [8, 9]], 1, 0))
    found = []
    while (lease := bench.ledger.claim(0, 1)) is not None:
        found += bench.ledger.keys(lease[0], lease[1], 1)
    assert found == [0, 1, 2, 3, 5, 9, 4, 8]


class Planning(Model):
    """Says that samples for which so was planned are slow."""

    def predict(self, index: int, size: None, plans: Any) -> float | None:
        return 4.0 * MS if plans[0] else 0.5 * MS

    def observe(self, index: int, size: None, plans: Any, cost_ns: float) -> None:
        self.observed.append((index, plans[0]))


def test_samples_are_judged_by_what_is_planned_for_them() -> None:
    bench, model = Bench(), Planning({})
    asked = []

    def plans_of(seed: int, epoch: int, key: int, occurrence: int) -> tuple[bool]:
        asked.append((seed, epoch, key))
        return (key == 5,)

    foresight = Foresight(bench.ledger, model, Record(), 2, plans_of)
    bench.ledger.slow_ns, foresight.mean_ns = 3 * MS, 1.5 * MS
    bench.dispatcher._foresight = foresight
    bench.begin([[0, 1, 2, 3]])
    assert asked == []  # samples so cheap are not worth it
    foresight.mean_ns = 2.0 * MS
    bench.begin([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert [key for _, _, key in asked] == list(range(8))
    found = []
    while (lease := bench.ledger.claim(0, 1)) is not None:
        found += bench.ledger.keys(lease[0], lease[1], 1)
    # Two workers run two others in the 2 ms that it takes longer.
    assert found == [0, 1, 2, 5, 3, 4, 6, 7]


class Weighing(Model):
    """Says that large samples are slow."""

    def predict(self, index: int, size: float | None, plans: Any) -> float | None:
        return None if size is None else size * MS

    def observe(self, index: int, size: float | None, plans: Any, cost_ns: float) -> None:
        self.observed.append((index, size))


def test_samples_are_judged_by_their_size() -> None:
    bench, model = Bench(), Weighing({})
    foresight = Foresight(
        bench.ledger, model, Record(), 2, size_of=lambda key: 4.0 if key == 5 else 0.5
    )
    bench.ledger.slow_ns, foresight.mean_ns = 3 * MS, 2.0 * MS
    bench.dispatcher._foresight = foresight
    bench.begin([[0, 1, 2, 3], [4, 5, 6, 7]])
    found = []
    while (lease := bench.ledger.claim(0, 1)) is not None:
        position = bench.ledger.describe(lease[0])[1] + lease[1]
        found += bench.ledger.keys(lease[0], lease[1], 1)
        bench.ledger.note_costs(position, array("q", [2 * MS]), 1)
        bench.ledger.fill_run(0, lease[0], lease[1], 1)
    assert found == [0, 1, 2, 5, 3, 4, 6, 7]
    foresight.learn(0)
    assert model.observed == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5)]
