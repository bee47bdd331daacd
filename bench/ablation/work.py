"""Datasets whose cost lies in a chain of transforms, so that a sample can be deferred between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from bench import record
from bench.macro.work import bimodal_costs_s, lognormal_costs_s, straggler_costs_s

NUM_STEPS = 4


class Costs(Dataset[Any]):
    """Returns what a sample shall cost, in seconds, and its index."""

    def __init__(self, costs_s: list[float]) -> None:
        self.costs_s = costs_s

    def __len__(self) -> int:
        return len(self.costs_s)

    def __getitem__(self, index: int) -> Any:
        return self.costs_s[index], index


class SleepsShare:
    """A transform that takes a share of a sample's cost; by default one of ``NUM_STEPS`` equal ones."""

    def __init__(self, share: float = 1 / NUM_STEPS) -> None:
        self.share = share

    def __call__(self, sample: Any) -> Any:
        time.sleep(sample[0] * self.share)
        return sample


class Pictures(Dataset[Any]):
    """Noise images, most of them small and a tenth of them 3.5 times as wide and as high."""

    def __init__(self, count: int) -> None:
        large = np.random.default_rng(0).random(count) < 0.1
        self.sides = [700 if big else 200 for big in large]

    def __len__(self) -> int:
        return len(self.sides)

    def __getitem__(self, index: int) -> Any:
        side = self.sides[index]
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (side, side, 3), dtype=np.uint8), index


def to_floats(sample: Any) -> Any:
    """Colours from 0 to 1, channels first."""
    pixels, index = sample
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, index


def blur(sample: Any) -> Any:
    """A box filter over 5 × 5 pixels."""
    image, index = sample
    return torch.nn.functional.avg_pool2d(image, 5, stride=1, padding=2), index


def flip_at_random(sample: Any) -> Any:
    """Mirrors every other image."""
    image, index = sample
    return (image.flip(-1) if torch.rand(()) < 0.5 else image), index


def shrink(sample: Any) -> Any:
    """To 64 × 64 pixels."""
    image, index = sample
    small = torch.nn.functional.interpolate(
        image[None], size=(64, 64), mode="bilinear", antialias=True
    )
    return small[0], index


@dataclass(frozen=True)
class Load:
    """One workload.

    Args:
        name: what ``--loads`` calls it.
        title: what it is.
        make: builds the dataset.
        chain: its transforms.
        batch_size: samples in a batch.
        workers: worker processes.
        epochs: epochs that are run and counted, the first one included.
        pause_s: how long the consumer sleeps on each batch.
    """

    name: str
    title: str
    make: Callable[[], Any]
    chain: tuple[Callable[[Any], Any], ...]
    batch_size: int
    workers: int
    epochs: int
    pause_s: float = 0.0


class Corner:
    """Cuts a picture's corner off, so that all are of one size, and gives its key beside it."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, picture: Any) -> Any:
        return picture.image[:, : self.side, : self.side].clone(), picture.key


def real_loads() -> tuple[Load, ...]:
    """Work on data from packages; nothing while ``make data`` has not fetched it."""
    folder = record.ROOT / "build" / "data" / PHOTOGRAPHS
    if not folder.is_dir():
        return ()
    from bench.workloads.detection import Photographs, detection_chain  # needs Pillow

    count = len(Photographs(folder))
    return (
        Load(
            PHOTOGRAPHS,
            f"{count} photographs, each {TIMES} times: decode, resize for Mask R-CNN, flip, to tensor, normalize, cut; "
            "batch 4, 2 workers",
            lambda: Photographs(folder, TIMES * count),
            (*detection_chain(), Corner(SIDE)),
            4,
            2,
            2,
        ),
    )


PHOTOGRAPHS, TIMES, SIDE = "photographs", 2, 480
SLEEPS = (SleepsShare(),) * NUM_STEPS
LOADS = (
    Load(
        "stragglers",
        "1000 samples of 2 ms, 2 % of them 150 ms; batch 16, 4 workers",
        lambda: Costs(straggler_costs_s(1000, 0.002, 0.150, 0.02)),
        SLEEPS,
        16,
        4,
        3,
    ),
    Load(
        "rare",
        "4000 samples of 1 ms, 1 % of them 201 ms; batch 32, 4 workers",
        lambda: Costs(straggler_costs_s(4000, 0.001, 0.201, 0.01)),
        SLEEPS,
        32,
        4,
        2,
    ),
    Load(
        "bimodal",
        "600 samples of 5 ms, every fifth 55 ms; batch 8, 8 workers",
        lambda: Costs(bimodal_costs_s(600, 0.005, 0.055, 5)),
        SLEEPS,
        8,
        8,
        3,
    ),
    Load(
        "balanced",
        "the same, and a consumer exactly as fast as the workers",
        lambda: Costs(bimodal_costs_s(600, 0.005, 0.055, 5)),
        SLEEPS,
        8,
        8,
        3,
        pause_s=0.015 * 8 / 8,
    ),
    Load(
        "short-epochs",
        "96 log-normal samples, mean 20 ms, deviation 15 ms; batch 4, 8 workers",
        lambda: Costs(lognormal_costs_s(96, 0.020, 0.75)),
        SLEEPS,
        4,
        8,
        6,
    ),
    Load(
        "pictures",
        "400 images, a tenth of them 12 times as large; filter, flip, shrink; batch 8, 2 workers",
        lambda: Pictures(400),
        (to_floats, blur, flip_at_random, shrink),
        8,
        2,
        3,
    ),
)
