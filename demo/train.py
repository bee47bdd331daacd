"""One training run with one loader, measured from outside: the loop asks no loader about itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import minato
from bench.workloads.mapped import Mapped
from demo.chain import segmentation_chain
from demo.data import Volume, Windows
from demo.model import Trainer

BATCH_SIZE = 4

Loader = Iterable[Any]


@dataclass
class Run:
    """What one run measured; times in seconds, one entry per step or per sample where plural.

    Attributes:
        name: The loader, as the table shows it.
        total_s: From before the loader was built until the last step was done.
        first_batch_s: From before the loader was built until its first batch arrived.
        waits_s: Time in the loader's ``next``, per step.
        trainer_cpu_s: Processor time of the training steps.
        losses: Training loss, per step.
        costs_s: Processor time of the chain, per delivered sample.
        missing, repeated: Samples never, or more than once, delivered; summed over the epochs.
        delivered: Samples delivered in all epochs.
        dice: Score on the held-out box after the last epoch.
        others_share: Share of the cores that other programs took meanwhile; None where unknown.
    """

    name: str
    total_s: float = 0.0
    first_batch_s: float = 0.0
    trainer_cpu_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    costs_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    delivered: int = 0
    missing: int = 0
    repeated: int = 0
    dice: float = 0.0
    others_share: float | None = None

    @property
    def wait_s(self) -> float:
        """Time that the training loop waited for data."""
        return sum(self.waits_s)

    @property
    def chain_cpu_s(self) -> float:
        """Processor time of the chain over all delivered samples."""
        return sum(self.costs_s)

    @property
    def is_complete(self) -> bool:
        """Whether every epoch delivered every sample exactly once."""
        return not self.missing and not self.repeated

    def bound_s(self, num_workers: int, num_cores: int) -> float:
        """Time that no loader could beat with this run's own work.

        The trainer works on one core, the workers share the chain, and all share the cores.
        """
        work_s = self.trainer_cpu_s + self.chain_cpu_s
        return max(self.trainer_cpu_s, self.chain_cpu_s / num_workers, work_s / num_cores)


def torch_loader(dataset: Windows, num_workers: int, seed: int, in_order: bool) -> Loader:
    """torch's loader; the chain sits behind ``__getitem__``."""
    return TorchDataLoader(
        Mapped(dataset, segmentation_chain()),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(seed),
        persistent_workers=True,
        in_order=in_order,
    )


def minato_loader(dataset: Windows, num_workers: int, seed: int) -> Loader:
    """minato's loader in its default order, strict."""
    return minato.DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
        seed=seed,
        transforms=segmentation_chain(),
        persistent_workers=True,
    )


LOADERS: dict[str, Callable[[Windows, int, int], Loader]] = {
    "torch in order": lambda d, workers, seed: torch_loader(d, workers, seed, in_order=True),
    "torch out of order": lambda d, workers, seed: torch_loader(d, workers, seed, in_order=False),
    "minato (strict)": minato_loader,
}


def train(
    name: str,
    make_loader: Callable[[], Loader],
    trainer: Trainer,
    num_samples: int,
    num_epochs: int,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """Train for whole epochs and measure.

    Args:
        name: The loader's name for the report.
        make_loader: Builds the loader; its time counts.
        trainer: A fresh model.
        num_samples: Length of the dataset, to check the delivered indices against.
        num_epochs: Passes over the dataset.
        after_step: Called after each step, for a progress bar.
    """
    run = Run(name)
    start_s = time.perf_counter()
    loader = make_loader()
    for _ in range(num_epochs):
        seen: Counter[int] = Counter()
        asked_s = time.perf_counter()
        for batch in loader:
            got_s = time.perf_counter()
            run.waits_s.append(got_s - asked_s)
            if run.first_batch_s == 0.0:
                run.first_batch_s = got_s - start_s
            seen.update(batch.key.tolist())
            run.costs_s += batch.cost_s.tolist()
            cpu_s = time.thread_time()
            run.losses.append(trainer.step(batch.image, batch.label))
            run.trainer_cpu_s += time.thread_time() - cpu_s
            after_step()
            asked_s = time.perf_counter()
        run.delivered += seen.total()
        run.missing += sum(1 for index in range(num_samples) if seen[index] == 0)
        run.repeated += sum(count - 1 for count in seen.values() if count > 1)
    run.total_s = time.perf_counter() - start_s
    return run


def warm_up(volume: Volume) -> None:
    """Pay the one-time costs of a step now, or the first run alone would pay them."""
    windows = Mapped(Windows(volume, BATCH_SIZE), segmentation_chain())
    samples = [windows[index] for index in range(BATCH_SIZE)]
    image = torch.stack([torch.from_numpy(sample.image) for sample in samples])
    label = torch.stack([torch.from_numpy(sample.label) for sample in samples])
    trainer = Trainer(seed=0, num_steps=3)
    for _ in range(3):
        trainer.step(image, label)
