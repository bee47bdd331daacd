"""Command line of the measurements; see ``python -m bench.report --help``."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.report.works import Costly, Work, works
from minato import DataLoader
from minato._machine import available_cores
from minato.report.verdict import Verdict

REPEATS = 5
_COST_BATCHES = 4000
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


def cost(num_workers: int, batches: int, repeats: int) -> str:
    """The row of what measuring costs, by loaders that do nothing else, in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    data = _Cheap(32 * batches)
    for _, measure in itertools.product(range(repeats), (True, False)):
        loader = DataLoader(data, 32, num_workers=num_workers, measure=measure)
        begun_s = time.perf_counter()
        for _ in loader:
            pass
        times[measure].append((time.perf_counter() - begun_s) / batches)
    ratios = [one / other - 1 for one, other in zip(times[True], times[False], strict=True)]
    return (
        f"| {num_workers} | {1e6 * statistics.median(times[False]):.1f} | "
        f"{1e6 * statistics.median(times[True]):.1f} | {100 * statistics.median(ratios):+.1f} % "
        f"({100 * min(ratios):+.1f} … {100 * max(ratios):+.1f}) |"
    )


class _Cheap(Costly):
    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return _VECTOR


_VECTOR = np.zeros(16, np.float32)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description="Measure what the report costs, and whether following its advice helps.",
    )
    parser.add_argument("--short", action="store_true", help="a smoke run: too short to judge by")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N")
    parser.add_argument("--only", metavar="NAME", help="one workload")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write report.md there")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    conditions = record.environment()
    repeats, batches = (1, 50) if options.short else (options.repeats, _COST_BATCHES)
    chosen = [work for work in works(int(available_cores())) if options.only in (None, work.name)]
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
    print("\n".join(lines[-2:]))
    good = True
    for work in chosen:
        row, right = advise(work, repeats)
        good = good and right
        lines.append(row)
        print(row, flush=True)
    lines += [
        "",
        "What measuring costs, with batches of 32 vectors of 16 numbers that are all there already, in µs per batch:",
        "",
        "| workers | without | with | more |",
        "|---|---|---|---|",
    ]
    for num_workers in () if options.only else (0, 2):
        lines.append(cost(num_workers, batches, repeats))
        print(lines[-1], flush=True)
    conditions["load average after"] = record.load_average()
    lines += ["", "|  |  |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in conditions.items()]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.md").write_text("\n".join(lines) + "\n")
        print(f"written: {options.out}/report.md")
    return 0 if good or options.short else 1


if __name__ == "__main__":
    sys.exit(main())
