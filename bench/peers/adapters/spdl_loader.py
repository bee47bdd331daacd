"""SPDL: samples by threads in a pipeline; and its replacement of DataLoader, which uses processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import default_collate

from bench.macro.loaders import Contender
from bench.peers.adapters import Epochs, order_of

REQUIREMENTS = ("spdl==0.8.0",)
IMPORTS = (
    "spdl.pipeline",
    "spdl.dataloader",
)
_AHEAD = 3
"""Batches that wait collated; SPDL's default."""


def _threads(work: Any, arguments: dict[str, Any], seed: int, *, output_order: str) -> Any:
    from spdl.pipeline import PipelineBuilder

    def begin(epoch: int) -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(order_of(work, arguments["shuffle"], seed, epoch))
            .pipe(work.__getitem__, concurrency=arguments["num_workers"], output_order=output_order)
            .aggregate(arguments["batch_size"])
            .pipe(default_collate)
            .add_sink(_AHEAD)
            # One thread more, for collating.
            .build(num_threads=arguments["num_workers"] + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return Epochs(begin)


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
