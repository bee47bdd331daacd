"""Command line of the benchmark on a GPU; see ``python -m bench.gpu --help``."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import record
from bench.gpu.watch import Copies, Utilisation, copies_of, plain_copies
from bench.gpu.work import Training, trainings
from bench.workloads.packages import FOLDER
from minato import DataLoader

TorchLoader = torch.utils.data.DataLoader
REPEATS = 3
WAITED_S = 1e-3
"""A step has waited if ``next()`` took longer."""
_TRACED_STEPS = 20


class Contender(NamedTuple):
    """A loader, and how its batches get to the device."""

    name: str
    make: Callable[..., Any]
    in_order: bool
    pin: bool | str | None
    """``pin_memory``; None: it hands them out on the device itself."""


CONTENDERS = (
    Contender("torch", TorchLoader, True, True),
    Contender("torch, out of order", TorchLoader, False, True),
    Contender("minato, pinned", DataLoader, True, True),
    Contender("minato, pinned in place", DataLoader, True, "in_place"),
    Contender("minato", DataLoader, True, None),
    Contender("minato, out of order", DataLoader, False, None),
)


class Run(NamedTuple):
    """One loader in front of one training."""

    epoch_s: float
    waited_share: float
    idle_share: float
    copies: Copies
    peak_bytes: float


class Trainer:
    """A network that is trained from one loader, epoch after epoch."""

    def __init__(
        self, training: Training, contender: Contender, dataset: Any, workers: int
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        torch.manual_seed(0)
        self.model = training.make(training.width).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.size = len(dataset)
        self.volumes = training.volumes
        where: dict[str, Any] = (
            {"device": self.device}
            if contender.pin is None
            else {"pin_memory": self.on_gpu and contender.pin}
        )
        self.loader = contender.make(
            dataset,
            batch_size=training.batch_size,
            collate_fn=training.collate,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            in_order=contender.in_order,
            **where,
        )

    def steps(self) -> Iterator[tuple[float, torch.Tensor]]:
        """Train one epoch; for each step the seconds it waited, and the samples' indices."""
        batches = iter(self.loader)
        while True:
            begun_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            waited_s = time.perf_counter() - begun_s
            labels, images = (each.to(self.device, non_blocking=True) for each in batch[:2])
            inputs = images.unsqueeze(1) if self.volumes else images
            loss = (self.model(inputs).flatten(1).mean(1) - labels / self.size).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield waited_s, labels.clone()  # a view would keep the whole batch

    def epoch(self) -> tuple[float, list[float]]:
        """Seconds of a whole epoch, and those that each step waited; each sample must have come once."""
        begun_s = time.perf_counter()
        steps = list(self.steps())
        if self.on_gpu:
            torch.cuda.synchronize()
        taken_s = time.perf_counter() - begun_s
        came = sorted(torch.cat([labels for _, labels in steps]).tolist())
        assert came == list(range(self.size)), "not each sample once"
        return taken_s, [waited_s for waited_s, _ in steps]


def measure(
    training: Training, contender: Contender, dataset: Any, workers: int, epochs: int
) -> Run:
    """A first epoch that warms up, some that count, and on a GPU the trace of another one's first steps."""
    trainer = Trainer(training, contender, dataset, workers)
    trainer.epoch()
    if not trainer.on_gpu:
        results = [trainer.epoch() for _ in range(epochs)]
        return _run_of(results, float("nan"), Copies(float("nan"), float("nan")), float("nan"))
    torch.cuda.reset_peak_memory_stats()
    with Utilisation(torch.cuda.current_device()) as watched:
        results = [trainer.epoch() for _ in range(epochs)]
    peak = torch.cuda.max_memory_allocated()

    def first_steps() -> None:
        for _ in itertools.islice(trainer.steps(), _TRACED_STEPS):
            pass

    return _run_of(results, watched.idle_share, copies_of(first_steps), peak)


def _run_of(
    results: list[tuple[float, list[float]]], idle: float, copies: Copies, peak: float
) -> Run:
    waits = [wait_s for _, epoch in results for wait_s in epoch]
    waited = sum(wait_s > WAITED_S for wait_s in waits) / len(waits)
    return Run(statistics.median(taken for taken, _ in results), waited, idle, copies, peak)


