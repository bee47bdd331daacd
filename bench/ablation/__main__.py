"""Command line of the ablation; see ``python -m bench.ablation --help``."""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader as TorchLoader

from bench import record
from bench.ablation.work import LOADS, PHOTOGRAPHS, Load, real_loads
from minato import DataLoader
from minato.chain.chain import Chain
from minato.plan import Plan


@dataclass(frozen=True)
class Step:
    """One configuration: everything of the one before it, and one mechanism more.

    Args:
        label: what the report calls it.
        options: arguments of the loader; None: torch's.
        defers: whether slow samples are deferred.
        early: whether samples that were slow before start early.
        more: workers besides the load's own.
        foretold: whether the order of the next epoch is known, so that it begins in the one before it.
    """

    label: str
    options: dict[str, Any] | None
    defers: bool = False
    early: bool = False
    more: int = 0
    foretold: bool = True


MORE = 2
MOST = 16
ARRIVAL: dict[str, Any] = {"in_order": False}
FAST_FIRST: dict[str, Any] = {**ARRIVAL, "order": "fast_first"}
STEPS = (
    Step("torch, in order", None),
    Step("sample-level tickets, torch's look-ahead", {"prefetch_factor": 2}),
    Step("+ window in bytes", {}),
    Step("+ early start (still in order)", {}, early=True),
    Step("+ window in bytes, arrival order", ARRIVAL),
    Step("+ deferral", ARRIVAL, defers=True),
    Step(f"the same with {MORE} workers more", ARRIVAL, defers=True, more=MORE),
    Step("+ early start", ARRIVAL, defers=True, early=True),
    Step("+ controller", {**ARRIVAL, "max_workers": MOST}, defers=True, early=True),
    Step("fast_first instead of arrival, no controller", FAST_FIRST, True, True),
)


@dataclass(frozen=True)
class Reading:
    """What one run of all epochs took.

    Args:
        epoch_s: mean time of an epoch, start of the workers included.
        waiting_s: time of an epoch that the consumer waited.
        p99_wait_ms: 99th percentile of the waits for one batch.
        first_ms: wait for the very first batch.
    """

    epoch_s: float
    waiting_s: float
    p99_wait_ms: float
    first_ms: float


class Composed:
    """torch's way to have transforms: inside the dataset."""

    def __init__(self, dataset: Any, chain: tuple[Callable[[Any], Any], ...]) -> None:
        self.dataset = dataset
        self.run = Chain(chain).run

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.run(self.dataset[index])


