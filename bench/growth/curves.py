"""Time per unit of work while one quantity grows and the others stay."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader as TorchLoader

from bench.growth.work import Naps, Vectors, counted
from minato import DataLoader

LOADERS: dict[str, Callable[..., Any]] = {"torch": TorchLoader, "minato": DataLoader}
NAP_S = 0.010
_EPOCHS = 2
"""The second one is measured: workers and pages are warm then."""


@dataclass(frozen=True)
class Curve:
    """One quantity that grows.

    Args:
        name: what grows.
        unit: what the time is per.
        sizes: its values.
        build: ``build(size) -> (dataset, arguments)``.
        units: ``units(size)``: how many units an epoch has.
        most: the largest value for a loader that would take too long beyond.
    """

    name: str
    unit: str
    sizes: tuple[int, ...]
    build: Callable[[int], tuple[Any, dict[str, Any]]]
    units: Callable[[int], float]
    most: dict[str, int] = field(default_factory=dict)


def _samples(size: int) -> tuple[Any, dict[str, Any]]:
    return Vectors(size), {"batch_size": 256, "num_workers": 2, "shuffle": True}


def _workers(size: int) -> tuple[Any, dict[str, Any]]:
    return Naps(60 * size, NAP_S), {"batch_size": 4, "num_workers": size}


def _batch(size: int) -> tuple[Any, dict[str, Any]]:
    return Vectors(max(8192, 8 * size)), {"batch_size": size, "num_workers": 2}


def _bytes(size: int) -> tuple[Any, dict[str, Any]]:
    length = max(16, min(4096, (1 << 28) // size))
    return Vectors(length, size), {"batch_size": 4, "num_workers": 2}


CURVES = (
    Curve(
        "samples of an epoch",
        "sample",
        (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
        _samples,
        lambda size: size,
        {"torch": 1_000_000},
    ),
    Curve("workers", "sample and worker", (1, 2, 4, 8, 16, 32, 64), _workers, lambda size: 60),
    Curve(
        "samples of a batch",
        "batch",
        (1, 4, 16, 64, 256, 1024, 4096),
        _batch,
        lambda size: max(8192, 8 * size) / size,
    ),
    Curve(
        "bytes of a sample",
        "sample",
        (8, 64, 512, 4096, 32768, 1 << 18, 1 << 21, 1 << 24, 1 << 26),
        _bytes,
        lambda size: max(16, min(4096, (1 << 28) // size)),
    ),
)


def measure(curve: Curve, loader: str, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """``(size, seconds per unit)`` of a loader; every epoch's samples are counted."""
    points = []
    for size in sizes:
        if size > curve.most.get(loader, size):
            continue
        dataset, arguments = curve.build(size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            made = LOADERS[loader](dataset, persistent_workers=True, **arguments)
            for _ in range(_EPOCHS):
                begun = time.perf_counter()
                count = counted(made)
                elapsed_s = time.perf_counter() - begun
                if count != len(dataset):
                    raise RuntimeError(f"{loader}: {count} samples came, not {len(dataset)}")
        points.append((size, elapsed_s / curve.units(size)))
    return points


def slope(points: Sequence[tuple[int, float]]) -> float:
    """The exponent of growth: least squares through the logarithms of the larger half of the sizes."""
    upper = points[len(points) // 2 - 1 :]
    x = [math.log(size) for size, _ in upper]
    y = [math.log(value) for _, value in upper]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
