"""Batches of about the same cost instead of the same number of samples."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from minato._core import mix_seed
from minato._support.objects import length_of
from minato._support.values import items_of, number_of
from minato._system import ranks_by_torch
from minato.checks import check_choice, check_shard, check_whole, given_number
from minato.errors import warn
from minato.sampling.dealing import Batches

_POOL_BATCHES = 50  # default size of a pool, in batches

Costs = np.ndarray[Any, np.dtype[np.float64]]


class CostBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` with a limit on the cost of a batch: tokens, pixels, bytes, or seconds.

    It draws samples in random order, sorts them by cost within pools, and divides each pool into batches. So a batch
    holds samples of similar cost, with little padding. All ranks get the same number of batches, and in each step
    batches of similar cost: where the number does not divide, it halves large batches. Each index comes once per epoch
    over all ranks; only if all batches hold one sample, some indices repeat.

    The order is a function of (seed, epoch), and all ranks must have the same costs. A ``minato.DataLoader`` sets the
    epoch; elsewhere call ``set_epoch``.

    Args:
        costs: Cost of each index, at least 0: any sequence of numbers, or an iterable, which is run through once.
        max_cost: Largest cost of a batch.
        padded: A batch costs its number of samples times the largest of their costs, as if all were padded to the
            longest (``max_tokens``); otherwise the sum of their costs.
        max_size: Largest number of samples in a batch.
        seed: Seed of the order; None: it is not random, but the same in each epoch.
        pool: Number of samples that are sorted together. Larger pools have less padding, and batches that differ less
            between epochs. By default about 50 batches.
        oversized: For samples that cost more than ``max_cost``: ``"raise"``, ``"alone"`` (each is a batch) or
            ``"skip"``.
        shard: ``(rank, number of ranks)``; by default torch.distributed's, or ``(0, 1)``, which is also right where a
            trainer shards the batches.

    Raises:
        ValueError, TypeError: An argument is invalid, or a sample is oversized.

    Attributes:
        epoch: The epoch whose batches ``iter()`` yields; set it with ``set_epoch``.
        rank, num_replicas: Number of this rank, and number of ranks.
    """

    def __init__(
        self,
        costs: Iterable[float] | np.ndarray | torch.Tensor,
        max_cost: float,
        *,
        padded: bool = True,
        max_size: int | None = None,
        seed: int | None = 0,
        pool: int | None = None,
        oversized: str = "raise",
        shard: tuple[int, int] | None = None,
    ) -> None:
        pool, max_size = check_whole("pool", pool, 1), check_whole("max_size", max_size, 1)
        check_choice("oversized", oversized, ("raise", "alone", "skip"))
        check_choice("padded", padded, (True, False))
        max_cost = given_number("max_cost", max_cost)
        if not max_cost > 0:
            raise ValueError(f"max_cost={max_cost} is too small: give more than 0")
        found = (ranks_by_torch() or (0, 1)) if shard is None else shard
        self.rank, self.num_replicas = check_shard(found)
        self.max_cost = max_cost
        self.epoch = 0
        self._costs = _checked(costs)
        self.padded, self.max_size = padded, max_size or len(self._costs) or 1
        self.seed = check_whole("seed", seed, None)
        self._indices = np.arange(len(self._costs))
        if (large := self._costs > max_cost).any() and oversized != "alone":
            if oversized == "raise":
                first = int(np.argmax(large))
                raise ValueError(
                    f"index {first} alone costs {self._costs[first]:g}, more than max_cost={max_cost:g}: raise that, "
                    "or choose oversized='alone' or 'skip'"
                )
            self._indices = self._indices[~large]
        if pool is None:
            mean = float(self._costs[self._indices].mean()) if len(self._indices) else 0.0
            pool = int(min(_POOL_BATCHES * max(max_cost / mean, 1.0), 1 << 62)) if mean else 1 << 62
        self.pool = pool
        self._cut: tuple[tuple[int, int], list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of ``iter()`` and ``len()``."""
        self.epoch = operator.index(epoch)

    def __len__(self) -> int:
        """Number of batches of each rank in this epoch."""
        return len(self._all_batches()) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        # Copies: a loader may change the list of a batch.
        return map(list, self._all_batches()[self.rank :: self.num_replicas])

    def _all_batches(self) -> list[list[int]]:
        """Return the batches of all ranks: those of the first step, of the second, and so on."""
        key = self.epoch, self.num_replicas
        if self._cut is None or self._cut[0] != key:
            random = np.random.default_rng(mix_seed(self.seed or 0, self.epoch, 0))
            shuffles = self.seed is not None
            order = random.permutation(self._indices) if shuffles else self._indices
            batches: list[list[int]] = []
            for start in range(0, len(order), self.pool):
                batches += self._packed(order[start : start + self.pool])
            ranks = self.num_replicas
            fill_steps(batches, ranks)
            steps = np.arange(len(batches) // ranks)
            if shuffles:
                random.shuffle(steps)
            ordered = [batches[step * ranks : (step + 1) * ranks] for step in steps]
            self._cut = key, list(chain.from_iterable(ordered))
        return self._cut[1]

    def _packed(self, indices: np.ndarray) -> list[list[int]]:
        """Return the batches of one pool, by rising cost."""
        costs = self._costs[indices]
        by_cost = np.argsort(costs, kind="stable")
        ordered, batches, start, total = indices[by_cost].tolist(), [], 0, 0.0
        for number, cost in enumerate(costs[by_cost].tolist()):
            count = number - start
            after = cost * (count + 1) if self.padded else total + cost
            if count and (after > self.max_cost or count == self.max_size):
                batches.append(ordered[start:number])
                start, after = number, cost
            total = after
        if ordered:
            batches.append(ordered[start:])
        return batches


def check_costs(
    dataset: object, sampler: object, batch_sampler: object, *, in_batches: bool
) -> None:
    """Refuse batches of indices in the place of indices, and warn of costs of another dataset."""
    if issubclass(type(sampler), CostBatchSampler) and in_batches:
        raise TypeError("sampler= gives single indices: pass a CostBatchSampler as batch_sampler=")
    if issubclass(type(batch_sampler), CostBatchSampler):
        given = len(cast(CostBatchSampler, batch_sampler)._costs)
        length = length_of(dataset)
        if length is not None and given != length:
            warn(
                f"the CostBatchSampler has the costs of {given} samples, and the dataset has {length}: give one cost "
                "for each index"
            )


def _checked(costs: object) -> Costs:
    if callable(costs) and not isinstance(costs, Iterable):
        raise TypeError(
            "costs is a function: give what it returns, map(costs, range(len(dataset)))"
        )
    if isinstance(costs, torch.Tensor):
        costs = costs.detach().to("cpu", torch.float64)
    if isinstance(costs, np.ma.MaskedArray):
        costs = np.ma.filled(costs.astype(np.float64), np.nan)
    values = costs if isinstance(costs, np.ndarray) else items_of("costs", costs)
    try:
        try:
            found = np.asarray(values, np.float64)
        except (TypeError, ValueError):  # of numbers of other libraries, each by itself
            numbers = ((number_of(each), each) for each in values)
            found = np.asarray([each if n is None else n for n, each in numbers], np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"costs are no numbers, one for each index: {error}") from error
    if found.ndim != 1:
        raise ValueError(f"costs of shape {found.shape}: give one number for each index")
    if not (found >= 0).all():  # NaN is not, either
        first = int(np.argmin(found >= 0))
        raise ValueError(f"the cost of index {first} is {found[first]}: give numbers of at least 0")
    return found


def fill_steps(batches: Batches, ranks: int) -> None:
    """Make the number of batches divisible by the number of ranks: halve large ones, or repeat some."""
    while len(batches) % ranks:
        largest = max(range(len(batches)), key=lambda number: len(batches[number]))
        batch = batches[largest]
        if len(batch) == 1:
            missing = -len(batches) % ranks
            batches += [batches[number % len(batches)] for number in range(missing)]
            return
        batches[largest : largest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
