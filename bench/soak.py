"""Long runs: does memory, or the number of descriptors, threads or processes, grow with epochs or with samples?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import psutil
from torch.utils.data import Dataset

from bench.growth import memory_used
from bench.harness import record, report
from bench.harness.loaders import FEW_CORES
from bench.harness.trial import WrongDeliveryError

WORKERS = 2
METHODS = ("fork", "forkserver")
ORDERS = ("strict", "batch", "arrival", "fast_first")
LOOKS = 60
"""How often a run is looked at."""
WARM_UP = 0.25
"""The share of the looks that do not count."""
_LIMIT_S = 1800.0
HEAD = """\
# Long runs

Written by `python -m bench.soak`.

Each line is a program of its own with {workers} workers, which checks that each sample comes once in each epoch. At
{looks} moments, evenly spread over the run and in the middle of an epoch, it looks at the training process and all
processes below it: their memory, each page counted once, without mapped files; their open descriptors, threads and
number. The first quarter is warm-up and does not count. *Early* and *late* are medians of the first and of the last
third of what remains; the growth is their difference divided by the work between them.
"""


@dataclass(frozen=True)
class Workload:
    """What is repeated.

    Args:
        title: what the page says of it.
        epochs: how many there are.
        samples: of one epoch.
        batch_size: samples of a batch.
        stay: whether the workers of one epoch serve the next.
        unit: work that growth is given for, in epochs where there are several, else in samples.
    """

    title: str
    epochs: int
    samples: int
    batch_size: int
    stay: bool
    unit: int

    @property
    def work(self) -> int:
        """All work of a run: epochs, or the samples of its only one."""
        return self.epochs if self.epochs > 1 else self.samples


WORKLOADS = {
    "epochs": Workload("2,000 epochs of 128 samples", 2000, 128, 16, False, 1000),
    "staying": Workload(
        "2,000 epochs of 128 samples, `persistent_workers=True`", 2000, 128, 16, True, 1000
    ),
    "samples": Workload("one epoch of 10,000,000 samples", 1, 10_000_000, 1000, False, 1_000_000),
}
SHORT = {
    "epochs": Workload("30 epochs of 128 samples", 30, 128, 16, False, 1000),
    "samples": Workload("one epoch of 200,000 samples", 1, 200_000, 1000, False, 1_000_000),
}


class Numbers(Dataset[int]):
    """Sample ``i`` is ``i``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


@dataclass(frozen=True)
class Look:
    """What the processes of a loader held at one moment.

    Args:
        work: epochs or samples so far.
        mib: memory of all processes in MiB, each page counted once, without mapped files.
        descriptors: open in all processes.
        threads: of all processes.
        processes: the training process and all below it.
    """

    work: int
    mib: float
    descriptors: int
    threads: int
    processes: int


COUNTS = ("descriptors", "threads", "processes")


def look(work: int) -> Look:
    """Look at this process and all below it."""
    this = psutil.Process()
    descriptors = threads = processes = 0
    for one in (this, *this.children(recursive=True)):
        try:
            held = one.num_fds(), one.num_threads()
        except psutil.Error:  # it has just ended
            continue
        descriptors, threads = descriptors + held[0], threads + held[1]
        processes += 1
    return Look(work, memory_used(this, files=False) / 2**20, descriptors, threads, processes)


