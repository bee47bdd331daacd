"""NVIDIA DALI on the processor: a parallel external source that calls Python, and batches it hands out as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from bench.macro.loaders import Contender
from bench.peers.adapters import Epochs, order_of

REQUIREMENTS = ("nvidia-dali-cuda120==2.4.0",)
IMPORTS = ("nvidia.dali",)


class _Samples:
    """What DALI calls in its workers, with the numbers of an epoch and of a sample in it."""

    def __init__(self, work: Any, shuffle: bool, seed: int, count: int) -> None:
        self.work = work
        self.shuffle = shuffle
        self.seed = seed
        self.count = count
        self.epoch = -1
        self.order: list[int] = []

    def __call__(self, info: Any) -> tuple[np.ndarray, np.ndarray]:
        if info.idx_in_epoch >= self.count:
            raise StopIteration
        if info.epoch_idx != self.epoch:
            self.epoch = info.epoch_idx
            self.order = order_of(self.work, self.shuffle, self.seed, self.epoch)
        payload, label = self.work[self.order[info.idx_in_epoch % len(self.order)]]
        return np.asarray(payload), np.asarray(label)


def _build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from nvidia.dali import fn, pipeline_def

    batch_size, workers = arguments["batch_size"], arguments["num_workers"]
    # It takes whole batches only: the last one goes on from the beginning, and what is too much is cut off.
    samples = _Samples(work, arguments["shuffle"], seed, -(-len(work) // batch_size) * batch_size)

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=batch_size,
        num_threads=workers,
        device_id=None,
        py_num_workers=workers,
        py_start_method="fork",
        prefetch_queue_depth=2,
    )
    def pipeline() -> Any:
        return tuple(fn.external_source(samples, num_outputs=2, batch=False, parallel=True))

    running = pipeline()
    running.build()

    def begin(epoch: int) -> Iterator[Any]:
        for first in range(0, len(work), batch_size):
            kept = min(batch_size, len(work) - first)
            yield [torch.from_numpy(np.array(part.as_array()[:kept])) for part in running.run()]
        with suppress(StopIteration):
            running.run()  # which is how it learns that the epoch is over
        running.reset()

    return Epochs(begin)


CONTENDERS = (Contender("dali", "DALI, processor only", _build, keeps_order=True),)
