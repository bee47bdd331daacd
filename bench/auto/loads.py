"""The loads: what samples cost, and what the consumer takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.utils.data import Dataset

BATCH_SIZE = 8
_LENGTH = 10_000_000


class Sleeping(Dataset[int]):
    """Samples that need a worker but no core, such as reads from a network."""

    def __init__(self, cost_s: float) -> None:
        self.cost_s = cost_s

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> int:
        time.sleep(self.cost_s)
        return index


class Computing(Sleeping):
    """Samples that need a core for so long."""

    def __getitem__(self, index: int) -> int:
        end_s = time.thread_time() + self.cost_s
        while time.thread_time() < end_s:
            sum(range(500))
        return index


@dataclass(frozen=True)
class Load:
    """One comparison.

    Args:
        name: What ``--loads`` calls it.
        title: What it is.
        dataset: The samples.
        pause_s: What the consumer takes for a batch.
        fixed: The numbers of workers that are tried.
    """

    name: str
    title: str
    dataset: Sleeping
    pause_s: float
    fixed: tuple[int, ...]


LOADS = (
    Load(
        "sleeping",
        "samples sleep 40 ms, and the consumer takes what 12 workers make",
        Sleeping(0.040),
        0.040 * BATCH_SIZE / 12,
        (2, 4, 8, 12, 16),
    ),
    Load("computing", "samples need a core for 5 ms", Computing(0.005), 0.0, (1, 2, 3, 4, 8)),
    Load(
        "consumer",
        "samples sleep 5 ms, and the consumer takes 80 ms for a batch, as half a worker would",
        Sleeping(0.005),
        0.080,
        (1, 2, 4),
    ),
)
