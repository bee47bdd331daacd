"""Training on a GPU from torch's loader and minato's; small networks on the processor where there is no GPU."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from bench.harness import record, report
from bench.harness.datasets import Counted, measured_ideal
from bench.harness.loaders import Contender, minato_as, named, torch_as
from bench.harness.trial import Consumer, Run, first

WAITED_S = 1e-3
"""A step has waited if ``next()`` took longer."""
_TRACED_STEPS = 20
_NAN = float("nan")
HEAD = f"""\
# Loaders in front of a GPU

Written by `python -m bench.gpu`. {{where}}

Samples are random arrays. Those of *3D U-Net* and *ResNet* are filtered in rounds, whose number has a heavy tail. Those
of *one layer* are ready. {{how}} Loaders in turn, each with {{workers}} workers; every sample is checked. *Ideal*: all
samples divided by the workers, or all steps on a batch that is on the device already, if they take longer. *Waited*:
steps whose `next()` took more than {1e3 * WAITED_S:g} ms. *Idle*: share of the time in which no kernel ran (NVML, 10
Hz). *Overlap*: share of the time of copies to the GPU in which a kernel ran; *rate*: bytes copied in that time (trace).
*Plain*: the rate of nothing but copies of as much as such a batch holds, from memory that torch has pinned.
"""
NO_GPU = """\
There was no GPU: small networks and data, trained on the CPU that also serves the workers. This says nothing
about a GPU."""

INTERVAL_S = 0.1
_PLAIN_COPIES = 20
Span = tuple[float, float]


class Utilisation:
    """Asks NVML ten times a second how much of the time a kernel was running; a context manager."""

    def __init__(self, index: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        self._device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.percent: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._nvml.nvmlShutdown()

    def _look(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.percent.append(self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu)

    @property
    def idle_share(self) -> float:
        return 1 - statistics.fmean(self.percent) / 100 if self.percent else float("nan")


class Copies(NamedTuple):
    """Copies to the GPU, by a trace: the share of their time beside a kernel, and bytes per second; NaN without any."""

    beside: float
    rate: float


def copies_of(run: Callable[[], None]) -> Copies:
    """Trace ``run`` and read its copies from the trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return copies_among(json.loads(path.read_text())["traceEvents"])


def copies_among(events: Iterable[dict[str, Any]]) -> Copies:
    """The same from the events of a trace."""
    copies, kernels = [], []
    taken_us, nbytes = 0.0, 0
    for event in events:
        span = (event.get("ts", 0.0), event.get("ts", 0.0) + event.get("dur", 0.0))
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            copies.append(span)
            taken_us += event["dur"]
            nbytes += event["args"]["bytes"]
        elif event.get("cat") == "kernel":
            kernels.append(span)
    copies, kernels = _merged(copies), _merged(kernels)
    both = sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in copies for b in kernels)
    total = sum(end - start for start, end in copies)
    if not total:
        return Copies(float("nan"), float("nan"))
    return Copies(both / total, 1e6 * nbytes / taken_us)


def plain_copies(nbytes: int, device: torch.device) -> Copies:
    """Copies of ``nbytes`` from memory that torch has pinned, one after the other."""
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def run() -> None:
        for _ in range(_PLAIN_COPIES):
            pinned.to(device, non_blocking=True)

    run()
    return copies_of(run)


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


ROUNDS, SPREAD = 4.0, 0.9
"""Median and logarithmic standard deviation of a sample's rounds of filtering: 1 % take 8 times the median."""


class Augmented(Counted):
    """Random arrays that are filtered in rounds, as many as the index says; each comes behind its index."""

    def __init__(self, size: int, shape: tuple[int, ...]) -> None:
        super().__init__(size)
        self.shape = shape
        drawn = np.random.default_rng(0).lognormal(np.log(ROUNDS), SPREAD, size)
        self.rounds = np.maximum(drawn.round(), 1).astype(int)

    def __getitem__(self, index: int) -> tuple[int, np.ndarray[Any, Any]]:
        array = np.random.default_rng(index).random(self.shape, np.float32)
        for _ in range(self.rounds[index]):
            for axis in (-2, -1):
                array = (array + np.roll(array, 1, axis) + np.roll(array, -1, axis)) / 3
        return index, array