def soak(workload: Workload, method: str, order: str) -> list[Look]:
    """Run a workload once; returns what was seen on the way.

    Raises:
        WrongDeliveryError: A sample did not come exactly once in an epoch.
    """
    from minato import DataLoader

    loader = DataLoader(
        Numbers(workload.samples),
        workload.batch_size,
        num_workers=WORKERS,
        persistent_workers=workload.stay,
        multiprocessing_context=method,
        order=order,
    )
    every = max(workload.work // LOOKS, 1)
    marks = iter(range(every, workload.work + 1, every))
    mark = next(marks)
    looks = []
    missing = np.ones(workload.samples, dtype=bool)  # written now, so that it does not grow
    for epoch in range(1, workload.epochs + 1):
        missing[:] = True
        count = 0
        for batch in loader:
            middle = count <= workload.samples // 2 < count + len(batch)
            count += len(batch)
            missing[batch.numpy()] = False
            work = epoch if workload.epochs > 1 else count
            if work >= mark and (workload.epochs == 1 or middle):
                looks.append(look(work))
                mark = next((one for one in marks if one > work), workload.work + 1)
        if count != workload.samples or missing.any():
            raise WrongDeliveryError(f"{method}, {order}, epoch {epoch}: not each sample once")
    return looks


@dataclass(frozen=True)
class Change:
    """How one quantity changed after the warm-up.

    Args:
        early: its median in the first third.
        late: its median in the last third.
        growth: per unit of work.
    """

    early: float
    late: float
    growth: float


def change(looks: Sequence[Look], quantity: str, unit: int) -> Change:
    """How a quantity changed, for each ``unit`` of work.

    Raises:
        ValueError: There are fewer than four looks.
    """
    if len(looks) < 4:
        raise ValueError(f"{len(looks)} looks show no change: at least 4 do")
    counted = looks[int(WARM_UP * len(looks)) :]
    third = max(len(counted) // 3, 1)
    first, last = counted[:third], counted[-third:]
    early, late = (median(float(getattr(one, quantity)) for one in part) for part in (first, last))
    distance = median(one.work for one in last) - median(one.work for one in first)
    return Change(early, late, (late - early) / distance * unit)


def fresh(kind: str, short: bool, method: str, order: str) -> tuple[list[Look], float]:
    """Run a workload in a process of its own; returns what was seen, and the seconds."""
    form = "short" if short else "full"
    begun = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--fresh", form, kind, method, order],
        cwd=record.ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if ended.returncode:
        raise RuntimeError(f"{kind}, {method}, {order} failed:\n{ended.stderr}")
    looks = [Look(**one) for one in json.loads(ended.stdout.splitlines()[-1])]
    return looks, time.perf_counter() - begun


def cases(kinds: Sequence[str], short: bool) -> Iterator[tuple[str, str, str]]:
    """Workload, start method and order of each line; a smoke run has a line for each workload."""
    for kind in kinds:
        if short:
            yield kind, "fork", "strict" if kind == "epochs" else "arrival"
        else:
            yield from ((kind, method, order) for method in METHODS for order in ORDERS)


def line(looks: Sequence[Look], unit: int) -> tuple[list[str], list[str]]:
    """The cells of a run, and which of its counts grew."""
    memory = change(looks, "mib", unit)
    changes = {name: change(looks, name, unit) for name in COUNTS}
    cells = [f"{memory.early:.1f}", f"{memory.late:.1f}", f"{memory.growth:+.2f}"]
    cells += [f"{one.early:.0f} → {one.late:.0f}" for one in changes.values()]
    return cells, [name for name, one in changes.items() if one.late > one.early]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 if the number of anything grew."""
    parser = report.parser("bench.soak", __doc__ or "", 1, WORKLOADS)
    parser.add_argument("--fresh", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=FEW_CORES)
    if options.fresh:
        form, kind, method, order = options.fresh
        workload = (SHORT if form == "short" else WORKLOADS)[kind]
        print(json.dumps([asdict(one) for one in soak(workload, method, order)]))
        return 0
    known = SHORT if options.short else WORKLOADS
    page = report.Page("soak", options.out or (None if options.short else record.PAGES))
    page.add(HEAD.format(workers=WORKERS, looks=LOOKS))
    grown: list[str] = []
    for kind in (one for one in options.rows if one in known):
        workload = known[kind]
        lines: list[list[str]] = []
        for _, method, order in cases([kind], options.short):
            looks, seconds = fresh(kind, options.short, method, order)
            cells, names = line(looks, workload.unit)
            grown += [f"{kind}, {method}, {order}: {name}" for name in names]
            lines.append([method, f"`{order}`", *cells, f"{seconds:.0f}"])
            page.say(f"{kind}: {' | '.join(lines[-1])}")
        of = "epochs" if workload.epochs > 1 else "samples"
        head = ["start method", "order", "MiB, early", "late", f"growth per {workload.unit:,} {of}"]
        head += [*COUNTS, "s"]
        page.add(f"## {workload.title[:1].upper()}{workload.title[1:]}\n", report.table(head, lines))
    page.add(
        "Grown: " + "; ".join(grown) + ".\n"
        if grown
        else "In no line did the number of descriptors, threads or processes grow.\n"
    )
    page.finish()
    return 1 if grown else 0


if __name__ == "__main__":
    report.program(main)
