"""Memory, descriptors, threads and processes of long jobs: over many epochs, and over one long epoch."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import psutil
import torch

from bench.growth import memory_used
from bench.harness import report
from bench.harness.environments import call
from minato import DataLoader

ORDERS = ("strict", "batch", "arrival", "fast_first")
METHODS = ("fork", "forkserver")
COUNTS = {"epochs": (2000, 20), "samples": (10_000_000, 100_000)}
"""The second is that of a smoke run."""
EPOCH_SAMPLES, EPOCH_BATCH = 64, 8
LONG_BATCH = 1000
WORKERS = 2
READINGS = 20
WARM_UP = READINGS // 4
"""Readings before the first that counts: by then every page that a job uses again and again has been used."""
_LIMIT_S = 900.0
HEAD = f"""\
# Soak

Written by `python -m bench.soak`. Memory is MiB of the training process and its workers together, each page counted
once (PSS). Mapped files do not count: their share changes with other programs that map them; descriptors and threads
are theirs together. Each line runs in a program of its own, with {WORKERS} workers, and is read {READINGS} times at
equal distances. The first figure is that after a quarter of the run, the second that at its end. Every sample is
counted and summed.
"""
TITLES = {
    "epochs": f"{{count:,}} epochs of {EPOCH_SAMPLES} samples, in batches of {EPOCH_BATCH}; "
    "the workers end with each epoch",
    "samples": f"One epoch of {{count:,}} samples, in batches of {LONG_BATCH}",
}


Numbers: Any = range
"""The dataset."""


def reading() -> dict[str, float]:
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    found = {"mib": memory_used(own, files=False) / 2**20}
    found |= {"descriptors": 0, "threads": 0, "processes": 0}
    for process in processes:
        try:
            found["descriptors"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["processes"] += 1
        except psutil.Error:  # it has ended; a zombie's descriptors are denied to all but root
            continue
    return found


def _loader(count: int, batch_size: int, order: Any, method: str, **more: Any) -> Any:
    given = {"num_workers": WORKERS, "multiprocessing_context": method, **more}
    return DataLoader(Numbers(count), batch_size, order=order, **given)


def many_epochs(order: str, method: str, count: int) -> list[dict[str, float]]:
    """Readings between short epochs, each with workers of its own."""
    loader = _loader(EPOCH_SAMPLES, EPOCH_BATCH, order, method, shuffle=True)
    readings: list[dict[str, float]] = []
    for epoch in range(1, count + 1):
        found = torch.cat(list(loader))
        if sorted(found.tolist()) != list(range(EPOCH_SAMPLES)):
            raise RuntimeError(f"epoch {epoch}: not each sample once")
        if epoch * READINGS // count > len(readings):
            readings.append(reading())
    return readings


def one_long_epoch(order: str, method: str, count: int) -> list[dict[str, float]]:
    """Readings in the middle of an epoch."""
    readings: list[dict[str, float]] = []
    loader, seen, total = _loader(count, LONG_BATCH, order, method), 0, 0
    for batch in loader:
        seen += len(batch)
        total += int(batch.sum())
        # Not at the end, where workers leave.
        if len(readings) < min(seen * (READINGS + 1) // count, READINGS):
            readings.append(reading())
    if (seen, total) != (count, count * (count - 1) // 2):
        raise RuntimeError(f"{seen} samples of {count}, with the sum {total}")
    return readings


RUNS = {"epochs": many_epochs, "samples": one_long_epoch}


def timed(row: str, order: str, method: str, count: int) -> dict[str, Any]:
    begun = time.perf_counter()
    readings = RUNS[row](order, method, count)
    return {"readings": readings, "seconds": time.perf_counter() - begun}


def line(order: str, method: str, found: dict[str, Any]) -> list[str]:
    """One line of a table: what was used at the start and at the end of the readings that count."""
    counted = found["readings"][WARM_UP:]
    memory, *others = (
        f"{counted[0][key]:.{digits}f} → {counted[-1][key]:.{digits}f}"
        for key, digits in (("mib", 1), ("descriptors", 0), ("threads", 0), ("processes", 0))
    )
    most = max(one["mib"] for one in counted)
    return [order, method, memory, f"{most:.1f}", *others, f"{found['seconds']:.0f}"]


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("soak", __doc__, 1, rows=RUNS).parse_args(arguments)
    page = report.Page("soak", options.out)
    page.add(HEAD)
    for row in options.rows:
        count = COUNTS[row][options.short]
        lines = []
        for order, method in product(ORDERS, METHODS):
            case = row, order, method, count
            lines.append(line(order, method, call("bench.soak:timed", *case, limit_s=_LIMIT_S)))
            page.say(f"{row}: {', '.join(lines[-1])}")
        head = ["order", "start method", "memory, MiB", "most, MiB", "descriptors", "threads"]
        title = TITLES[row].format(count=count)
        page.add(f"## {title}\n", report.table([*head, "processes", "s"], lines))
    page.finish()


if __name__ == "__main__":
    report.program(main)
