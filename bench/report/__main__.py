"""Command line of the measurements; see ``python -m bench.report --help``."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench import record
from bench.report.works import Costly, Work, works
from minato import DataLoader
from minato._machine import available_cores
from minato.report.verdict import Verdict

REPEATS = 5
_COST_BATCHES = 20_000
_LEAST_PART = 0.5
"""Of the predicted gain, following the advice must bring so much."""


def run(work: Work, **changes: Any) -> tuple[float, Verdict]:
    """Seconds that a workload takes, and the verdict."""
    loader = DataLoader(**(work.arguments | changes))
    begun_s = time.perf_counter()
    for _ in range(work.epochs):
        for _ in loader:
            time.sleep(work.step_s)
    return time.perf_counter() - begun_s, loader.report().verdict


def advise(work: Work, repeats: int) -> tuple[str, bool]:
    """The row of a workload, and whether its verdict was right and its advice good."""
    before_s, after_s, gains, limits = [], [], [], []
    for _ in range(repeats):
        taken_s, verdict = run(work)
        before_s.append(taken_s)
        gains.append(verdict.gain)
        limits.append(verdict.limit)
        if verdict.limit == "step":
            after_s.append(taken_s / verdict.gain)
            continue
        after_s.append(run(work, **(work.mended or verdict.change or {}))[0])
    got = statistics.median(one / other for one, other in zip(before_s, after_s, strict=True))
    predicted = statistics.median(gains)
    good = all(limit == work.name for limit in limits) and got - 1 >= _LEAST_PART * (predicted - 1)
    row = (
        f"| {work.name} | {', '.join(sorted(set(limits)))} | {verdict.advice} | {predicted:.2f} | "
        f"{'–' if verdict.limit == 'step' else f'{got:.2f}'} | {'yes' if good else '**no**'} |"
    )
    return row, good


def cost(num_workers: int, num_transforms: int, batches: int, repeats: int) -> str:
    """The row of what measuring, tracing and showing cost, by loaders that do nothing else, in turn."""
    data = _Cheap(32 * batches)
    with tempfile.TemporaryDirectory() as folder, _terminal():
        kinds: tuple[dict[str, Any], ...] = (
            {"measure": False},
            {},
            {"trace": f"{folder}/run.json"},
            {},
        )
        times: list[list[float]] = [[] for _ in kinds]
        for _, (kind, given) in itertools.product(range(repeats), enumerate(kinds)):
            loader = DataLoader(
                data, 32, num_workers=num_workers, transforms=[_same] * num_transforms, **given
            )
            with loader.live() if kind == 3 else contextlib.nullcontext():
                begun_s = time.perf_counter()
                for _ in loader:
                    pass
                times[kind].append((time.perf_counter() - begun_s) / batches)
    without, measured, traced, live = (1e6 * min(each) for each in times)
    return (
        f"| {num_workers} | {num_transforms} | {without:.1f} | {measured:.1f} | {measured - without:+.1f} | "
        f"{traced:.1f} | {traced - measured:+.1f} | {live:.1f} | {live - measured:+.1f} |"
    )


def _same(sample: Any) -> Any:
    return sample


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Let standard error be a terminal that somebody reads."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    os.environ["TERM"] = "xterm"
    away = subprocess.DEVNULL
    with (
        os.fdopen(slave, "w", buffering=1) as stream,
        subprocess.Popen(["cat"], stdin=master, stdout=away, stderr=away) as reader,
        contextlib.redirect_stderr(stream),
    ):
        yield
        reader.kill()
    os.close(master)


class _Cheap(Costly):
    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return _VECTOR


_VECTOR = np.zeros(16, np.float32)


def advices(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The page about the advice, and whether all of it was good."""
    repeats = 1 if options.short else options.repeats
    lines = [
        "# The report",
        "",
        "Written by `python -m bench.report --out docs/benchmarks`. Each workload is built to have one bottleneck. The",
        "gain is how many times as fast it runs when the advice is followed, predicted and measured: medians of",
        f"{repeats} runs. An advice is good if it brings half of what it promises.",
        "",
        "| bottleneck | verdict | advice | predicted | measured | good |",
        "|---|---|---|---|---|---|",
    ]
    good = True
    for work in works(int(available_cores())):
        if options.only in (None, work.name):
            row, right = advise(work, repeats)
            good = good and right
            lines.append(row)
            print(row, flush=True)
    return lines, good


def costs(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The page about what measuring costs."""
    repeats, batches = (1, 50) if options.short else (4 * options.repeats, _COST_BATCHES)
    lines = [
        "# What the report costs",
        "",
        "Written by `python -m bench.report --only cost --out docs/benchmarks`. Batches of 32 vectors of 16 numbers",
        f"that are all there already, in µs per batch: the best of {repeats} runs of {batches} batches with",
        "`measure=False`, of as many with the default `measure=True`, of as many with `trace=` too, and of as many",
        "with a live view on a terminal, in turn. The trace of a batch tells of 32 samples, each with its transforms,",
        "which do nothing.",
        "",
        "| workers | transforms | without | with | more | with `trace=` | more | live | more |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for num_workers, num_transforms in ((0, 0), (0, 3), (2, 0)):
        lines.append(cost(num_workers, num_transforms, batches, repeats))
        print(lines[-1], flush=True)
    return lines, True


def main(arguments: list[str] | None = None) -> int:
    about = "Measure what the report costs, and whether following its advice helps."
    parser = record.options_of("bench.report", about, REPEATS)
    parser.add_argument("--only", metavar="NAME", help="one workload, or: cost")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    conditions = record.environment()
    lines, good = (costs if options.only == "cost" else advices)(options)
    name = "report-cost.md" if options.only == "cost" else "report.md"
    record.finish(lines, conditions, options.out and options.out / name)
    return 0 if good or options.short else 1


if __name__ == "__main__":
    sys.exit(main())
