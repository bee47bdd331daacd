"""Samplers whose order is a function of (seed, epoch), batches of indices, and the sampler of the next epoch."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato._compat import EndlessSampler
from minato._core import Occurrences, mix_seed
from minato._support.hashes import index_hash
from minato._support.objects import attribute, is_exactly
from minato._support.text import message_of
from minato._support.values import integer_of
from minato.observe.stats.size import length_of
from minato.sampling.cost_batches import CostBatchSampler
from minato.sampling.distributed import InterleavedRanks, RankSampler
from minato.sampling.occurrences import Recurring

__all__ = [
    "LISTS",
    "SEEDED",
    "SeededSampler",
    "counted",
    "drawn_ahead",
    "endless_size",
    "in_epoch",
    "independent",
    "index_batches",
    "largest_batch",
    "next_sampler",
    "sizes_of",
]

_MOST_RESERVED = 1 << 20
"""Samples of a batch for which memory is reserved in advance, where their number is unknown."""
_MOST_COUNTED = 1 << 28
"""Largest number of a dataset's indices that an array counts."""


class SeededSampler(RandomSampler):
    """Shuffles by (seed, epoch) alone: the order of any epoch is known in advance.

    It is a ``RandomSampler``, as trainers look for that class to see whether a loader shuffles.

    Args:
        data_source: Anything with a length.
        seed: Any integer.

    Attributes:
        epoch: The epoch whose permutation ``iter()`` yields; set it with ``set_epoch``.
    """

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = operator.index(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation that the next ``iter()`` yields."""
        self.epoch = operator.index(epoch)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(mix_seed(self.seed, self.epoch, 0) >> 1)
        yield from torch.randperm(len(self.data_source), generator=generator, device="cpu").tolist()


_MOST_AHEAD, _INDICES_AHEAD = 32, 1024
"""Batches that are drawn together without workers, and their indices, which costs less than one by one."""

LISTS = (list, tuple, range, np.ndarray, torch.Tensor)
"""Containers of indices that mean no more than their elements; a dataset gets any other one whole or not at all."""

SEEDED = (SeededSampler, CostBatchSampler, RankSampler)
"""Samplers whose epoch the loader sets at the beginning of each epoch."""


def index_batches(
    index_sampler: Any,
    batched: bool,
    *,
    whole: bool = False,
    divided: str | None = None,
    copies: bool = False,
) -> Iterator[Any]:
    """Return the indices of each batch, in a list; without batching each index is a batch of one.

    Args:
        whole: The dataset gets all indices of a batch in one call (``__getitems__``). Then their container matters, and
            reaches it as it is, with the attributes of a class of the program's own.
        divided: Why single indices are all that is kept of a batch; None: its container is kept.
        copies: Indices are used after the next ones are drawn: those that a sampler may change are copied.
    """
    if not batched:
        return map(_copied_alone if copies else _alone, index_sampler)
    if whole:
        return map(functools.partial(_as_given, divided, copies), index_sampler)
    return map(_copied_list if copies else list, index_sampler)


def counted(
    batches: Iterator[Any],
    index_sampler: object,
    length: int | None,
) -> Iterator[Any]:
    """Return all batches of an epoch, with each index marked that occurs again in it.

    Args:
        length: Length of the dataset; None if it has none.
    """
    if not _may_repeat(index_sampler):
        return batches
    # Each rank counts its own indices, as without a shared pool.
    ranks = len(index_sampler.ranks) if type(index_sampler) is InterleavedRanks else 1
    size = min(length or 0, _MOST_COUNTED)
    counts = itertools.cycle([Occurrences(size, index_hash) for _ in range(ranks)])

    def count(indices: Any) -> Any:
        found = next(counts).count(indices)
        return indices if found is None else Recurring(indices, found)

    return map(count, batches)


def drawn_ahead(index_sampler: Any, batched: bool) -> int:
    """Return how many batches may be drawn together, because nobody can tell when; 0: unknown, or one by one.

    These samplers know all indices of an epoch when the first is drawn, and use no generator of the program's then.
    """
    size, sampler = 1, index_sampler
    if batched:
        if type(index_sampler) is not BatchSampler:
            return 0
        size, sampler = index_sampler.batch_size, index_sampler.sampler
    if type(sampler) is RandomSampler:
        source = sampler.data_source
        known = sampler.generator is None and not _may_repeat(sampler)
        known = known and sampler.num_samples == length_of(source)
    else:
        known = is_exactly(sampler, (SequentialSampler, SeededSampler))
    return min(_MOST_AHEAD, _INDICES_AHEAD // size) if known else 0


def _may_repeat(sampler: Any) -> bool:
    """Return whether a sampler may yield an index more than once in an epoch."""
    if is_exactly(sampler, (BatchSampler, InterleavedRanks)):
        return _may_repeat(sampler.sampler)
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples > len(sampler.data_source)
    return not is_exactly(sampler, (SequentialSampler, DistributedSampler, *SEEDED))


def _alone(index: object) -> list[Any]:
    return [index]


def _copied_alone(index: object) -> list[Any]:
    return [_copied(index)]


def _copied_list(indices: Any) -> list[Any]:
    batch = list(indices)
    return batch if not batch or type(batch[0]) in (int, str) else list(map(_copied, batch))


def _copied(index: Any) -> Any:
    """Return an index that its sampler cannot change."""
    if type(index) is torch.Tensor:
        return index.clone()
    return index.copy() if type(index) in (np.ndarray, list, dict, set) else index


def _as_given(divided: str | None, copies: bool, indices: Any) -> Any:
    """Return the indices of a batch in the container that the dataset gets."""
    kind = type(indices)
    if kind is list or not hasattr(kind, "__len__"):  # iterators have no length
        return _copied_list(indices) if copies else list(indices)
    if divided is not None and kind not in LISTS:
        raise ValueError(
            f"the batch sampler yields a {kind.__qualname__}, which the dataset's __getitems__ must get as it is, and "
            f"{divided}"
        )
    return _copied(indices) if copies else indices


def largest_batch(index_sampler: object, batched: bool) -> int:
    """Return the largest number of samples in a batch, if ``batch_size`` or a list of batches shows it; else 1.

    A ``batch_size`` beyond the number of samples ("all in one batch") counts as that number.
    """
    if not batched:
        return 1
    size = attribute(index_sampler, "batch_size")
    if issubclass(type(index_sampler), (list, tuple)):
        size = max(filter(None, map(length_of, cast("list[Any]", index_sampler))), default=1)
    size = integer_of(size)
    if size is None:
        return 1
    samples = length_of(attribute(index_sampler, "sampler"))
    return max(min(size, _MOST_RESERVED if samples is None else samples), 1)


def sizes_of(index_sampler: Any, batched: bool) -> Iterator[list[int]]:
    """Yield the size of each batch of an iterable dataset, in place of its indices."""
    for index in index_sampler:
        yield [len(index) if batched else 1]


def endless_size(index_sampler: Any, batched: bool) -> int | None:
    """Return the size of all batches of an iterable dataset; None if its sampler is not torch's own."""
    if not batched:
        return 1 if type(index_sampler) is EndlessSampler else None
    if type(index_sampler) is BatchSampler and type(index_sampler.sampler) is EndlessSampler:
        return int(index_sampler.batch_size)
    return None


_COPIED = (
    *(BatchSampler, SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler),
    *(DistributedSampler, EndlessSampler, InterleavedRanks, *SEEDED),
)
"""Samplers whose iterators change nothing but their generator."""


def independent(sampler: Any, dataset: object) -> Any:
    """Return a copy of a sampler, and of its generators; an epoch of the copy leaves the sampler as it is.

    Args:
        dataset: Is not copied, where the sampler refers to it.

    Raises:
        ValueError: A sampler of another class than torch's and ours cannot be copied.
    """
    if issubclass(type(sampler), (list, tuple, range)):
        return sampler
    if not is_exactly(sampler, _COPIED):
        try:
            return copy.deepcopy(sampler, {id(dataset): dataset})
        except Exception as error:
            raise ValueError(
                f"an epoch of its own needs a copy of the sampler, and a {type(sampler).__name__} cannot be copied "
                f"({type(error).__name__}: {message_of(error)}): give the class a __deepcopy__"
            ) from error
    found = copy.copy(sampler)
    for name, value in vars(found).items():
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            setattr(found, name, copy.deepcopy(value))
        elif name in ("sampler", "batch_sampler"):
            setattr(found, name, independent(value, dataset))
    return found


def in_epoch(index_sampler: Any, epoch: int) -> Any:
    """Return a seeded sampler, alone or in a plain ``BatchSampler``, as it is in an epoch; others as they are.

    A ``BatchSampler`` asks its sampler when its first batch is drawn: the loader may have begun another epoch by then.
    """
    sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if type(sampler) is not SeededSampler:
        return index_sampler
    sampler = copy.copy(sampler)
    sampler.set_epoch(epoch)
    if type(index_sampler) is not BatchSampler:
        return sampler
    return BatchSampler(sampler, index_sampler.batch_size, index_sampler.drop_last)


def next_sampler(index_sampler: Any) -> Any | None:
    """Return the index sampler of the next epoch; None if it cannot be predicted.

    Predictable are ``SequentialSampler``, ``SeededSampler``, ``CostBatchSampler`` and ``DistributedSampler`` (with the
    next epoch's number), alone or in a plain ``BatchSampler``, and several ranks of these.
    """
    if type(index_sampler) is InterleavedRanks:
        inner = next_sampler(index_sampler.sampler)
        return None if inner is None else InterleavedRanks(inner, index_sampler.ranks)
    if type(index_sampler) is BatchSampler:
        inner = next_sampler(index_sampler.sampler)
        if inner is None:
            return None
        return BatchSampler(inner, index_sampler.batch_size, index_sampler.drop_last)
    if type(index_sampler) is SequentialSampler:
        return index_sampler
    if is_exactly(index_sampler, (*SEEDED, DistributedSampler)):
        later = copy.copy(index_sampler)
        later.set_epoch(index_sampler.epoch + 1)
        return later
    return None
