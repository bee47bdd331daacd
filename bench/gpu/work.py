"""Small networks, and volumes and images whose augmentations cost processor time with a heavy tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

SPREAD = 0.9
"""Standard deviation of the logarithm of a sample's rounds of filtering: one in a hundred takes 8 times the median."""


class Augmented(torch.utils.data.Dataset[Any]):
    """Random arrays that are filtered in rounds, as many as the index says; labelled by their index."""

    def __init__(self, size: int, shape: tuple[int, ...], rounds: float) -> None:
        self.size, self.shape = size, shape
        drawn = np.random.default_rng(0).lognormal(np.log(rounds), SPREAD, size)
        self.rounds = np.maximum(drawn.round(), 1).astype(int)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        array = np.random.default_rng(index).random(self.shape, np.float32)
        for _ in range(self.rounds[index]):
            for axis in range(1, len(self.shape)):
                array = (array + np.roll(array, 1, axis) + np.roll(array, -1, axis)) / 3
        return array, index


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
    """A network and its data."""

    name: str
    shape: tuple[int, ...]
    rounds: float
    """Median rounds of filtering."""
    batch_size: int
    make: Callable[[int], nn.Module]
    width: int


ON_GPU = (
    Training("3D U-Net", (1, 64, 64, 64), 4, 4, unet, 32),
    Training("ResNet", (3, 224, 224), 4, 64, resnet, 64),
)
ON_CPU = (
    Training("3D U-Net", (1, 16, 16, 16), 4, 4, unet, 4),
    Training("ResNet", (3, 64, 64), 4, 16, resnet, 8),
)
"""Small enough for a processor, which has the workers to serve besides."""
