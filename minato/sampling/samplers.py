"""The order of keys: permutations that are functions of (seed, epoch), and what the next pass will be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from minato._core.arrivals import Occurrences
from minato._core.seeding import mix
from minato.sampling.cost_batches import CostBatchSampler
from minato.sampling.distributed import InTurn, RankSampler
from minato.sampling.occurrences import Recurring

__all__ = [
    "SEEDED",
    "SeededSampler",
    "batches_of",
    "counted",
    "largest_batch",
    "next_sampler",
    "sizes_of",
]

_MOST_COUNTED = 1 << 28
"""Of a dataset's indices, so many are counted in an array."""


class SeededSampler(RandomSampler):
    """Shuffles by (seed, epoch) alone, so that the order of any epoch is known at any time.

    A ``RandomSampler``, because that is how trainers recognise that a loader shuffles.

    Args:
        data_source: Anything with a length.
        seed: Any integer.

    Attributes:
        epoch: The epoch whose permutation ``iter()`` gives; set it with ``set_epoch``.
    """

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation that the next ``iter()`` gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(mix(self.seed, self.epoch, 0) >> 1)
        yield from torch.randperm(len(self.data_source), generator=generator, device="cpu").tolist()


SEEDED = (SeededSampler, CostBatchSampler, RankSampler)
"""Samplers that each run of a loader tells its epoch."""


def batches_of(index_sampler: Any, batched: bool, whole: bool = False) -> Iterator[Any]:
    """The keys of each batch, in a list; without batching each key is a batch of its own.

    Args:
        whole: The dataset gets all keys of a batch in one call, so that their container matters: sequences, arrays
            and tensors are given as they are.
    """
    if not batched:
        return map(_alone, index_sampler)
    return map(_as_given if whole else list, index_sampler)


def counted(
    batches: Iterator[Any], index_sampler: Any, length: int | None, number_of: Callable[[Any], int]
) -> Iterator[Any]:
    """The batches of an epoch from its beginning, with each index marked that came before in it.

    Args:
        length: Of the dataset; None if it has none.
        number_of: An integer that stands for a key that is neither an integer nor a string.
    """
    if not _may_repeat(index_sampler):
        return batches
    # Ranks count each for itself, as they do without a shared pool.
    ranks = len(index_sampler.ranks) if type(index_sampler) is InTurn else 1
    size = min(length or 0, _MOST_COUNTED)
    counts = itertools.cycle([Occurrences(size, number_of) for _ in range(ranks)])

    def count(keys: Any) -> Any:
        found = next(counts).count(keys)
        return keys if found is None else Recurring(keys, found)

    return map(count, batches)


def _may_repeat(sampler: Any) -> bool:
    """Whether a sampler may give an index more than once in an epoch."""
    if type(sampler) in (BatchSampler, InTurn):
        return _may_repeat(sampler.sampler)
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples > len(sampler.data_source)
    return type(sampler) not in (SequentialSampler, DistributedSampler, *SEEDED)


def _alone(key: Any) -> list[Any]:
    return [key]


def _as_given(keys: Any) -> Any:
    return keys if isinstance(keys, (tuple, range, np.ndarray, torch.Tensor)) else list(keys)


def largest_batch(index_sampler: Any, batched: bool) -> int:
    """How many samples a batch has at most, as far as the sampler says so: by ``batch_size``, or as a list."""
    size = getattr(index_sampler, "batch_size", None)
    if batched and isinstance(index_sampler, (list, tuple)):
        size = max((len(batch) for batch in index_sampler if isinstance(batch, Sized)), default=1)
    return max(size, 1) if batched and isinstance(size, int) else 1


def sizes_of(index_sampler: Any, batched: bool) -> Iterator[list[int]]:
    """How many samples each batch of an iterable dataset shall have, in the place of its keys."""
    for index in index_sampler:
        yield [len(index) if batched else 1]


def next_sampler(index_sampler: Any) -> Any | None:
    """What the index sampler will be in the next epoch, or None if that is not certain to be known.

    Known are sequences, ``SeededSampler``, ``CostBatchSampler`` and ``DistributedSampler`` (whose epoch is expected to
    be raised by one), alone or in a plain ``BatchSampler``; and what several ranks draw from these.
    """
    if type(index_sampler) is InTurn:
        inner = next_sampler(index_sampler.sampler)
        return None if inner is None else InTurn(inner, index_sampler.ranks)
    if type(index_sampler) is BatchSampler:
        inner = next_sampler(index_sampler.sampler)
        if inner is None:
            return None
        return BatchSampler(inner, index_sampler.batch_size, index_sampler.drop_last)
    if type(index_sampler) is SequentialSampler:
        return index_sampler
    if type(index_sampler) in (*SEEDED, DistributedSampler):
        later = copy.copy(index_sampler)
        later.set_epoch(index_sampler.epoch + 1)
        return later
    return None
