"""NVIDIA DALI on the processor: a parallel external source that calls Python, and batches it hands out as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench.macro.loaders import Contender
from bench.peers.adapters import Epochs, order_of

REQUIREMENTS = ("nvidia-dali-cuda120==2.4.0",)
IMPORTS = ("nvidia.dali",)


class _Samples:
    """What DALI calls in its workers, with the number of a sample in its epoch."""

    def __init__(self, work: Any, order: list[int]) -> None:
        self.work = work
        self.order = order

    def __call__(self, info: Any) -> tuple[np.ndarray, np.ndarray]:
        if info.idx_in_epoch >= len(self.order):
            raise StopIteration
        payload, label = self.work[self.order[info.idx_in_epoch]]
        return np.asarray(payload), np.asarray(label)


def _build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from nvidia.dali import fn, pipeline_def

    batch_size = arguments["batch_size"]

    def begin(epoch: int) -> Iterator[Any]:
        order = order_of(work, arguments["shuffle"], seed, epoch)
        # It takes whole batches only: the last one begins anew, and what is too much is cut off below.
        missing = -len(order) % batch_size
        samples = _Samples(work, order + order[:missing])

        @pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=batch_size,
            num_threads=arguments["num_workers"],
            device_id=None,
            py_num_workers=arguments["num_workers"],
            py_start_method="fork",
            prefetch_queue_depth=2,
        )
        def pipeline() -> Any:
            return tuple(fn.external_source(samples, num_outputs=2, batch=False, parallel=True))

        running = pipeline()
        running.build()
        for first in range(0, len(order), batch_size):
            kept = min(batch_size, len(order) - first)
            yield [torch.from_numpy(np.array(part.as_array()[:kept])) for part in running.run()]
        del running

    return Epochs(begin)


CONTENDERS = (Contender("dali", "DALI, processor only", _build, keeps_order=True),)