class Ready(Counted):
    """The same arrays again and again, which cost nothing but their copy; each comes behind its index."""

    def __init__(self, size: int, shape: tuple[int, ...]) -> None:
        super().__init__(size)
        self.arrays = np.random.default_rng(0).random((16, *shape), np.float32)

    def __getitem__(self, index: int) -> tuple[int, np.ndarray[Any, Any]]:
        return index, self.arrays[index % len(self.arrays)]


class UNet(nn.Module):
    """A 3D U-Net of two levels, from one channel to one number for each voxel."""

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


def layer(width: int) -> nn.Module:
    """One layer: a step takes less than the copy of its batch."""
    return nn.Conv2d(3, width, 1)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.relu(image + self.second(self.norm(functional.relu(self.first(image)))))


class Training(NamedTuple):
    """A network of a width, and its data; a volume's shape has no dimension for the channel."""

    name: str
    shape: tuple[int, ...]
    batch_size: int
    make: Callable[[int], nn.Module]
    width: int
    dataset: Callable[[int, tuple[int, ...]], Counted] = Augmented


UNET, RESNET, LAYER = "3D U-Net", "ResNet", "one layer"
ON_GPU = (
    Training(UNET, (64, 64, 64), 3, UNet, 32),
    Training(RESNET, (3, 224, 224), 4, resnet, 64),
    Training(LAYER, (3, 224, 224), 64, layer, 1, Ready),
)
ON_CPU = (
    Training(UNET, (16, 16, 16), 3, UNet, 4),
    Training(RESNET, (3, 64, 64), 4, resnet, 8),
    Training(LAYER, (3, 64, 64), 4, layer, 1, Ready),
)
"""Small enough for a processor, which has the workers to serve besides."""


def contenders(on_gpu: bool) -> tuple[Contender, ...]:
    """The loaders, and how their batches get to the device: pinned, pinned in place, or delivered there."""
    where: dict[str, Any] = {"device": torch.device("cuda" if on_gpu else "cpu")}
    pinned: dict[str, Any] = {"pin_memory": on_gpu}
    in_place: dict[str, Any] = {"pin_memory": on_gpu and "in_place"}

    return (
        torch_as(**pinned),
        torch_as("torch, in_order=False", **pinned, in_order=False),
        minato_as("minato, pinned", **pinned),
        minato_as("minato, pinned in place", **in_place),
        minato_as("minato, device=", **where),
        minato_as("minato, device=, in_order=False", **where, in_order=False),
    )


class Measured(NamedTuple):
    """One loader in front of one training."""

    epoch_s: float
    waited_share: float
    idle_share: float = _NAN
    copies: Copies = Copies(_NAN, _NAN)
    peak_bytes: float = _NAN


