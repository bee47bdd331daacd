"""What samples cost, and which of them start before their turn, by how much."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from minato.sampling.epoch import NextEpoch
from minato.scheduling.slow_samples import CostModel, EarlyStart
from tests.scheduling.fakes import Bench

MS = 1_000_000


def knowing(costs_ns: dict[int, float]) -> CostModel:
    model = CostModel()
    for index, cost_ns in costs_ns.items():
        model.observe(index, cost_ns)
    return model


def early_start(
    bench: Bench, costs_ns: dict[int, float], mean_ns: float = 1.0 * MS, slow_ns: int = 3 * MS
) -> EarlyStart:
    early = EarlyStart(ledger=bench.ledger, costs=knowing(costs_ns), num_workers=2)
    bench.ledger.slow_ns = slow_ns
    early.follow(mean_ns)
    bench.dispatcher._early_start = early
    return early


def claimed(bench: Bench) -> list[int]:
    """Indices in the order in which one worker claims them."""
    found = []
    while (claim := bench.workers[0].claim(1)) is not None:
        found += bench.ledger.indices(claim.batch, claim.k, 1)
    return found


# ---- costs


def test_a_cost_is_averaged_and_the_latest_counts_half() -> None:
    model = CostModel()
    assert model.predict(5) is None
    model.observe(5, 100.0)
    assert model.predict(5) == 100
    model.observe(5, 200.0)
    assert model.predict(5) == 150
    assert model.predict(4) is None


def test_ten_million_indices_take_a_bounded_amount_of_memory() -> None:
    model = CostModel()
    for index in range(0, 10_000_000, 1000):
        model.observe(index, 1.0 + index)
    assert model.nbytes <= 64 << 20
    assert model.predict(9_999_000) == pytest.approx(9_999_001)


@pytest.mark.parametrize("key", ["name", (1, 2), -1, 10**12, None])
def test_keys_that_are_no_indices_are_not_learned(key: Any) -> None:
    model = CostModel()
    model.observe(key, 100.0)
    assert model.predict(key) is None
    assert model.nbytes == 0


# ---- early starts

BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
EARLY = [5, 0, 1, 2, 3, 9, 4, 6, 7, 8, 10, 11]


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_slow_samples_start_as_much_earlier_as_they_take_longer(order: str) -> None:
    bench = Bench(order, 8)
    early_start(bench, {5: 4.0 * MS, 9: 3.5 * MS, 10: 2.0 * MS})
    bench.begin(BATCHES)
    # Of the others, two workers do 6 in 3 ms and 5 in 2.5 ms; 2 ms is not slow.
    assert claimed(bench) == EARLY


@pytest.mark.parametrize(
    "known",
    [
        {"costs_ns": {}},
        {"mean_ns": 0.0},
        {"slow_ns": 0},
        {"mean_ns": 0.1 * MS},  # samples are so cheap that learning each would be felt
        {"mean_ns": 5.0 * MS},  # slow, but no slower than the mean of a few very slow ones
    ],
)
def test_nothing_starts_early_while_little_is_known_or_to_be_gained(known: dict[str, Any]) -> None:
    bench = Bench()
    early_start(bench, **{"costs_ns": {5: 4.0 * MS}, **known})
    bench.begin(BATCHES)
    assert claimed(bench) == list(range(12))


def test_costs_are_learned_from_full_batches() -> None:
    bench = Bench()
    early = early_start(bench, {}, mean_ns=0.0)
    bench.begin([[20, 21]])
    lease = bench.claim(0, 2)
    bench.workers[0].note_costs(0, array("q", [5 * MS, 13 * MS // 2]), 2)
    bench.finish(lease)
    assert early.threshold_ns == 0  # not yet known whether learning is worth the time
    early.follow(5.0 * MS)
    assert early.threshold_ns == 5.0 * MS
    early.learn(lease.batch)
    assert [early._costs.predict(index) for index in (20, 21)] == [5 * MS, 6.5 * MS]


def test_more_workers_start_a_slow_sample_earlier() -> None:
    bench = Bench("strict", 8)
    early = early_start(bench, {11: 7.0 * MS}, mean_ns=2.0 * MS)
    early.resize(4)
    bench.begin(BATCHES)
    assert claimed(bench) == [0, 11, *range(1, 11)]


def test_samples_of_the_next_epoch_do_not_go_before_those_of_this_one() -> None:
    bench = Bench()
    early_start(bench, {5: 40.0 * MS, 9: 40.0 * MS})
    bench.begin([[0, 1], [2, 3]], following=NextEpoch(iter([[4, 5], [8, 9]]), 1, 0))
    assert claimed(bench) == [0, 1, 2, 3, 5, 9, 4, 8]
