"""Workloads that are each built to have one bottleneck, and what following the advice makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Costly(Dataset[Any]):
    """Samples that sleep, or use a core, for so long."""

    def __init__(self, length: int, sleep_s: float = 0.0, burn_s: float = 0.0, numbers: int = 1):
        self.length = length
        self.sleep_s = sleep_s
        self.burn_s = burn_s
        self.numbers = numbers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        time.sleep(self.sleep_s)
        burn(self.burn_s)
        return np.full(self.numbers, index, np.float32)


def burn(seconds: float) -> None:
    """Use a core for so long."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        sum(range(500))


@dataclass(frozen=True)
class Step:
    """A transform that sleeps, or uses a core."""

    sleep_s: float = 0.0
    burn_s: float = 0.0

    def __call__(self, sample: Any) -> Any:
        time.sleep(self.sleep_s)
        burn(self.burn_s)
        return sample


@dataclass(frozen=True)
class Collate:
    """A ``collate_fn`` that uses a core."""

    burn_s: float

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        burn(self.burn_s)
        return torch.from_numpy(np.stack(samples))


class Unpickled:
    """A batch that takes long to unpickle."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __reduce__(self) -> Any:
        return _rebuilt, (self.sleep_s,)


def _rebuilt(sleep_s: float) -> Unpickled:
    time.sleep(sleep_s)
    return Unpickled(sleep_s)


def slow_start(worker: int) -> None:
    """What a worker may have to import and open."""
    time.sleep(0.3)


@dataclass(frozen=True)
class Work:
    """A workload.

    Attributes:
        name: The bottleneck that the verdict must name.
        arguments: Of the loader.
        step_s: What the training step takes.
        epochs: How many are run.
        mended: Arguments that follow an advice which no argument does by itself: half of the stage's cost.
    """

    name: str
    arguments: dict[str, Any]
    step_s: float = 0.002
    epochs: int = 1
    mended: dict[str, Any] = field(default_factory=dict)


def works(cores: int) -> list[Work]:
    """All of them."""
    few, short = Costly(400), Costly(80)
    base: dict[str, Any] = {"batch_size": 4}
    object_batch: Callable[[list[Any]], Any] = _unpickled_batch
    return [
        Work("step", base | {"dataset": few, "num_workers": 2}, 0.02),
        Work(
            "workers",
            base | {"dataset": Costly(1600), "num_workers": 2, "transforms": [Step(0.01)]},
        ),
        Work("source", base | {"dataset": Costly(400, 0.01), "num_workers": 2}),
        Work(
            "transform",
            base | {"dataset": few, "num_workers": cores, "transforms": [Step(burn_s=0.004)]},
            mended={"transforms": [Step(burn_s=0.002)]},
        ),
        Work(
            "assembly",
            base | {"dataset": few, "num_workers": cores, "collate_fn": Collate(0.016)},
            mended={"collate_fn": Collate(0.008)},
        ),
        Work(
            "transfer",
            base | {"dataset": few, "num_workers": 2, "collate_fn": object_batch},
            mended={"collate_fn": None},
        ),
        Work(
            "memory",
            {
                "dataset": Costly(200, 0.01, numbers=100_000),
                "batch_size": 1,
                "num_workers": 4,
                "memory_budget_bytes": 500_000,
            },
        ),
        Work(
            "start",
            base | {"dataset": short, "num_workers": 1, "worker_init_fn": slow_start},
            0.002,
            4,
        ),
    ]


def _unpickled_batch(samples: list[Any]) -> Unpickled:
    return Unpickled(0.008)
