"""Grain: samples read by threads; and the same split over processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.macro.loaders import Contender
from bench.macro.work import SleepingWork
from bench.peers.adapters import Epochs, as_tensors

REQUIREMENTS = ("grain==0.2.18",)
IMPORTS = ("grain",)


@dataclass
class _Arrays:
    """A dataset whose samples are NumPy arrays, which is what Grain stacks."""

    work: Any

    def __len__(self) -> int:
        return len(self.work)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(part) for part in self.work[index])


def _build(work: Any, arguments: dict[str, Any], seed: int, *, threads: bool) -> Any:
    import grain

    workers = arguments["num_workers"]
    # What lies in memory is best read without threads, says its documentation; and in processes no more samples shall
    # run at once than elsewhere.
    num_threads = (workers if threads else 1) if isinstance(work, SleepingWork) else 0

    def begin(epoch: int) -> Any:
        samples = grain.MapDataset.source(_Arrays(work))
        if arguments["shuffle"]:
            samples = samples.shuffle((seed << 16) + epoch)
        batches = samples.to_iter_dataset(
            grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=500)
        ).batch(arguments["batch_size"])
        if not threads:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return map(as_tensors, batches)

    return Epochs(begin)


CONTENDERS = (
    Contender("grain", "Grain, threads", partial(_build, threads=True), keeps_order=True),
    # Each process takes every n-th sample: the batches are not those of one process.
    Contender(
        "grain-processes", "Grain, processes", partial(_build, threads=False), keeps_order=False
    ),
)
