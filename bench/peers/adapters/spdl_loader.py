"""SPDL: samples by threads in a pipeline; and its replacement of DataLoader, which uses processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import default_collate

from bench.macro.loaders import Contender
from bench.peers.adapters import order_of

REQUIREMENTS = ("spdl==0.8.0",)
IMPORTS = (
    "spdl.pipeline",
    "spdl.dataloader",
)
_AHEAD = 3
"""Batches that wait collated; SPDL's default."""


@dataclass
class _Orders:
    """The indices of one epoch after the other; SPDL iterates over it anew for each."""

    work: Any
    shuffle: bool
    seed: int
    epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(order_of(self.work, self.shuffle, self.seed, self.epoch))


class _Pipeline:
    """A pipeline that stays from one epoch to the next, and ends with this object."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        pipeline.start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline)

    def __del__(self) -> None:
        self.pipeline.stop()


def _threads(work: Any, arguments: dict[str, Any], seed: int, *, output_order: str) -> Any:
    from spdl.pipeline import PipelineBuilder

    workers = arguments["num_workers"]
    return _Pipeline(
        PipelineBuilder()
        .add_source(_Orders(work, arguments["shuffle"], seed), continuous=True)
        .pipe(work.__getitem__, concurrency=workers, output_order=output_order)
        .aggregate(arguments["batch_size"])
        .pipe(default_collate)
        .add_sink(_AHEAD)
        .build(num_threads=workers + 1)  # one for collating
    )


def _processes(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from spdl.dataloader import get_pytorch_dataloader

    return get_pytorch_dataloader(
        work,
        batch_size=arguments["batch_size"],
        shuffle=arguments["shuffle"],
        num_workers=arguments["num_workers"],
        in_order=True,
    )


CONTENDERS = (
    Contender("spdl", "SPDL, threads", partial(_threads, output_order="input"), keeps_order=True),
    Contender(
        "spdl-any-order",
        "SPDL, threads, as they complete",
        partial(_threads, output_order="completion"),
        keeps_order=False,
    ),
    Contender("spdl-processes", "SPDL, processes", _processes, keeps_order=True),
)
