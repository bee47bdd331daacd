"""torchdata.nodes: samples mapped by threads; and batches mapped by processes, as its guide replaces DataLoader."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import default_collate

from bench.macro.loaders import Contender
from bench.peers.adapters import Epochs, order_of

REQUIREMENTS = ("torchdata==0.11.0",)
IMPORTS = ("torchdata.nodes",)
_AHEAD = 2
"""Batches that wait collated."""


def _fetch(work: Any, indices: list[int]) -> Any:
    return default_collate([work[index] for index in indices])


def _build(
    work: Any, arguments: dict[str, Any], seed: int, *, in_order: bool, threads: bool
) -> Any:
    from torchdata import nodes

    workers, batch_size = arguments["num_workers"], arguments["batch_size"]

    def begin(epoch: int) -> Any:
        node: Any = nodes.IterableWrapper(order_of(work, arguments["shuffle"], seed, epoch))
        if threads:
            node = nodes.ParallelMapper(
                node, work.__getitem__, workers, in_order=in_order, method="thread"
            )
            node = nodes.Mapper(nodes.Batcher(node, batch_size, drop_last=False), default_collate)
        else:
            node = nodes.ParallelMapper(
                nodes.Batcher(node, batch_size, drop_last=False),
                partial(_fetch, work),
                workers,
                in_order=in_order,
                method="process",
                multiprocessing_context="fork",
            )
        return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=_AHEAD))

    return Epochs(begin)


CONTENDERS = (
    Contender(
        "torchdata", "torchdata.nodes, threads", partial(_build, in_order=True, threads=True), True
    ),
    Contender(
        "torchdata-any-order",
        "torchdata.nodes, threads, in_order=False",
        partial(_build, in_order=False, threads=True),
        False,
    ),
    Contender(
        "torchdata-processes",
        "torchdata.nodes, processes",
        partial(_build, in_order=True, threads=False),
        True,
    ),
)
