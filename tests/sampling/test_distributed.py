"""What several ranks draw together."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

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


class Unequal:
    """Gives the later ranks fewer batches."""

    num_replicas = 2
    rank = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([[0], [1]][: 2 - self.rank])


def test_ranks_with_unequal_parts() -> None:
    with pytest.raises(ValueError, match="rank 1 has fewer batches than rank 0 by Unequal"):
        list(InterleavedRanks(Unequal(), range(2)))


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
