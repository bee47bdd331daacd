"""Samples of a chosen cost, whose work is arithmetic in this process, so that it shows as processor time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SAMPLE_BYTES = 256


class Hashing:
    """A stage that hashes some bytes: a transform, or the dataset's part."""

    def __init__(self, nbytes: int) -> None:
        self._data = bytes(nbytes)

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        hashlib.blake2b(self._data).digest()
        return sample


class Samples:
    """As many samples as one asks for, all of them the same tensor."""

    def __init__(self, length: int, stage: Hashing) -> None:
        self._length = length
        self._stage = stage
        self._sample = torch.zeros(SAMPLE_BYTES, dtype=torch.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._stage(self._sample)


@dataclass(frozen=True)
class Load:
    """Samples of about one cost.

    Args:
        cost_us: what a sample takes, in microseconds, besides what the loader adds.
        samples: in an epoch.
        steps: transforms, which share the cost with the dataset in equal parts.
    """

    cost_us: float
    samples: int
    steps: int

    def make(self, bytes_per_us: float) -> tuple[Samples, list[Callable[[torch.Tensor], object]]]:
        """The dataset and the transforms."""
        stage = Hashing(round(self.cost_us / (self.steps + 1) * bytes_per_us))
        return Samples(self.samples, stage), [stage] * self.steps


LOADS = (
    Load(5, 4_000, 0),
    Load(20, 1_500, 3),
    Load(100, 400, 3),
    Load(250, 160, 3),
    Load(600, 80, 10),
    Load(2_000, 32, 10),
    Load(3_900, 24, 3),
    Load(8_100, 12, 10),
)
"""The last two cost just so much that all their samples are timed stage by stage."""


def bytes_per_us() -> float:
    """How many bytes are hashed in a microsecond here."""
    data = bytes(1 << 16)
    best_s = float("inf")
    for _ in range(200):
        begun = time.perf_counter()
        hashlib.blake2b(data).digest()
        best_s = min(best_s, time.perf_counter() - begun)
    return len(data) / best_s / 1e6
