"""Samplers whose order is known ahead, and the keys of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato.sampling.samplers import SeededSampler, batch_maker, next_sampler

DATA = range(20)


def index_batches(sampler: Any, batched: bool, **given: Any) -> Iterator[Any]:
    return map(batch_maker(batched, **given), sampler)


def permutation(seed: int, epoch: int, size: int = 20) -> list[int]:
    sampler = SeededSampler(range(size), seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    before = torch.get_rng_state()
    orders = {(seed, epoch): permutation(seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1, 2)}
    assert all(sorted(order) == list(DATA) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 9
    torch.manual_seed(99)
    assert {key: permutation(*key) for key in orders} == orders
    torch.set_rng_state(before)


def test_size_is_that_of_the_data_when_asked() -> None:
    data = list(range(3))
    sampler = SeededSampler(data, 5)
    assert isinstance(sampler, RandomSampler)  # by which trainers know that a loader shuffles
    assert len(sampler) == 3
    data.append(3)
    assert len(sampler) == 4
    assert sorted(sampler) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="num_samples should be a positive integer"):
        SeededSampler([], 5)  # as torch, which shuffles nothing either


def test_keys_of_batches() -> None:
    assert list(index_batches([[1, 2], (3,), []], batched=True)) == [[1, 2], [3], []]
    assert list(index_batches([1, (2, 3)], batched=False)) == [[1], [(2, 3)]]
    given = [(1, 2), [3]]
    as_given = list(index_batches(given, batched=True, whole=True))
    assert as_given == given
    assert [type(keys) for keys in as_given] == [tuple, list]
    assert list(index_batches([iter([1, 2])], batched=True, whole=True)) == [[1, 2]]


class Sized(list):  # type: ignore[type-arg]
    size = 0


def test_what_must_stay_whole_is_refused_where_batches_mix() -> None:
    batches = index_batches([(1, 2), Sized([1])], batched=True, whole=True, divided="order")
    assert next(batches) == (1, 2)
    with pytest.raises(ValueError, match=r"yields a Sized.*as it is, and order"):
        next(batches)


@pytest.mark.parametrize("whole", [False, True])
def test_indices_that_the_sampler_changes_are_copied(whole: bool) -> None:
    def changing(index: Any, batched: bool) -> Any:
        for step in range(3):
            index[...] = step
            yield [index] if batched and not whole else index

    for index in (torch.zeros(2, dtype=torch.int64), np.zeros(2, np.int64)):
        for batched in (False, True):
            drawn = list(index_batches(changing(index, batched), batched, whole=whole, copies=True))
            values = [np.asarray(batch).ravel().tolist() for batch in drawn]
            assert values == [[step] * 2 for step in range(3)]


def test_batches_are_copies() -> None:
    keys = [1, 2]
    (batch,) = index_batches([keys], batched=True)
    keys.append(3)
    assert batch == [1, 2]


def test_batches_are_drawn_one_by_one() -> None:
    drawn = []

    def sampler() -> Any:
        for key in DATA:
            drawn.append(key)
            yield [key]

    batches = index_batches(sampler(), batched=True)
    assert next(batches) == [0]
    assert drawn == [0]


# ---- the next epoch -------------------------------------------------------------------------


def test_next_epoch_of_known_samplers() -> None:
    sequential = SequentialSampler(DATA)
    assert list(next_sampler(sequential)) == list(DATA)
    seeded = SeededSampler(DATA, 3)
    seeded.set_epoch(6)
    assert list(next_sampler(seeded)) == permutation(3, 7)
    assert seeded.epoch == 6
    distributed = DistributedSampler(list(DATA), num_replicas=2, rank=1)
    distributed.set_epoch(2)
    now = list(distributed)
    later = list(next_sampler(distributed))
    assert list(distributed) == now
    distributed.set_epoch(3)
    assert list(distributed) == later != now


@pytest.mark.parametrize("drop_last", [False, True])
def test_next_epoch_of_a_batch_sampler(drop_last: bool) -> None:
    inner = SeededSampler(DATA, 3)
    later = next_sampler(BatchSampler(inner, 3, drop_last))
    order = permutation(3, 1)
    expected = [order[i : i + 3] for i in range(0, 18 if drop_last else 20, 3)]
    assert list(later) == expected
    assert inner.epoch == 0


class Own(SequentialSampler):
    """May do anything."""


class OwnBatches(BatchSampler):
    """May do anything, too."""


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(DATA),
        RandomSampler(DATA, generator=torch.Generator()),
        SubsetRandomSampler(DATA),
        WeightedRandomSampler([1.0, 2.0], 3),
        Own(DATA),
        OwnBatches(SequentialSampler(DATA), 2, False),
        BatchSampler(RandomSampler(DATA), 2, False),
        [[1, 2], [3]],
        list(DATA),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_next_epoch_of_others_is_not_known(sampler: Any) -> None:
    assert next_sampler(sampler) is None
