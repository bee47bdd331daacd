"""The MinatoLoader paper's published loader on its own transforms, beside torch's loader and minato."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from bench.harness import record, report
from bench.harness.datasets import Counted
from bench.harness.environments import call, tell
from bench.harness.loaders import MINATO, TORCH, TORCH_ANY_ORDER, minato_as, named
from bench.harness.trial import unwarned

LOADER = Path("Minato") / "data_loading" / "Asynchrnous_dataloader.py"
"""What a checkout holds; the name is theirs."""
PRODUCERS, SLOW_PROCESSES = 2, 3
"""Its processes: the first as its scripts set them, the second fixed in its code. Others get as many workers."""
WORKERS = PRODUCERS + SLOW_PROCESSES
BATCH_SIZE, STEP_S, EPOCHS = 2, 0.05, 3
PATCH = (48, 48, 48)
OURS = named(
    *(TORCH, TORCH_ANY_ORDER, MINATO),
    minato_as("minato, order='arrival'", "arrival", order="arrival"),
    minato_as("minato, order='fast_first'", "fast_first", order="fast_first"),
)
LABELS = {"artifact": "the artifact", **{name: one.label for name, one in OURS.items()}}
_TRIAL_S = 120.0
HEAD = f"""\
# The papers' own code

Written by `python -m bench.artifact --artifact PATH`. The loader of the MinatoLoader paper's artifact runs unchanged,
on generated volumes of uneven size, with its own transforms; the others run the same transforms on the same files.
{{epochs}} epochs in batches of {BATCH_SIZE}, a step sleeps {1e3 * STEP_S:g} ms. The artifact has {PRODUCERS} producers
and {SLOW_PROCESSES} processes for slow samples, every other loader {WORKERS} workers. Seconds from before the loader is
built to the end of the last epoch: medians of {{repeats}} runs (least and greatest), loaders in turn. *Lost* and
*repeated*: samples that did not come in an epoch, and deliveries of one that had come in it, of all {{epochs}} epochs;
least and greatest run.
"""


@dataclass(frozen=True)
class Workload:
    """Volumes; every n-th, if any, is slow, and sleeps besides."""

    title: str
    samples: int
    every: int
    slept_s: float


WORKLOADS = {
    "own": Workload("the transforms alone: all samples below its limit of 2 s", 41, 0, 0.0),
    "slow": Workload("every fifth sample sleeps 2.5 s more, beyond its limit", 41, 5, 2.5),
}


class Sleep:
    """A transform: volumes of the given classes take longer."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.workload.every and int(data["label"].max()) % self.workload.every == 0:
            time.sleep(self.workload.slept_s)
        return data


class Volumes(Counted):
    """The artifact's chain without its time limit: the same calls on the same mapped files."""

    def __init__(self, theirs: Any, paths: Sequence[Path], workload: Workload) -> None:
        super().__init__(len(paths))
        self.images = [np.load(path, mmap_mode="r") for path in paths]
        self.labels = [np.load(label_of(path), mmap_mode="r") for path in paths]
        self.crop = theirs.RandBalancedCrop(PATCH, 0.4)
        self.chain = [*theirs.get_train_transforms().transforms, Sleep(workload)]

    def __getitem__(self, index: int) -> Any:
        data = self.crop({"image": self.images[index], "label": self.labels[index]})
        for transform in self.chain:
            data = transform(data)
        return data["image"], data["label"]


def label_of(path: Path) -> Path:
    return path.with_name(path.name.replace("_x.npy", "_y.npy"))


def store(folder: Path, samples: int) -> list[Path]:
    """Write volumes of uneven size, two balls each; the class of both is the index + 1, by which a sample is known."""
    rng = np.random.default_rng(0)
    paths = []
    for index in range(samples):
        shape = tuple(int(side) for side in rng.integers(64, 176, 3))
        label = np.zeros(shape, np.uint8)
        grid = np.ogrid[tuple(slice(side) for side in shape)]
        for _ in range(2):
            middle = [rng.integers(16, side - 16) for side in shape]
            away = sum((axis - at) ** 2 for axis, at in zip(grid, middle, strict=True))
            label[away < rng.integers(8, 16) ** 2] = index + 1
        path = folder / f"case_{index:05d}_x.npy"
        np.save(path, rng.standard_normal(shape, np.float32)[None])
        np.save(label_of(path), label[None])
        paths.append(path)
    return paths


class _Compose:
    """What the artifact uses of torchvision: a list of transforms."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms


def imported(artifact: Path) -> tuple[Any, Any]:
    """The artifact's modules of dataset and loader, with stubs for what they import, but do not run or find."""
    from scipy import ndimage

    sys.path.insert(0, str(artifact / "Minato"))
    logging, torchvision, transforms = map(
        _module, ("runtime.logging", "torchvision", "torchvision.transforms")
    )
    logging.mllog_event = None
    torchvision.transforms, transforms.Compose = transforms, _Compose
    _module("pandas")
    measurements = _module("scipy.ndimage.measurements")
    measurements.label = ndimage.label
    ndimage.measurements = measurements
    return (
        importlib.import_module("data_loading.pytorch_loader"),
        importlib.import_module("data_loading.Asynchrnous_dataloader"),
    )


def _module(name: str) -> Any:
    found = sys.modules[name] = types.ModuleType(name)
    return found


