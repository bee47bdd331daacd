"""Batches by cost: the budget, the ranks' equal steps, and each index once."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minato import CostBatchSampler, DataLoader, MinatoWarning
from minato.sampling.dealing import Stage
from minato.sampling.samplers import Remaining, dealing_of
from tests.behaviour.states import begun, resumed
from tests.datasets import Numbers, flat, indices

COSTS = np.random.default_rng(5).integers(1, 200, 500)


def per_rank(ranks: int, *arguments: Any, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    found = []
    for rank in range(ranks):
        sampler = CostBatchSampler(*arguments, shard=(rank, ranks), **options)
        sampler.set_epoch(epoch)
        found.append([*sampler])
        assert len(sampler) == len(found[-1])
    return found


def flat_ranks(ranks: list[list[list[int]]]) -> list[int]:
    return flat(flat(ranks))


@settings(max_examples=60)
@given(
    costs=st.lists(st.integers(0, 50), max_size=80),
    ranks=st.integers(1, 5),
    padded=st.booleans(),
    seed=st.none() | st.just(0),
    max_size=st.none() | st.integers(1, 9),
    pool=st.none() | st.integers(1, 90),
    epoch=st.integers(0, 3),
)
def test_the_budget_holds_and_each_index_comes_once(
    costs: list[int], ranks: int, padded: bool, seed: int | None, max_size: int | None,
    pool: int | None, epoch: int,
) -> None:  # fmt: skip
    found = per_rank(
        ranks, costs, 60, padded=padded, seed=seed, max_size=max_size, pool=pool, epoch=epoch
    )
    assert len({len(batches) for batches in found}) == 1  # as many steps for each rank
    for batch in itertools.chain(*found):
        paid = [costs[index] for index in batch]
        assert 0 < len(batch) <= (max_size or 80)
        assert (len(batch) * max(paid) if padded else sum(paid)) <= 60
    indices = flat_ranks(found)
    assert {*indices} == {*range(len(costs))}
    if any(len(batch) > 1 for batch in itertools.chain(*found)):
        assert len(indices) == len(costs)


def test_fewer_samples_than_ranks_come_again() -> None:
    found = per_rank(4, [1, 1, 1], 10)
    assert [len(batches) for batches in found] == [1, 1, 1, 1]
    assert {*flat_ranks(found)} == {0, 1, 2}
    assert flat_ranks(per_rank(3, [], 10)) == []


def test_samples_of_similar_cost_are_together_and_little_is_padded() -> None:
    def padded(pool: int | None) -> float:
        batches = [*CostBatchSampler(COSTS, 2000, pool=pool)]
        return sum(len(batch) * COSTS[batch].max() for batch in batches) / COSTS.sum()

    assert padded(None) < 1.1
    assert padded(500) < padded(50) < padded(25)


def test_in_each_step_the_ranks_have_batches_of_similar_cost() -> None:
    one, other = per_rank(2, COSTS, 2000)
    apart = [abs(COSTS[a].max() - COSTS[b].max()) for a, b in zip(one, other, strict=True)]
    assert np.median(apart) < 0.2 * np.median(COSTS)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    first, same = ([*CostBatchSampler(COSTS, 2000, seed=3)] for _ in range(2))
    later = per_rank(1, COSTS, 2000, seed=3, epoch=1)[0]
    assert first == same
    assert first != later
    assert first != [*CostBatchSampler(COSTS, 2000, seed=4)]
    fixed = CostBatchSampler(COSTS, 2000, seed=None)
    before = [*fixed]
    fixed.set_epoch(1)
    assert [*fixed] == before


def test_samples_that_are_too_expensive() -> None:
    costs = [3, 50, 4, 70]
    with pytest.raises(ValueError, match=r"index 1 alone costs 50, more than max_cost=10"):
        CostBatchSampler(costs, 10)
    for oversized, expected in (("alone", [[0, 2], [1], [3]]), ("skip", [[0, 2]])):
        assert [*CostBatchSampler(costs, 10, oversized=oversized, seed=None)] == expected


def test_samples_that_are_skipped_do_not_make_pools_smaller() -> None:
    costs = [*range(1, 501)]
    alone, among = (
        CostBatchSampler([*costs, *others], 1000, oversized="skip", shard=(0, 1))
        for others in ([], [math.inf])
    )
    assert abs(len(alone) - len(among)) <= 1


def test_costs_may_be_foretold_by_a_function() -> None:
    asked: list[int] = []

    def cost(index: int) -> float:
        asked.append(index)
        return float(COSTS[index])

    sampler = CostBatchSampler(map(cost, range(500)), 2000)
    assert [*sampler] == [*CostBatchSampler(torch.from_numpy(COSTS), 2000)]
    assert len([*sampler]) == len(sampler)
    assert asked == [*range(500)]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([1, -2], 10), {}, "the cost of index 1 is -2.0"),
        (([1, float("nan")], 10), {}, "the cost of index 1 is nan"),
        (([[1, 2]], 10), {}, r"costs of shape \(1, 2\)"),
        (([1], 0), {}, "max_cost=0 is too small"),
        (([1], 10), {"max_size": 0}, "max_size=0 is too small"),
        (([1], 10), {"oversized": "cut"}, "oversized='cut' is not possible"),
        (([1], 10), {"padded": "no"}, "padded='no' is not possible"),
        (([1], 10), {"shard": (2, 2)}, r"shard=\(2, 2\) is not possible"),
        (([1], 10), {"shard": (-1, 2)}, "shard=-1 is too small"),
        (([1], 10), {"shard": 2}, "shard=2 is not possible"),
    ],
)
def test_what_is_refused(arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CostBatchSampler(*arguments, **options)


def test_a_largest_cost_must_be_given() -> None:
    with pytest.raises(TypeError, match="max_cost=None is a NoneType: give a number"):
        CostBatchSampler([1], None)  # type: ignore[arg-type]


def test_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"give what it returns, map\(costs"):
        CostBatchSampler(lambda index: index, 10)  # type: ignore[arg-type]


def test_a_loader_tells_of_costs_that_are_not_those_of_its_samples() -> None:
    sampler = CostBatchSampler([1, 1], 2)
    with pytest.warns(MinatoWarning, match="costs of 2 samples, and the dataset has 3"):
        DataLoader(range(3), batch_sampler=sampler)
    with pytest.raises(TypeError, match="pass a CostBatchSampler as batch_sampler="):
        DataLoader(range(2), sampler=sampler)
    DataLoader(range(2), None, sampler=sampler)  # each item of it is one sample's index


# ---- with a loader --------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_goes_from_epoch_to_epoch(persistent: bool) -> None:
    sampler = CostBatchSampler(COSTS, 2000, seed=3)
    workers = {"num_workers": 1, "persistent_workers": persistent}
    loader = DataLoader(Numbers(500), batch_sampler=sampler, **workers)
    for epoch in range(3):
        assert indices(loader) == per_rank(1, COSTS, 2000, seed=3, epoch=epoch)[0]
    assert len(loader) == len(sampler)


def test_an_epoch_goes_on_where_a_state_was_taken() -> None:
    loader, later = (
        DataLoader(Numbers(500), batch_sampler=CostBatchSampler(COSTS, 2000, seed=3), num_workers=1)
        for _ in range(2)
    )
    deque(loader, 0)
    got, state = begun(loader, 5)
    got += indices(resumed(state, later))
    assert got == per_rank(1, COSTS, 2000, seed=3, epoch=1)[0]


def test_a_reader_may_change_its_batches() -> None:
    def spoilt(sampler: Any) -> list[list[int]]:
        found = []
        for batch in sampler:
            found.append([*batch])
            batch.append(-1)
        return found

    for sampler in (CostBatchSampler(COSTS, 2000), CostBatchSampler([1], 1, shard=(0, 3))):
        assert spoilt(sampler) == spoilt(sampler) == [*sampler]
    dealing = dealing_of(CostBatchSampler(COSTS, 2000), True)
    assert dealing is not None
    rest = Remaining(dealing, [Stage(1, 1, (), (0, 0), (0, 0))], len(COSTS))
    assert spoilt(rest) == spoilt(rest)
