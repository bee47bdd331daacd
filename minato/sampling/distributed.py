"""Samplers of distributed training: ``set_epoch``, ranks, and the batches of all ranks of a node together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

from torch.utils.data import DistributedSampler

from minato._support.objects import attribute
from minato._support.values import plain

__all__ = [
    "InterleavedRanks",
    "RankSampler",
    "at_epoch",
    "epoch_of",
    "nested",
    "ranked",
    "sampler_at_rank",
    "set_sampler_epoch",
]

_DEEPEST = 8
"""Most nested samplers; an object with more returns something for every attribute."""


def nested(sampler: object) -> Iterator[Any]:
    """Yield a sampler, the one it draws from, and so on, by the attributes ``sampler`` and ``batch_sampler``."""
    for _ in range(_DEEPEST):
        if sampler is None:
            return
        yield sampler
        inner = attribute(sampler, "sampler")
        sampler = attribute(sampler, "batch_sampler") if inner is None else inner


def epoch_of(sampler: object) -> int | None:
    """Return the ``epoch`` of the first nested sampler that has one; None without."""
    for one in nested(sampler):
        epoch = attribute(one, "epoch")
        if epoch is not None and isinstance(epoch := plain(epoch), int):
            return epoch
    return None


def set_sampler_epoch(sampler: object, epoch: int) -> None:
    """Call ``set_epoch`` of all nested samplers that have it, as trainers do."""
    for one in nested(sampler):
        set_epoch = attribute(one, "set_epoch")
        if callable(set_epoch):
            set_epoch(epoch)


@contextmanager
def at_epoch(sampler: object, epoch: int | None) -> Iterator[None]:
    """Give samplers that have an epoch another one for the length of a ``with`` block; None: they keep their own."""
    own = [
        (one, one.epoch)
        for one in nested(sampler)
        if isinstance(getattr(one, "epoch", None), int)
        and callable(getattr(one, "set_epoch", None))
    ]
    if epoch is None or all(before == epoch for _, before in own):
        own = []
    try:
        for one, _ in own:
            one.set_epoch(epoch)
        yield
    finally:
        for one, before in own:
            one.set_epoch(before)


class RankSampler(DistributedSampler[int]):
    """torch's sampler for ranks. The loader sets its epoch, so that epochs differ without ``set_epoch``.

    Args:
        data_source: Anything with a length.
        count: Number of ranks.
        rank: Number of this rank.
        shuffle: Whether (seed, epoch) permutes the indices.
        seed: The same in all ranks.
        drop_last: Whether indices that do not divide by the ranks are dropped; otherwise some are repeated.
    """

    def __init__(
        self, data_source: Sized, count: int, rank: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        # torch adds the epoch to the seed, and its generator takes 64 bits.
        seed %= 1 << 62
        super().__init__(cast(Any, data_source), count, rank, shuffle, seed, drop_last)


def ranked(sampler: object) -> Any | None:
    """Return the first of the nested samplers with ``rank`` and ``num_replicas``; None if there is none."""
    return next(filter(_has_rank, nested(sampler)), None)


def _has_rank(sampler: object) -> bool:
    names = ("rank", "num_replicas")
    return all(attribute(sampler, name) is not None for name in names)


def sampler_at_rank(sampler: Any, rank: int) -> Any:
    """Return a copy of a sampler, as another rank has it."""
    here = copy.copy(sampler)
    if _has_rank(sampler):
        here.rank = rank
    elif attribute(sampler, "sampler") is not None:
        here.sampler = sampler_at_rank(sampler.sampler, rank)
    else:
        here.batch_sampler = sampler_at_rank(sampler.batch_sampler, rank)
    return here


class InterleavedRanks:
    """The batches of several ranks: the first batch of each, then the second of each, and so on.

    Args:
        sampler: The index sampler of one rank.
        ranks: The ranks.

    Attributes:
        sampler: The same.
        ranks: The same.
        batch_size: The sampler's, None if it has none.
    """

    def __init__(self, sampler: Any, ranks: range) -> None:
        self.sampler = sampler
        self.ranks = ranks
        self.batch_size: Any = attribute(sampler, "batch_size")

    def __len__(self) -> int:
        return len(self.sampler) * len(self.ranks)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. Raises ValueError if one rank has fewer batches than another."""
        ended = object()
        draws = [iter(sampler_at_rank(self.sampler, rank)) for rank in self.ranks]
        while True:
            step = [next(draw, ended) for draw in draws]
            over = [batch is ended for batch in step]
            if all(over):
                return
            if any(over):
                raise ValueError(
                    f"rank {self.ranks[over.index(True)]} has fewer batches than rank {self.ranks[over.index(False)]} "
                    f"by {type(self.sampler).__name__}: with shared_pool=True all ranks must have as many"
                )
            yield from step
