"""Command line of the benchmark; see ``python -m bench.profiler --help``."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench import record
from bench.profiler.work import LOADS, Load, bytes_per_us
from minato import DataLoader
from minato.engine import Engine
from minato.scheduler import worker
from minato.scheduler.runner import Runner
from minato.scheduler.usage import process_usage

ROUNDS, PAIRS = 12, 20
BATCH_SIZE = 32
RESAMPLES = 1000


@contextmanager
def unmeasured() -> Iterator[None]:
    """Workers that start here record nothing of what their samples cost, and their consumer looks at nothing of it."""

    def run_steps(
        runner: Runner, position: int, epoch: int, keys: list[Any], plain: Any, slow_ns: int
    ) -> Any:
        return runner.run(position, epoch, keys, plain)

    def nothing(*_: Any) -> None:
        pass

    with (
        mock.patch.object(Runner, "run_steps", run_steps),
        mock.patch.object(Runner, "_record", nothing),
        mock.patch.object(worker, "_WORTH_NOTING_NS", float("inf")),
        mock.patch.object(Engine, "_mark_slow", nothing),
    ):
        yield


class Measured:
    """A loader with one worker that stays, and the processor time that its epochs take."""

    def __init__(self, load: Load, speed: float) -> None:
        dataset, transforms = load.make(speed)
        self.samples = load.samples
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            BATCH_SIZE,
            shuffle=True,  # by an order that is not known before, so that no epoch begins in the one before it
            num_workers=1,
            transforms=transforms,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        others = {child.pid for child in multiprocessing.active_children()}
        self.epoch_ns()
        children = {child.pid for child in multiprocessing.active_children()}
        self.pids = [pid for pid in children - others if pid is not None]

    def epoch_ns(self) -> int:
        """Processor time of an epoch: the worker's and that of this process."""
        begun_ns = self._used_ns()
        count = sum(len(batch) for batch in self.loader)
        if count != self.samples:
            raise RuntimeError(f"{count} samples came, not {self.samples}")
        return self._used_ns() - begun_ns

    def _used_ns(self) -> int:
        return time.process_time_ns() + process_usage(getattr(self, "pids", ())).ran_ns


def compare(load: Load, rounds: int, pairs: int, speed: float) -> str:
    """The row of the report, after epochs with and without the profiler in turn."""
    added: list[float] = []
    bare_ns: list[int] = []
    for _ in range(rounds):
        # Where its memory lies makes one process quicker than another by more than what is looked for.
        usual = Measured(load, speed)
        with unmeasured():
            bare = Measured(load, speed)
        shares = []
        for pair in range(pairs):
            first_ns = usual.epoch_ns() if pair % 2 else 0
            with unmeasured():
                bare_ns.append(bare.epoch_ns())
            shares.append(100 * ((first_ns or usual.epoch_ns()) / bare_ns[-1] - 1))
        added.append(statistics.median(shares))
    least, most = interval(added)
    return (
        f"| {load.cost_us:g} | {load.steps} | {statistics.median(bare_ns) / 1e3 / load.samples:.1f} "
        f"| {statistics.fmean(added):+.2f} % | {least:+.2f} % to {most:+.2f} % |"
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean, by resampling."""
    draw = random.Random(0)
    found = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.profiler",
        description="Compare loading with and without measuring what samples cost.",
    )
    parser.add_argument("--short", action="store_true", help="a smoke run: too short to judge by")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write profiler.md there")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    conditions = record.environment()
    rounds, pairs = (1, 2) if options.short else (options.rounds, PAIRS)
    speed = bytes_per_us()
    lines = [
        "# What measuring costs",
        "",
        "Written by `python -m bench.profiler --out docs/benchmarks`. One worker process loads the same samples with",
        "and without its measurements (histograms of the whole, the dataset, each transform, bytes and processor time,",
        f"and what is made of them), in turn: {rounds} pairs of processes, {pairs} epochs of each. The figure is the",
        "processor time of worker and training process together: it says what is spent, while the time on the clock",
        "would say who else used the machine. What measuring adds is the median over the epochs of a pair, then the",
        "mean over the pairs, with the 95 % interval of that mean by resampling.",
        "",
        "| cost of a sample, µs | transforms | processor time per sample, µs | measuring adds | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for load in LOADS:
        lines.append(compare(load, rounds, pairs, speed))
        print(lines[-1], flush=True)
    record.finish(lines, conditions, options.out and options.out / "profiler.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
