"""One run with one loader: a step per batch, measured; every sample counted and compared."""

from __future__ import annotations

import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import minato
from demo.data import Draws, Sample, Windows

BATCH_SIZE = 4


class Loader(Protocol):
    """What a run uses of a loader."""

    sampler: Draws

    def __iter__(self) -> Iterator[Sample]: ...


class Step(Protocol):
    """What is done with each batch."""

    cores: int
    """Cores of this machine that it occupies."""

    def __call__(self, batch: Sample) -> float:
        """Take one step; returns how long the step takes, in seconds."""


class Accelerator:
    """A step on a device of its own: this process only waits for it, so it sleeps.

    Args:
        step_s: Duration of a step, seconds.
    """

    cores = 0

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def __call__(self, batch: Sample) -> float:
        time.sleep(self.step_s)
        return self.step_s


@dataclass
class Run:
    """The measurements of one run; times in seconds, one entry per step, epoch or sample where plural.

    Attributes:
        name: The loader, as the table shows it.
        total_s: From before the loader was built until the last step was done.
        first_batch_s: From before the loader was built until its first batch arrived.
        waits_s: Time in the loader's ``next``, per step.
        steps_s: Time of the steps themselves.
        epochs_s: From the call of ``iter`` until the last step, per epoch.
        costs_s: Processor time of the transforms, per delivered sample.
        contents: Checksum of each delivered sample, by draw.
        missing, repeated: Samples never, or more than once, delivered; summed over the epochs.
        step_cores: Cores of this machine that a step occupies.
        dice: Score on the held-out box after the last epoch; None without training.
        others_share: Share of the cores that other programs took meanwhile; None where unknown.
    """

    name: str
    total_s: float = 0.0
    first_batch_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    epochs_s: list[float] = field(default_factory=list)
    costs_s: list[float] = field(default_factory=list)
    contents: dict[int, int] = field(default_factory=dict)
    missing: int = 0
    repeated: int = 0
    step_cores: int = 0
    dice: float | None = None
    others_share: float | None = None

    @property
    def wait_s(self) -> float:
        """Time per epoch in which the training loop waited for data."""
        return sum(self.waits_s) / len(self.epochs_s)

    @property
    def step_s(self) -> float:
        """Time per epoch of the steps."""
        return sum(self.steps_s) / len(self.epochs_s)

    @property
    def epoch_s(self) -> float:
        """Time of an epoch: the median."""
        return statistics.median(self.epochs_s)

    @property
    def is_complete(self) -> bool:
        """Whether every epoch delivered every sample exactly once."""
        return not self.missing and not self.repeated

    def bound_s(self, num_workers: int, num_cores: int) -> float:
        """Time of an epoch that no loader could beat with the work of this run.

        The steps follow each other, the workers share the transforms, and all share the cores.
        """
        steps_s, transforms_s = sum(self.steps_s), sum(self.costs_s)
        work_s = steps_s * self.step_cores + transforms_s
        return max(steps_s, transforms_s / num_workers, work_s / num_cores) / len(self.epochs_s)

    def first_bound_s(self, batch_size: int, num_workers: int) -> float:
        """Least time to the first batch that came, with workers that start in no time."""
        costs_s = self.costs_s[:batch_size]
        return max(*costs_s, sum(costs_s) / num_workers)


def make_loader(
    loader: Callable[..., Any], dataset: Windows, num_workers: int, **arguments: Any
) -> Any:
    """A loader of torch or minato: the same arguments for each, but for ``arguments``."""
    return loader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=Draws(len(dataset), dataset.seed),
        num_workers=num_workers,
        persistent_workers=True,
        **arguments,
    )


LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torch": (TorchDataLoader, {}),
    "torch, in_order=False": (TorchDataLoader, {"in_order": False}),
    "minato": (minato.DataLoader, {}),
}
"""By name: the class, and the arguments in which it differs from the others."""


def train(
    name: str,
    make: Callable[[], Loader],
    step: Step,
    num_samples: int,
    num_epochs: int,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """Train for whole epochs and measure.

    Args:
        name: The loader's name for the report.
        make: Builds the loader; its time counts.
        step: Called with each batch.
        num_samples: Length of the dataset, to check the delivered draws against.
        num_epochs: Epochs to run.
        after_step: Called after each step, for a progress bar.
    """
    run = Run(name, step_cores=step.cores)
    start_s = time.perf_counter()
    loader = make()
    for epoch in range(num_epochs):
        seen: Counter[int] = Counter()
        loader.sampler.set_epoch(epoch)
        asked_s = epoch_start_s = time.perf_counter()
        for batch in loader:
            got_s = time.perf_counter()
            run.waits_s.append(got_s - asked_s)
            if run.first_batch_s == 0.0:
                run.first_batch_s = got_s - start_s
            run.steps_s.append(step(batch))
            draws = batch.key.tolist()
            seen.update(draws)
            run.contents.update(zip(draws, _checksums(batch), strict=True))
            run.costs_s += batch.cost_s.tolist()
            after_step()
            asked_s = time.perf_counter()
        run.epochs_s.append(time.perf_counter() - epoch_start_s)
        expected = range(epoch * num_samples, (epoch + 1) * num_samples)
        run.missing += sum(1 for draw in expected if seen[draw] == 0)
        run.repeated += seen.total() - len(seen)
    run.total_s = time.perf_counter() - start_s
    return run


def _checksums(batch: Sample) -> Iterable[int]:
    images, labels = torch.as_tensor(batch.image), torch.as_tensor(batch.label)
    for image, label in zip(images, labels, strict=True):
        yield zlib.crc32(label.numpy(), zlib.crc32(image.numpy()))
