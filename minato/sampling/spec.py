"""The values of a loader that decide which indices it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler

from minato.observe.stats.size import length_of
from minato.sampling.replay import RecordedOrder

__all__ = ["SamplingSpec"]


@dataclass(frozen=True, eq=False)
class SamplingSpec:
    """Decides which indices a loader asks for, in which order.

    It holds no loader: an epoch outlives the iterator that the loader may keep, and a cycle would keep the workers
    until the garbage collector runs.

    Attributes:
        dataset: Map-style or iterable.
        streams: The dataset is iterable, so that its workers decide which samples come.
        index_sampler: Yields lists of indices, or single indices where the loader does not batch.
        batched: ``index_sampler`` yields lists.
        batch_size: As given to the loader; None without batches, or with a ``batch_sampler``.
        drop_last: An incomplete last batch is dropped.
        generator: The loader's, None for torch's default generator.
        order: ``strict``, ``batch``, ``arrival`` or ``fast_first``.
        mixes_batches: Samples may take places in other batches than their own.
        seed: Of shuffling and samples; None: torch's generator draws it.
        has_workers: Samples are loaded outside the main process or in other threads.
        predictable: The next epoch may be prefetched if its indices are known: the workers stay, and the randomness
            of a sample does not depend on earlier samples.
        record_order: Path of the file to which the order is appended, or None.
        replay: The order of the epochs in a file, in place of the sampler's, or None.
        rank: Text that names this rank, if several share a pool, or None.
    """

    dataset: Any
    streams: bool
    index_sampler: Any
    batched: bool
    batch_size: int | None
    drop_last: bool
    generator: torch.Generator | None
    order: str
    mixes_batches: bool
    seed: int | None
    has_workers: bool
    predictable: bool
    record_order: str | None
    replay: RecordedOrder | None
    rank: str | None

    @property
    def divides_batches(self) -> str | None:
        """Why single indices are all that is kept of a batch; None: what the sampler yields is kept."""
        if self.mixes_batches:
            return (
                "this order puts samples of several batches together: use order='strict' or 'batch'"
            )
        if self.record_order is not None:
            return "record_order= writes indices only: leave it out"
        return None

    def size(self) -> int | None:
        """Number of samples in an epoch; None if another class than torch's BatchSampler makes the batches."""
        sampler = self.index_sampler
        if self.batched:
            if type(sampler) is not BatchSampler:
                return None
            sampler = sampler.sampler
        return length_of(sampler)

    def batches_left(self, done: int) -> int | None:
        """Number of batches of an epoch after the first ``done``; None if the length is unknown."""
        counted, size = self.index_sampler, 1
        if self.streams:
            counted, size = self.dataset, self.batch_size or 1
        count = length_of(counted)
        if count is None:
            return None
        return max((count if self.drop_last else count + size - 1) // size - done, 0)
