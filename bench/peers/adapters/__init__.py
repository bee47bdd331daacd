"""One file for each peer: what it needs, and how its documentation would have it load a map-style dataset.

A file defines ``REQUIREMENTS``, what pip installs beside torch; ``IMPORTS``, what is imported before the clock
starts; ``CONTENDERS``; and, where a peer is too slow for the rest or of no use there, ``ROWS``. It imports the peer
only while a loader is built, because the process that makes the report has none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

PEERS = ("torch", "minato", "torchdata", "spdl", "grain", "tfdata", "webdataset", "ray", "dali")


def adapter(peer: str) -> ModuleType:
    """The module of a peer."""
    return importlib.import_module(f"bench.peers.adapters.{peer}_loader")


@dataclass
class Epochs:
    """Gives a peer that has one object per epoch the shape of a loader.

    Args:
        begin: ``begin(epoch)`` gives the epoch's batches.
    """

    begin: Any
    epoch: int = 0

    def __iter__(self) -> Iterator[Any]:
        batches: Iterable[Any] = self.begin(self.epoch)
        self.epoch += 1
        return iter(batches)


def order_of(work: Any, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """The indices of an epoch, for peers that take an order and do not make one."""
    if not shuffle:
        return list(range(len(work)))
    generator = torch.Generator().manual_seed((seed << 16) + epoch)
    return torch.randperm(len(work), generator=generator).tolist()


def as_tensors(batch: Any) -> list[torch.Tensor]:
    """What default_collate would give, of a peer's two arrays; nothing is copied."""
    return [torch.as_tensor(part) for part in batch]
