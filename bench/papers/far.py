"""Small pictures behind a slow network, for the experiments of the ConcurrentDataloader paper."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from bench.macro.trial import WrongDeliveryError
from bench.remote.proxy import Link, Proxy
from bench.remote.store import Objects, Store, index_of

SIDE = 58
NBYTES = 3 * SIDE * SIDE
RTT_S = 0.05
CAP_PER_S = 800
"""Pictures that the link passes in a second, for all connections together."""
ABOUT = (
    f"Pictures of {NBYTES / 1000:.0f} kB in a Redis server behind the proxy of [remote data](remote.md): "
    f"a round trip of {1e3 * RTT_S:.0f} ms, and a link that passes {CAP_PER_S} of them in a second"
)


class Picture(NamedTuple):
    """A sample.

    Attributes:
        key: Which one.
        begun_s, ended_s: When the worker began and ended to read it, by the clock that all processes share.
        image: ``(3, SIDE, SIDE)``, uint8.
    """

    key: int
    begun_s: float
    ended_s: float
    image: torch.Tensor


class Pictures(Dataset[Picture]):
    """Picture by picture, each of them a request.

    Args:
        port: Where the store listens.
        count: How many.
    """

    def __init__(self, port: int, count: int) -> None:
        self._objects = Objects(port, count)

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, index: int) -> Picture:
        begun_s = time.perf_counter()
        stored = self._objects[index]
        ended_s = time.perf_counter()
        if index_of(stored) != index:
            raise WrongDeliveryError(f"object {index_of(stored)} came for {index}")
        return Picture(index, begun_s, ended_s, stored.view(3, SIDE, SIDE))


@contextmanager
def far_store() -> Iterator[int]:
    """A store of such pictures for the ``with`` block: the port that it listens on."""
    link = Link(RTT_S, bandwidth=CAP_PER_S * NBYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        Store(Path(folder), NBYTES) as store,
        Proxy(link, store.socket) as proxy,
    ):
        yield proxy.port


def bound_per_s(in_flight: int) -> float:
    """Pictures per second that so many requests under way at once can bring at most."""
    return min(in_flight / RTT_S, CAP_PER_S)
