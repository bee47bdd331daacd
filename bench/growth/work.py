"""Datasets of any length and any sample size that cost as little as possible themselves."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch.utils.data import Dataset


class Vectors(Dataset[np.ndarray]):
    """A vector of float32 from memory, the same for each index.

    Args:
        length: samples.
        nbytes: of each, a multiple of 4.
    """

    def __init__(self, length: int, nbytes: int = 64) -> None:
        self.length = length
        self.vector = np.zeros(nbytes // 4, np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.vector


class Naps(Dataset[int]):
    """Samples that sleep, all equally long."""

    def __init__(self, length: int, sleep_s: float) -> None:
        self.length = length
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.sleep_s)
        return index


def counted(loader: Any) -> int:
    """Iterate over an epoch and count its samples."""
    return sum(len(batch) for batch in loader)