def _batch_bytes(training: Training, dataset: Any) -> int:
    """What the images of a first batch take."""
    batch = next(iter(TorchLoader(dataset, training.batch_size, collate_fn=training.collate)))
    return int(batch[1].nbytes)


def row(training: Training, contender: Contender, runs: list[Run]) -> str:
    """A line of the table: medians of the runs."""
    epoch_s = statistics.median(run.epoch_s for run in runs)
    waited = statistics.median(run.waited_share for run in runs)
    idle = statistics.median(run.idle_share for run in runs)
    beside = statistics.median(run.copies.beside for run in runs)
    rate = statistics.median(run.copies.rate for run in runs)
    peak = statistics.median(run.peak_bytes for run in runs)

    def shown(value: float, factor: float, digits: int = 0) -> str:
        return f"{value * factor:.{digits}f}" if value == value else "–"

    return (
        f"| {training.name} | {contender.name} | {epoch_s:.2f} | {100 * waited:.0f} | {shown(idle, 100)} | "
        f"{shown(beside, 100)} | {shown(rate, 1e-9, 1)} | {shown(peak, 2**-20)} |"
    )


def main(arguments: list[str] | None = None) -> int:
    about = "Train small networks on a GPU from torch's loader and minato's. Without a GPU, on the processor."
    parser = record.options_of("bench.gpu", about, REPEATS)
    parser.add_argument(
        "--workers", type=int, default=max(record.usable_cores() - 1, 1), metavar="N"
    )
    parser.add_argument("--data", type=Path, default=FOLDER, help="what 'make data' has filled")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    on_gpu = torch.cuda.is_available()
    where = f"GPU: {torch.cuda.get_device_name()}." if on_gpu else (
        "There was no GPU: small networks and data, trained on the processor that serves the workers, too. "
        "This says nothing about a GPU."
    )  # fmt: skip
    batches, epochs, repeats = (4, 1, 1) if options.short else (64, 3, options.repeats)
    how = (
        f"One epoch of {batches} batches, after one that warms up: it runs, and is too short to compare loaders by."
        if options.short
        else f"Medians of {repeats} runs of {epochs} whole epochs of {batches} batches, after one that warms up."
    )
    what, chosen = trainings(on_gpu, options.data)
    conditions = record.environment()
    lines = [
        "# Loaders in front of a GPU",
        "",
        f"Written by `python -m bench.gpu{' --short' if options.short else ''} --out docs/benchmarks`. {where}",
        "",
        what,
        f"{how} Loaders in turn, each with {options.workers} workers. *Waited*: steps whose `next()` took more than",
        f"{1e3 * WAITED_S:.0f} ms. *Idle*: share of the time in which no kernel ran (NVML, 10 Hz). *Beside*: share",
        "of the time of copies to the GPU in which a kernel ran; *rate*: bytes copied in that time (trace). *Plain*:",
        "the rate of nothing but copies of as much as such a batch holds, from memory that torch has pinned.",
        "",
        "| network | loader | epoch (s) | waited (%) | idle (%) | beside (%) | rate (GB/s) | memory on the GPU (MiB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for training in chosen:
        dataset = training.load(batches * training.batch_size, options.data)
        runs: dict[Contender, list[Run]] = {each: [] for each in CONTENDERS}
        for _, contender in itertools.product(range(repeats), CONTENDERS):
            runs[contender].append(measure(training, contender, dataset, options.workers, epochs))
        for contender in CONTENDERS:
            lines.append(row(training, contender, runs[contender]))
            print(lines[-1], flush=True)
        if on_gpu:
            copies = plain_copies(_batch_bytes(training, dataset), torch.device("cuda"))
            lines.append(
                f"| {training.name} | *plain* | – | – | – | – | {1e-9 * copies.rate:.1f} | – |"
            )
            print(lines[-1], flush=True)
    record.finish(lines, conditions, options.out and options.out / "gpu.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
