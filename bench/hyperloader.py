"""hyperloader's six workloads: torch, minato and hyperloader at equal workers, every sample of every epoch checked."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

from bench.harness import report
from bench.harness.environments import (
    PeerMissingError,
    TrialFailedError,
    interpreter,
    run_in,
    tell,
    versions,
)
from bench.harness.suite import Spread, in_turn
from bench.harness.trial import unwarned
from bench.workloads.feeds import FEEDS, Feed, Plain, tensor_of

REQUIREMENTS = ("datasets==5.2.0", "pillow==13.0.0", "psutil==7.2.2")
WORKERS, BATCHES, SECONDS = 2, 32, 0.7
SHORT_BATCHES, SHORT_SECONDS = 6, 0.05
LEAST_EPOCHS = 4
_TRIAL_S = 120.0
LOADERS = {
    "torch": "torch",
    "minato": "minato",
    "hyperloader": "hyperloader",
    "minato-threads": "minato, threads",
    "hyperloader-threads": "hyperloader, threads",
    "torch-itself": "torch",
    "minato-itself": "minato",
    "minato-threads-itself": "minato, threads",
    "hyperloader-itself": "hyperloader",
}
GROUPS = {
    "Processes": ("torch", "minato", "hyperloader"),
    "Threads": ("minato-threads", "hyperloader-threads"),
    "The dataset itself": (
        "torch-itself",
        "minato-itself",
        "minato-threads-itself",
        "hyperloader-itself",
    ),
}
HEAD = """\
# hyperloader's workloads

Written by `python -m bench.hyperloader --wheel PATH`. The six workloads of hyperloader's own benchmark, written again
with samples that all differ, so that a wrong one is seen. All loaders run in one environment, with {workers} workers,
that live for all epochs, batches in order, no shuffle. The consumer compares every batch of every epoch with what it
must hold, which costs every loader the same. Thousands of samples per second of the epochs after the first: medians of
{repeats} runs (least and greatest in brackets).

*Processes* and *Threads*: a dataset class with nothing but `__getitem__` and `__len__`. *The dataset itself*: the
loader gets the tensor, the mapped array or the table, and collates in its default way except where rows need padding;
hyperloader's batches of a tensor or of a mapped array are views of the rows in order, which no worker touches. Its
published comparison also has a native PNG decoder and native padding, which need a pipeline in its own terms instead of
the user's dataset; here Pillow decodes in every loader.
"""


class Stream:
    """A loader under one of the names, and its epochs.

    Args:
        name: Of ``LOADERS``.
        feed: The workload.
        dataset: Its dataset.
    """

    def __init__(self, name: str, feed: Feed, dataset: Any) -> None:
        given: Any = dataset if name.endswith("-itself") else Plain(dataset)
        kind = name.removesuffix("-itself")
        arguments: dict[str, Any] = {
            "batch_size": feed.batch_size,
            "num_workers": WORKERS,
            "persistent_workers": True,
            "collate_fn": feed.collate,
        }
        if name.endswith("-itself") and not isinstance(dataset, tuple):
            del arguments["collate_fn"]  # hyperloader's own way has none
        if kind == "torch":
            self.loader: Any = TorchLoader(given, **arguments)
        elif kind.startswith("minato"):
            from minato import DataLoader

            threads = {"workers": "thread"} if kind == "minato-threads" else {}
            self.loader = DataLoader(given, **arguments, **threads)
        else:
            import hyperloader

            self.loader = hyperloader.DataLoader(
                given,
                **arguments,
                prefetch_factor=2,
                thread_safe=kind == "hyperloader-threads",
            )

    def epoch(self, expected: list[torch.Tensor]) -> int:
        """Go through one epoch: samples that were lost, repeated, out of place or changed."""
        wrong = number = 0
        for number, batch in enumerate(self.loader, 1):
            found = tensor_of(batch)
            if number > len(expected):
                wrong += len(found)
            elif found.dtype != expected[number - 1].dtype or not torch.equal(
                found, expected[number - 1]
            ):
                wrong += differing(found, expected[number - 1])
        return wrong + sum(len(batch) for batch in expected[number:])


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Samples of a batch that are not as expected; all of them where the shapes differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return len(expected)
    return int((found != expected).reshape(len(expected), -1).any(1).sum())


def trial(name: str, workloads: list[str], seconds: float, batches: int) -> None:
    """In hyperloader's environment: print a reading for each workload."""
    for workload in workloads:
        feed = FEEDS[workload]
        with tempfile.TemporaryDirectory() as folder, unwarned():
            dataset = feed.make(batches * feed.batch_size, Path(folder))
            expected = [
                tensor_of(feed.collate([dataset[i] for i in range(first, first + feed.batch_size)]))
                for first in range(0, len(dataset), feed.batch_size)
            ]
            begun = time.perf_counter()
            stream = Stream(name, feed, dataset)
            wrong = [stream.epoch(expected)]
            first_s = time.perf_counter() - begun
            begun = time.perf_counter()
            while len(wrong) < LEAST_EPOCHS or time.perf_counter() - begun < seconds:
                wrong.append(stream.epoch(expected))
            taken_s = time.perf_counter() - begun
            del stream
        tell(
            {
                "workload": workload,
                "first_s": first_s,
                "rate": (len(wrong) - 1) * len(dataset) / taken_s,
                "wrong": wrong,
                "versions": versions(("hyperloader", "torch", "numpy", "datasets")),
            }
        )


