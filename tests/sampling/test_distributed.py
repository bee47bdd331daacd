"""What several ranks draw together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from minato.sampling.samplers import (
    InterleavedRanks,
    RankSampler,
    next_sampler,
    ranked,
    sampler_at_rank,
)
from tests.datasets import Numbers


def test_another_rank_has_its_own_part() -> None:
    mine = BatchSampler(RankSampler(Numbers(12), 3, 1, False, 0, False), 2, False)
    assert list(mine) == [[1, 4], [7, 10]]
    assert list(sampler_at_rank(mine, 2)) == [[2, 5], [8, 11]]
    assert mine.sampler.rank == 1


def test_ranks_draw_in_turn() -> None:
    sampler = BatchSampler(RankSampler(Numbers(10), 2, 0, False, 0, False), 2, False)
    both = InterleavedRanks(sampler, range(2))
    assert list(both) == [[0, 2], [1, 3], [4, 6], [5, 7], [8], [9]]
    assert (len(both), both.batch_size) == (6, 2)


class Ranked:
    num_replicas = 2
    rank = 0


class Unequal(Ranked):
    def __iter__(self) -> Iterator[Any]:
        return iter([[0], [1]][: 2 - self.rank])


def test_ranks_with_unequal_parts() -> None:
    with pytest.raises(ValueError, match="rank 1 has fewer batches than rank 0 by Unequal"):
        list(InterleavedRanks(Unequal(), range(2)))


class Drawn(Ranked):
    """Each rank takes its part of the same permutation, by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.generator)[self.rank :: 2].tolist())


class Shuffled(Sampler[int]):
    """Draws with a generator, or with the functions of a module."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        order = list(range(8))
        self.generator.shuffle(order)
        yield from order


class Divided(DistributedSampler[int]):
    """Each rank takes its part of what another sampler draws."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, 2, 0, shuffle=False)
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        drawn = list(self.sampler)
        return iter([drawn[i] for i in super().__iter__()])


class Later(Shuffled):
    """Draws each two when they are due."""

    def __iter__(self) -> Iterator[int]:
        for first in range(0, 8, 2):
            two = [first, first + 1]
            self.generator.shuffle(two)
            yield from two


class OfTorch:
    """The functions of torch, by the name that others have for them."""

    def shuffle(self, order: list[int]) -> None:
        order[:] = [order[i] for i in torch.randperm(len(order))]


class DividedLater(Divided):
    """The same without a look ahead."""

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.sampler, self.rank, None, self.num_replicas)


class Mixed(BatchSampler):
    """Shuffles the batches of a rank."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, 1, False)
        self.generator = random.Random(1)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        self.generator.shuffle(batches)
        yield from batches


SHUFFLES: list[Callable[[], Any]] = [
    Drawn,
    *(partial(Divided, Shuffled(module)) for module in (np.random, random)),
    *(partial(DividedLater, Later(module)) for module in (np.random, random, OfTorch())),
    *(
        lambda kind=kind: Divided(Shuffled(kind(1)))
        for kind in (np.random.default_rng, np.random.RandomState, random.Random)
    ),
    lambda: Divided(RandomSampler(range(8))),
    lambda: Divided(RandomSampler(range(8), generator=torch.Generator().manual_seed(1))),
]


def drawn_by(draw: Callable[[], list[int]]) -> tuple[list[list[int]], tuple[float, ...]]:
    """Three epochs, and what the default generators give then."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    epochs = [draw() for _ in range(3)]
    return epochs, (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("make", SHUFFLES)
def test_ranks_draw_with_generators_of_their_own(make: Callable[[], Any]) -> None:
    sampler, alone = make(), make()
    found, then = drawn_by(lambda: list(InterleavedRanks(sampler, range(2))))
    assert all(sorted(epoch) == list(range(8)) for epoch in found)
    assert ([epoch[::2] for epoch in found], then) == drawn_by(lambda: list(alone))


class Counting(DistributedSampler[int]):
    """Sets its epochs by itself."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.epoch += 1


def test_a_sampler_goes_on_from_epoch_to_epoch() -> None:
    first, *alone = (Counting(Numbers(8), 2, rank) for rank in (0, 0, 1))
    both = InterleavedRanks(first, range(2))
    for _ in range(3):
        found = list(both)
        assert [found[::2], found[1::2]] == list(map(list, alone))


def test_ranks_shuffle_their_batches_alike() -> None:
    found = list(InterleavedRanks(Mixed(RankSampler(Numbers(8), 2, 0, False, 0, False)), range(2)))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert second[0] - first[0] == 1
    assert len(found) == 8


class Fixed(Ranked):
    """Has chosen its part before anyone asks for another rank's."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_ranks_with_the_same_part() -> None:
    with pytest.raises(ValueError, match=r"Fixed gives all ranks the same batches.* self\.rank"):
        list(InterleavedRanks(Fixed([[0, 2], [4, 6]]), range(2)))
    assert list(InterleavedRanks(Fixed([[0, 2]]), range(2))) == [[0, 2]] * 2
    assert list(InterleavedRanks(Fixed([[0], [0]]), range(2))) == [[0]] * 4
    assert list(InterleavedRanks(Fixed([[0, 2]]), range(1))) == [[0, 2]]


def test_who_knows_ranks() -> None:
    inner = DistributedSampler(Numbers(4), 2, 1)
    assert ranked(BatchSampler(inner, 2, False)) is inner
    assert ranked(SequentialSampler(Numbers(4))) is None
    assert ranked([0, 1]) is None


def test_the_next_epoch_is_known() -> None:
    inner = RankSampler(Numbers(50), 2, 0, True, 3, False)
    later = next_sampler(InterleavedRanks(BatchSampler(inner, 5, False), range(2)))
    inner.set_epoch(1)
    assert list(later) == list(InterleavedRanks(BatchSampler(inner, 5, False), range(2)))
    assert next_sampler(InterleavedRanks(Unequal(), range(2))) is None
