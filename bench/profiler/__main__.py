"""Command line of the benchmark; see ``python -m bench.profiler --help``."""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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

ROUNDS, PAIRS = 12, 40
BATCH_SIZE = 32
RESAMPLES = 1000
NEVER_NS = 1 << 62
WARM_UPS = 3


@contextmanager
def switchable() -> Iterator[mmap.mmap]:
    """Let a byte that all processes share say whether a worker measures its samples, and its consumer uses that.

    One loader can then do both in turn: two of them would differ by more than what is looked for, since where its
    memory lies makes one process quicker than another.
    """
    measures = mmap.mmap(-1, 1)
    run_steps, note, mark_slow = Runner.run_steps, Runner._record, Engine._mark_slow
    worth_noting_ns = worker._WORTH_NOTING_NS

    def run(
        runner: Runner, position: int, epoch: int, keys: list[Any], plain: Any, slow_ns: int
    ) -> Any:
        if measures[0]:
            worker._WORTH_NOTING_NS = worth_noting_ns
            return run_steps(runner, position, epoch, keys, plain, slow_ns)
        worker._WORTH_NOTING_NS = NEVER_NS
        runner.longest_ns = 0
        return runner.run(position, epoch, keys, plain)

    def unless_off(method: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: Any) -> None:
            if measures[0]:
                method(*arguments)

        return called

    with (
        mock.patch.object(Runner, "run_steps", run),
        mock.patch.object(Runner, "_record", unless_off(note)),
        mock.patch.object(Engine, "_mark_slow", unless_off(mark_slow)),
    ):
        yield measures


class Measured:
    """A loader with one worker that stays, and the processor time that its epochs take.

    Args:
        measures: The switch of ``switchable``.
    """

    def __init__(self, load: Load, speed: float, measures: mmap.mmap) -> None:
        dataset, transforms = load.make(speed)
        self.samples = load.samples
        self._measures = measures
        self._slow_ns = 0
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
        for _ in range(WARM_UPS):
            self.epoch_ns(True)
        children = {child.pid for child in multiprocessing.active_children()}
        self.pids = [pid for pid in children - others if pid is not None]

    @property
    def watches(self) -> bool:
        """Whether costs differ so much that the samples of the latest measured epoch were watched for slow ones."""
        return self._slow_ns > 0

    def epoch_ns(self, measured: bool) -> int:
        """Processor time of an epoch: the worker's and that of this process."""
        self._measures[0] = measured
        engine = self.loader._experience.engine()
        if engine is not None:
            engine.ledger.slow_ns = self._slow_ns if measured else 0
        begun_ns = self._used_ns()
        count = sum(len(batch) for batch in self.loader)
        used_ns = self._used_ns() - begun_ns
        if count != self.samples:
            raise RuntimeError(f"{count} samples came, not {self.samples}")
        if engine is not None and measured:
            self._slow_ns = engine.ledger.slow_ns
        return used_ns

    def _used_ns(self) -> int:
        return time.process_time_ns() + process_usage(getattr(self, "pids", ())).ran_ns


def compare(load: Load, rounds: int, pairs: int, speed: float) -> str:
    """The row of the report, after epochs with and without the profiler in turn."""
    added: list[float] = []
    bare_ns: list[int] = []
    watched = 0
    for _ in range(rounds):
        shares = []
        with switchable() as measures:
            loader = Measured(load, speed, measures)
            for pair in range(pairs):
                first, second = bool(pair % 2), not pair % 2
                used_ns = {first: loader.epoch_ns(first), second: loader.epoch_ns(second)}
                bare_ns.append(used_ns[False])
                shares.append(used_ns[True] / used_ns[False] - 1)
                watched += loader.watches
        added.append(100 * statistics.median(shares))
    least, most = interval(added)
    bare_us, mean = statistics.median(bare_ns) / 1e3 / load.samples, statistics.fmean(added)
    return (
        f"| {load.cost_us:g} | {load.steps} | {bare_us:.1f} | {bare_us * mean / 100:+.2f} | {mean:+.2f} % "
        f"| {least:+.2f} % to {most:+.2f} % | {100 * watched / (rounds * pairs):.0f} % |"
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
        f"and what is made of them), epoch by epoch in turn: {pairs} epochs of each in {rounds} processes one",
        "after the other. The figure is the processor time of worker and training process together: it says what is",
        "spent, while the time on the clock would say who else used the machine. What measuring adds is the median",
        "over the pairs of epochs of a process, then the mean over the processes, with the 95 % interval of that mean",
        "by resampling. Where other programs interrupt the worker, samples seem to differ in cost, and what each one",
        "has cost is learned: the last column has the share of the epochs in which it was.",
        "",
        "| cost of a sample, µs | transforms | processor time per sample, µs | measuring adds, µs | measuring adds "
        "| 95 % interval | watched |",
        "|---|---|---|---|---|---|---|",
    ]
    for load in LOADS:
        lines.append(compare(load, rounds, pairs, speed))
        print(lines[-1], flush=True)
    record.finish(lines, conditions, options.out and options.out / "profiler.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