class Trainer:
    def __init__(self, training: Training, size: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        self.model = training.make(training.width).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.size, self.volumes = size, training.make is UNet

    def step(self, batch: Any) -> None:
        labels, images = (each.to(self.device, non_blocking=True) for each in batch[:2])
        inputs = images.unsqueeze(1) if self.volumes else images
        loss = (self.model(inputs).flatten(1).mean(1) - labels / self.size).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(
    training: Training, contender: Contender, dataset: Any, workers: int, epochs: int
) -> Measured:
    """A first epoch that warms up, some that count, and on a GPU the trace of another one's first steps."""
    trainer = Trainer(training, len(dataset))
    arguments = {
        "batch_size": training.batch_size,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": True,
    }
    run = Run(contender, dataset, arguments, Consumer(trainer.step, first))

    def timed() -> float:
        begun_s = time.perf_counter()
        run.epoch()
        trainer.synchronize()
        return time.perf_counter() - begun_s

    warm_batches = -(-len(dataset) // training.batch_size)
    timed()
    if trainer.device.type != "cuda":
        epoch_s = statistics.median(timed() for _ in range(epochs))
        return Measured(epoch_s, _waited(run.finish(training.name).waits_s[warm_batches:]))
    torch.cuda.reset_peak_memory_stats()
    with Utilisation(torch.cuda.current_device()) as watched:
        epoch_s = statistics.median(timed() for _ in range(epochs))
    peak = torch.cuda.max_memory_allocated()
    waited = _waited(run.finish(training.name).waits_s[warm_batches:])

    def first_steps() -> None:
        for batch in itertools.islice(run.loader, _TRACED_STEPS):
            trainer.step(batch)

    return Measured(epoch_s, waited, watched.idle_share, copies_of(first_steps), peak)


def _waited(waits_s: Iterable[float]) -> float:
    return statistics.fmean(wait_s > WAITED_S for wait_s in waits_s)


def ideal_s(training: Training, dataset: Any, workers: int) -> tuple[float, int]:
    """The least seconds of an epoch, and the bytes of a batch's images."""
    batch = default_collate([dataset[index] for index in range(training.batch_size)])
    trainer = Trainer(training, len(dataset))
    batch = tuple(each.to(trainer.device) for each in batch[:2])
    trainer.step(batch)
    trainer.synchronize()
    steps, begun_s = -(-len(dataset) // training.batch_size), time.perf_counter()
    for _ in range(min(steps, _TRACED_STEPS)):
        trainer.step(batch)
    trainer.synchronize()
    steps_s = (time.perf_counter() - begun_s) * steps / min(steps, _TRACED_STEPS)
    samples = measured_ideal(
        dataset.__getitem__, range(len(dataset)), workers, record.usable_cores()
    )
    return max(steps_s, samples.epoch_s), int(batch[1].nbytes)


def line(training: Training, label: str, runs: list[Measured], least_s: float) -> list[str]:
    def shown(values: Iterable[float], factor: float, digits: int = 0) -> str:
        value = statistics.median(values)
        return f"{value * factor:.{digits}f}" if value == value else "–"

    epochs_s = [run.epoch_s for run in runs]
    return [
        training.name,
        label,
        report.spread_text(epochs_s, 2),
        report.share_text(least_s / statistics.median(epochs_s)),
        shown((run.waited_share for run in runs), 100),
        shown((run.idle_share for run in runs), 100),
        shown((run.copies.beside for run in runs), 100),
        shown((run.copies.rate for run in runs), 1e-9, 1),
        shown((run.peak_bytes for run in runs), 2**-20),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("gpu", __doc__, 3)
    cores = max(record.usable_cores() - 1, 1)
    parser.add_argument("--workers", type=int, default=cores, metavar="N")
    options = parser.parse_args(arguments)
    on_gpu, repeats = torch.cuda.is_available(), options.repeats
    batches, epochs = (2, 1) if options.short else (64, 3)
    page = report.Page("gpu", options.out)
    where = f"GPU: {torch.cuda.get_device_name()}." if on_gpu else NO_GPU
    how = f"Medians of {repeats} runs of {epochs} whole epochs of {batches} batches, after one that warms up."
    page.add(HEAD.format(where=where, how=how, workers=options.workers))
    head = ["network", "loader", "epoch (s)", "efficiency", "waited (%)", "idle (%)", "overlap (%)"]
    head += ["rate (GB/s)", "memory on the GPU (MiB)"]
    lines, compared = [], named(*contenders(on_gpu))
    for training in ON_GPU if on_gpu else ON_CPU:
        dataset = training.dataset(batches * training.batch_size, training.shape)
        least_s, nbytes = ideal_s(training, dataset, options.workers)
        lines.append([training.name, "*ideal*", f"{least_s:.2f}", *[""] * 6])
        case = dataset, options.workers, epochs
        runs = page.turns(
            training.name,
            [*compared],
            repeats,
            lambda name, _, training=training, case=case: measure(training, compared[name], *case),  # type: ignore[misc]
            lambda one: f"{one.epoch_s:.2f} s",
        )
        lines += [line(training, label, each, least_s) for label, each in runs.items()]
        if on_gpu:
            rate = plain_copies(nbytes, torch.device("cuda")).rate
            lines.append([training.name, "*plain*", *[""] * 5, f"{1e-9 * rate:.1f}", ""])
    page.add("## All figures\n", report.table(head, lines))
    page.finish()


if __name__ == "__main__":
    report.program(main)
