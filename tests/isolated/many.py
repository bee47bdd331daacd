"""Use many iterators at once, or very large batches: ``many.py iterators|large COUNT``."""

from __future__ import annotations

import sys

import numpy as np
import psutil
import torch

from minato import DataLoader
from tests.datasets import Numbers

GIB = 1 << 30


class Large(Numbers):
    """Zeros of 2.05 GiB, of which only the last byte is written."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.zeros(2100 << 20, dtype=torch.uint8)
        sample[-1] = index + 1
        return sample


def iterators(count: int) -> None:
    """Hold so many iterators, every hundredth of them with a worker."""
    held = []
    for number in range(count):
        loader = DataLoader(range(64), 4, num_workers=int(number % 100 == 99))
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        held.append(iterator)
    reserved = psutil.Process().memory_info().vms
    assert reserved < 80 << 40, reserved  # of 128 TiB
    assert torch.ones(300 << 20, dtype=torch.uint8).sum() == 300 << 20
    assert np.ones(300 << 20, np.uint8).max() == 1
    for iterator in held:
        assert next(iterator).tolist() == [4, 5, 6, 7]
    print("held", len(held), "iterators")


def large(num_workers: int) -> None:
    """Deliver one batch of more than 4 GiB."""
    (batch,) = DataLoader(Large(2), 2, num_workers=num_workers)
    assert batch.nbytes > 4 * GIB
    assert batch.shape == (2, 2100 << 20)
    assert batch[:, -1].tolist() == [1, 2]
    assert batch[:, :: 1 << 20].sum() == 0
    print("delivered", batch.nbytes, "bytes")


if __name__ == "__main__":
    {"iterators": iterators, "large": large}[sys.argv[1]](int(sys.argv[2]))