@contextmanager
def only(step: Step) -> Iterator[None]:
    """Switch mechanisms off that a configuration does not have."""

    def unless(on: bool, name: str) -> property:
        getter = getattr(Plan, name).fget
        return property(lambda plan: on and getter(plan))

    with (
        mock.patch.object(Plan, "defers", unless(step.defers, "defers")),
        mock.patch.object(Plan, "starts_early", unless(step.early, "starts_early")),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def run(load: Load, step: Step, seed: int) -> Reading:
    """All epochs of one load by one configuration; every sample must come once in each."""
    shared: dict[str, Any] = {
        "batch_size": load.batch_size,
        "num_workers": load.workers + step.more,
        "persistent_workers": True,
    }
    dataset, waits_s = load.make(), []
    shared["shuffle"] = True
    torch.manual_seed(seed)
    begun = perf_counter()
    with only(step):
        loader: Any
        if step.options is None:
            loader = TorchLoader(Composed(dataset, load.chain), **shared)
        else:
            shared["seed"] = seed if step.foretold else None
            loader = DataLoader(dataset, transforms=list(load.chain), **shared, **step.options)
        for _ in range(load.epochs):
            labels: list[int] = []
            asked = perf_counter()
            for batch in loader:
                waits_s.append(perf_counter() - asked)
                labels += batch[1].tolist()
                if load.pause_s:
                    sleep(load.pause_s)
                asked = perf_counter()
            if sorted(labels) != list(range(len(dataset))):
                raise AssertionError(f"{step.label} lost or repeated samples of {load.name}")
    whole_s = perf_counter() - begun
    del loader
    return Reading(
        whole_s / load.epochs,
        sum(waits_s) / load.epochs,
        1e3 * sorted(waits_s)[int(0.99 * len(waits_s))],
        1e3 * waits_s[0],
    )


def bounds(load: Load) -> str:
    """What no scheduler can beat with so many workers, as a sentence, where the work is known."""
    costs_s = getattr(load.make(), "costs_s", None)
    if costs_s is None:
        return ""
    few, many = load.workers, load.workers + MORE
    whole_s = sum(costs_s)
    return (
        f" An epoch takes {few} workers {whole_s / few:.3f} s at least, and {many} workers "
        f"{whole_s / many:.3f} s."
    )


def table(readings: dict[str, list[Reading]]) -> str:
    """The figures of one load, as Markdown."""

    def middle(label: str, name: str) -> float:
        return statistics.median(getattr(reading, name) for reading in readings[label])

    rival = STEPS[0].label
    lines = ["| | s per epoch | speed, × torch | waiting, s per epoch | less waiting, × torch |"]
    lines[0] += " p99 wait, ms | first batch, ms |"
    lines.append("|---|---|---|---|---|---|---|")
    for label in readings:
        epoch_s, waiting_s = middle(label, "epoch_s"), middle(label, "waiting_s")
        spread = [reading.epoch_s for reading in readings[label]]
        lines.append(
            f"| {label} | {epoch_s:.3f} ({min(spread):.3f}–{max(spread):.3f}) "
            f"| {middle(rival, 'epoch_s') / epoch_s:.2f} | {waiting_s:.3f} "
            f"| {middle(rival, 'waiting_s') / waiting_s:.2f} "
            f"| {middle(label, 'p99_wait_ms'):.0f} | {middle(label, 'first_ms'):.0f} |"
        )
    return "\n".join(lines) + "\n"


HEAD = """# Ablation

Written by `python -m bench.ablation`. Each line adds one mechanism against slow samples to those above it, with the
same number of workers, but for two lines: one has {more} workers more, which those after it do not keep; the controller
begins with the load's number of workers and may use up to {most}. Figures are medians of {repeats} runs, with the least
and the greatest time of an epoch in brackets; start of the workers included. Starting slow samples
early can only help from the second epoch on, when costs are known.

Waiting is the time that the loop waited for batches. Where the loop itself does nothing, it waits all the time, and
only the time of an epoch says something.

"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    loads = (*LOADS, *real_loads())
    names = ",".join(load.name for load in loads)
    parser.add_argument("--loads", default=names, metavar="NAME,…")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER")
    options = parser.parse_args(arguments)
    conditions = record.environment()
    parts = [HEAD.format(repeats=options.repeats, more=MORE, most=MOST)]
    if all(load.name != PHOTOGRAPHS for load in loads):
        print(f"no {PHOTOGRAPHS}: 'make data' fetches them", file=sys.stderr)
    for load in (load for load in loads if load.name in options.loads.split(",")):
        readings: dict[str, list[Reading]] = {step.label: [] for step in STEPS}
        for repeat in range(options.repeats):
            for step in STEPS[repeat % len(STEPS) :] + STEPS[: repeat % len(STEPS)]:
                readings[step.label].append(run(load, step, repeat))
        parts.append(
            f"## {load.name}\n\n{load.title}; {load.epochs} epochs.{bounds(load)}\n\n{table(readings)}\n"
        )
        print(parts[-1], flush=True)
    conditions["load average after"] = record.load_average()
    parts.append("## Conditions\n\n| | |\n|---|---|\n")
    parts += [f"| {name} | {value} |\n" for name, value in conditions.items()]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "ablation.md").write_text("".join(parts))
        print(f"written: {options.out}/ablation.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