def trial(name: str, artifact: str, folder: str, row: str, epochs: int) -> dict[str, Any]:
    """In a process of its own: one loader, all epochs."""
    theirs, loaders = imported(Path(artifact))
    paths, workload = sorted(Path(folder).glob("*_x.npy")), WORKLOADS[row]
    if name == "ideal":
        return {"taken_s": _ideal_s(theirs, paths, workload, epochs)}
    torch.manual_seed(0)
    begun_s = time.perf_counter()
    if name == "artifact":
        loader = _theirs(theirs, loaders, paths, workload)
    else:
        arguments = {
            "batch_size": BATCH_SIZE,
            "shuffle": True,
            "drop_last": True,
            "num_workers": WORKERS,
            "persistent_workers": True,
        }
        with unwarned():
            loader = OURS[name].build(Volumes(theirs, paths, workload), arguments, 0)
    delivered = [_epoch(loader) for _ in range(epochs)]
    taken_s = time.perf_counter() - begun_s
    found = {"taken_s": taken_s, "delivered": delivered}
    if name == "artifact":  # its processes never end by themselves, and would keep this one
        tell(found)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(0)
    return found


def _theirs(theirs: Any, loaders: Any, paths: Sequence[Path], workload: Workload) -> Any:
    """As its ``main`` builds it for one GPU, which it does not need."""
    import torch.multiprocessing as mp

    transforms = theirs.get_train_transforms()
    transforms.transforms.append(Sleep(workload))
    theirs.get_train_transforms = lambda: transforms
    slow: Any = mp.Queue()
    processed: Any = mp.Queue()
    labels = [str(label_of(path)) for path in paths]
    settings = {"patch_size": PATCH, "oversampling": 0.4, "seed": 0}
    dataset = theirs.PytTrain([str(path) for path in paths], labels, slow, processed, **settings)
    return loaders.AsynchronousLoader(
        dataset,
        device="cpu",
        shards=1,
        rank=0,
        slow_processed_queue=processed,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=PRODUCERS,
    )


def _epoch(loader: Any) -> list[int]:
    """The indices of an epoch's samples; -1 for one without a class."""
    found: list[int] = []
    with unwarned():
        for images, labels in loader:
            if images.shape[1:] != (1, *PATCH) or labels.shape != images.shape:
                raise ValueError(f"a batch of {tuple(images.shape)} and {tuple(labels.shape)}")
            found += (labels.flatten(1).amax(1).long() - 1).tolist()
            time.sleep(STEP_S)
    return found


class Faults(NamedTuple):
    """What a run delivered, against each sample once in an epoch, but for an incomplete batch."""

    lost: int
    repeated: int
    same_order: bool

    @classmethod
    def of(cls, delivered: Sequence[Sequence[int]], samples: int) -> Faults:
        whole = samples // BATCH_SIZE * BATCH_SIZE
        distinct = [len(set(epoch) - {-1}) for epoch in delivered]
        lost = sum(whole - each for each in distinct)
        repeated = sum(len(epoch) - len(set(epoch)) for epoch in delivered)
        orders = [tuple(epoch) for epoch in delivered]
        return cls(lost, repeated, len(set(orders)) < len(orders))


def _ideal_s(theirs: Any, paths: Sequence[Path], workload: Workload, epochs: int) -> float:
    """Seconds of all epochs without any cost of a loader."""
    dataset = Volumes(theirs, paths, WORKLOADS["own"])
    dataset[0]
    begun_s = time.perf_counter()
    for index in range(len(dataset)):
        dataset[index]
    cpu_s = time.perf_counter() - begun_s
    slow = len(dataset) // workload.every if workload.every else 0
    work_s = (cpu_s + slow * workload.slept_s) / WORKERS
    slept_s = -(-slow // WORKERS) * workload.slept_s  # one after the other in one worker
    steps_s = len(dataset) // BATCH_SIZE * STEP_S
    return epochs * max(cpu_s / record.usable_cores(), work_s, slept_s, steps_s)


def checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / LOADER).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} holds no {LOADER}; give a checkout of https://github.com/Rahm-no/MinatoLoader"
        )
    return path


def measure(row: str, options: Any, page: report.Page) -> list[list[str]]:
    """All loaders on a workload, in turn: the lines of the table."""
    workload = WORKLOADS[row]
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder), workload.samples)
        given = str(options.artifact), folder, row, 1 if options.short else EPOCHS
        run = functools.partial(call, "bench.artifact:trial", limit_s=_TRIAL_S)
        least_s = float(run("ideal", *given)["taken_s"])

        def measured(name: str, repeat: int) -> tuple[float, Faults]:
            found = run(name, *given)
            return found["taken_s"], Faults.of(found["delivered"], workload.samples)

        shown = "{0[0]:.2f} s, {0[1]}".format
        found = page.turns(row, [*LABELS], options.repeats, measured, shown)
    lines = [[row, "*ideal*", f"{least_s:.2f}", "", "", "", ""]]
    for name, runs in found.items():
        times, faults = [run[0] for run in runs], [run[1] for run in runs]
        counts = [
            _between([each.lost for each in faults]),
            _between([each.repeated for each in faults]),
            "yes" if any(each.same_order for each in faults) else "no",
        ]
        share = report.share_text(least_s / statistics.median(times))
        lines.append([row, LABELS[name], report.spread_text(times, 2), share, *counts])
    return lines


def _between(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}–{high}"


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("artifact", __doc__, 3, rows=WORKLOADS)
    about = "a checkout of its repository"
    parser.add_argument("--artifact", type=checkout, required=True, metavar="PATH", help=about)
    options = parser.parse_args(arguments)
    page = report.Page("artifact", options.out)
    page.add(HEAD.format(epochs=1 if options.short else EPOCHS, repeats=options.repeats))
    page.add("".join(f"* `{row}`: {WORKLOADS[row].title}\n" for row in options.rows))
    head = ["row", "loader", "s", "of the ideal", "lost", "repeated", "same order twice"]
    lines = [line for row in options.rows for line in measure(row, options, page)]
    page.add(report.table(head, lines))
    page.finish()


if __name__ == "__main__":
    report.program(main)