@dataclass
class Cell:
    """The runs of one loader on one workload.

    Attributes:
        rates: Samples per second of the epochs after the first, one for each run.
        first_s: Seconds from before the loader was built to the end of the first epoch.
        wrong: Wrong samples by epoch, of the run with the most.
        failed: Why there is no figure.
    """

    rates: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    failed: str = ""

    def add(self, reading: dict[str, Any]) -> None:
        self.rates.append(reading["rate"])
        self.first_s.append(reading["first_s"])
        if not self.wrong or sum(reading["wrong"]) > sum(self.wrong):
            self.wrong = reading["wrong"]

    def __str__(self) -> str:
        if self.failed:
            return "failed"
        if not self.rates:
            return ""
        rates = Spread.of([rate / 1000 for rate in self.rates])
        return report.spread_text(rates, 2) + (" **wrong**" if sum(self.wrong) else "")


Cells = dict[tuple[str, str], Cell]


def measure(
    python: Path, options: argparse.Namespace, page: report.Page
) -> tuple[Cells, dict[str, str]]:
    """All loaders on all workloads, in turn: the cells by loader and workload, and the versions in use."""
    cells = {(name, row): Cell() for name in options.loaders for row in options.rows}
    found: dict[str, str] = {}
    seconds, batches = (SHORT_SECONDS, SHORT_BATCHES) if options.short else (SECONDS, BATCHES)
    for repeat, name in in_turn(options.loaders, report.repeats_of(options)):
        left = [row for row in options.rows if not cells[name, row].failed]
        while left:
            arguments = ["--trial", name, ",".join(left), str(seconds), str(batches)]
            why = ""
            try:
                readings = run_in(python, "bench.hyperloader", arguments, _TRIAL_S)
            except TrialFailedError as error:
                readings, why = error.readings, str(error)
            for reading in readings:
                cells[name, reading["workload"]].add(reading)
                found.update(reading["versions"])
                page.say(
                    f"{repeat + 1} {name} {reading['workload']}: {reading['rate']:.0f} samples/s, "
                    f"{sum(reading['wrong'])} wrong in {len(reading['wrong'])} epochs"
                )
            left = left[len(readings) :]
            if why and left:
                cells[name, left[0]].failed = why
                page.say(f"{repeat + 1} {name} {left[0]}: {why}")
                left = left[1:]
            elif left:
                raise TrialFailedError(f"{name} gave no reading of {left}")
            else:
                break
    return cells, found


def tables(cells: Cells, rows: list[str], loaders: list[str]) -> str:
    """A table for each group of loaders, and what was wrong or failed."""
    parts = []
    for title, names in GROUPS.items():
        present = [name for name in names if name in loaders]
        if present:
            lines = [
                [row, FEEDS[row].title, *(str(cells[name, row]) for name in present)]
                for row in rows
            ]
            head = ["row", "sample", *(LOADERS[name] for name in present)]
            parts.append(f"## {title}\n\n{report.table(head, lines)}")
    lines = [
        [_full_name(name), row, cell.failed or f"wrong samples by epoch: {cell.wrong[:8]}"]
        for (name, row), cell in cells.items()
        if cell.failed or sum(cell.wrong)
    ]
    bad = report.table(["loader", "row", ""], lines) if lines else "None.\n"
    first = [[row, *(_median(cells[name, row].first_s) for name in loaders)] for row in rows]
    head = ["row", *(_full_name(name) for name in loaders)]
    parts.append(f"## First epoch, with the start of the workers, s\n\n{report.table(head, first)}")
    parts.append(f"## Wrong samples and failures\n\n{bad}")
    return "\n".join(parts)


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


def _full_name(name: str) -> str:
    return LOADERS[name] + (", the dataset itself" if name.endswith("-itself") else "")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    parser = report.parser("bench.hyperloader", __doc__ or "", 2, FEEDS)
    parser.add_argument(
        "--loaders", type=report.names(LOADERS), default=[*LOADERS], help=", ".join(LOADERS)
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        help="hyperloader's wheel, built with maturin from github.com/davidkny22/hyperloader",
    )
    parser.add_argument("--trial", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.trial:
        name, rows, seconds, batches = options.trial
        trial(name, rows.split(","), float(seconds), int(batches))
        return 0
    if options.wheel is None or not options.wheel.is_file():
        parser.error(f"--wheel: {options.wheel} is no file; give hyperloader's wheel")
    page = report.Page("hyperloader", options.out)
    try:
        python = interpreter("hyperloader", REQUIREMENTS, (str(options.wheel.resolve()),))
    except PeerMissingError as error:
        page.say(f"hyperloader could not be installed: {error}")
        return 1
    cells, found = measure(python, options, page)
    page.add(HEAD.format(workers=WORKERS, repeats=report.repeats_of(options)))
    page.add(tables(cells, options.rows, options.loaders))
    page.finish(conditions={f"version of {name}": each for name, each in found.items()})
    return 0


if __name__ == "__main__":
    report.program(main)
