"""Small networks, and what they are trained on: the papers' chains on real data, or arrays where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bench.workloads.detection import Photographs, detection_chain, padded_pictures
from bench.workloads.mapped import Mapped
from bench.workloads.packages import SCANS
from bench.workloads.segmentation import Scans, segmentation_chain

SPREAD = 0.9
"""Standard deviation of the logarithm of a sample's rounds of filtering: one in a hundred takes 8 times the median."""


class Augmented(torch.utils.data.Dataset[Any]):
    """Random arrays that are filtered in rounds, as many as the index says; each comes behind its index."""

    def __init__(self, size: int, shape: tuple[int, ...], rounds: float) -> None:
        self.size, self.shape = size, shape
        drawn = np.random.default_rng(0).lognormal(np.log(rounds), SPREAD, size)
        self.rounds = np.maximum(drawn.round(), 1).astype(int)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, np.ndarray[Any, Any]]:
        array = np.random.default_rng(index).random(self.shape, np.float32)
        for _ in range(self.rounds[index]):
            for axis in (-2, -1):
                array = (array + np.roll(array, 1, axis) + np.roll(array, -1, axis)) / 3
        return index, array


def unet(width: int) -> nn.Module:
    """A 3D U-Net of two levels, from one channel to one number for each voxel."""
    return _UNet(width)


class _UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.bottom = _block(1, width), _block(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.out = nn.Sequential(_block(2 * width, width), nn.Conv3d(width, 1, 1))

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        fine = self.down(volume)
        coarse = self.up(self.bottom(functional.max_pool3d(fine, 2)))
        out: torch.Tensor = self.out(torch.cat([fine, coarse], 1))
        return out


def _block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(inside, outside, 3, padding=1), nn.BatchNorm3d(outside), nn.ReLU()
    )


def resnet(width: int) -> nn.Module:
    """A few residual blocks over images of three channels, to one number for each image."""
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3),
        nn.ReLU(),
        *(_Residual(width) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 1),
    )


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.relu(image + self.second(self.norm(functional.relu(self.first(image)))))


class Training(NamedTuple):
    """A network and its data.

    Attributes:
        load: ``(samples, folder of the data) -> dataset``, whose batches begin with the indices and the images.
        volumes: Images are volumes without a dimension for the channel.
    """

    name: str
    load: Callable[[int, Path], torch.utils.data.Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None
    batch_size: int
    make: Callable[[int], nn.Module]
    width: int
    volumes: bool


def _segmentation(side: int, batch_size: int, width: int) -> Training:
    def load(size: int, folder: Path) -> torch.utils.data.Dataset[Any]:
        return Mapped(Scans(folder / SCANS, size), segmentation_chain((side, side, side)))

    return Training("3D U-Net", load, None, batch_size, unet, width, True)


def _detection(shortest: int, longest: int, batch_size: int, width: int) -> Training:
    def load(size: int, folder: Path) -> torch.utils.data.Dataset[Any]:
        pictures = Photographs(folder / "photographs", size)
        return Mapped(pictures, detection_chain(shortest, longest))

    return Training("ResNet", load, padded_pictures, batch_size, resnet, width, False)


def _drawn(training: Training, shape: tuple[int, ...]) -> Training:
    return training._replace(
        load=lambda size, folder: Augmented(size, shape, rounds=4.0), collate=None
    )


ON_GPU = _segmentation(128, 3, 32), _detection(800, 1333, 4, 64)
"""With the papers' patches, sizes and segmentation's batches."""
ON_CPU = _segmentation(16, 3, 4), _detection(64, 96, 4, 8)
"""Small enough for a processor, which has the workers to serve besides."""
DRAWN_ON_GPU = _drawn(ON_GPU[0], (64, 64, 64)), _drawn(ON_GPU[1], (3, 224, 224))
DRAWN_ON_CPU = _drawn(ON_CPU[0], (16, 16, 16)), _drawn(ON_CPU[1], (3, 64, 64))


def trainings(on_gpu: bool, data: Path) -> tuple[str, tuple[Training, ...]]:
    """What to train here, and words for it."""
    if (data / SCANS).is_dir() and (data / "photographs").is_dir():
        words = "The papers' chains on real data: volumes of the head for segmentation, photographs for detection."
        return words, ON_GPU if on_gpu else ON_CPU
    words = "Without `make data`, samples are random arrays, filtered in rounds whose number has a heavy tail."
    return words, DRAWN_ON_GPU if on_gpu else DRAWN_ON_CPU
