"""Bytes per second over time on the real workloads: figure 7."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bench import record
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.costs import SCALE, Workload, measured, workloads
from bench.papers.page import COLOURS, Section, Settings
from bench.papers.trial import LOADERS, Run, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLEEPERS = 6
WORK_S = 2.5
"""The least time of an epoch: it has as many samples as that takes."""
_INTERVALS = 40
_TEXT = """\
Whole epochs of the real chains on the real data, start of the workers included: {workers} workers where samples need
processors, {sleepers} for speech, whose light and heavy steps sleep for {scale} of the paper's time. The loop sleeps
for each batch as long as the workers need for one in the mean, which stands for a training step on a GPU and is
where order matters most. *Bound*: the longer of all work divided by workers, and all that needs a processor divided
by cores, as measured beforehand. *Waited*: share of the time that the loop waited.
"""


class Work(NamedTuple):
    """A workload, and an epoch of it."""

    workload: Workload
    workers: int
    order: list[int]
    step_s: float
    bound_s: float


def work_of(workload: Workload, settings: Settings) -> Work:
    """An epoch that keeps the workers busy for a while, and a loop that is as fast as they are."""
    one = measured(workload.name, settings)
    cores = record.usable_cores()
    workers = SLEEPERS if workload.sleeps else cores
    each_s = max(one.costs_at(SCALE).mean() / workers, one.costs_at(0.0).mean() / cores)
    count = 2 * workload.batch_size if settings.short else int(WORK_S / each_s)
    count = max(1, count // workload.batch_size) * workload.batch_size
    workload.dataset.length = count
    order = np.random.default_rng(0).permutation(count).tolist()
    step_s = float(each_s) * workload.batch_size
    return Work(workload, workers, order, step_s, float(each_s) * count)


def run(settings: Settings) -> Section:
    """Time each loader on each workload, in turn."""
    rows = []
    last: dict[str, dict[str, Run]] = {}
    for name, workload in workloads(settings).items():
        usual_length = workload.dataset.length
        work = work_of(workload, settings)
        found: dict[str, list[Run]] = {loader: [] for loader in LOADERS}
        for repeat in range(settings.repeats):
            turn = repeat % len(LOADERS)
            for loader in [*LOADERS][turn:] + [*LOADERS][:turn]:
                found[loader].append(_timed(loader, work))
        workload.dataset.length = usual_length
        rows += [
            [name, *_row(loader, runs, work, found["torch"])] for loader, runs in found.items()
        ]
        last[name] = {loader: runs[-1] for loader, runs in found.items()}
    head = ["workload", "loader", "s", "of the bound", "× torch", "MB/s", "waited"]
    text = _TEXT.format(workers=record.usable_cores(), sleepers=SLEEPERS, scale=f"{SCALE:g}")
    panels = tuple(_over_time(name, runs) for name, runs in last.items())
    return Section("Throughput over time (figure 7)", f"{text}\n{table(head, rows)}", panels)


def _timed(loader: str, work: Work) -> Run:
    return timed(
        loader,
        work.workload.dataset,
        work.workload.chain,
        work.order,
        work.step_s,
        batch_size=work.workload.batch_size,
        num_workers=work.workers,
        collate_fn=work.workload.collate,
    )


def _row(loader: str, runs: list[Run], work: Work, torch_runs: list[Run]) -> list[str]:
    ratios = [theirs.whole_s / ours.whole_s for theirs, ours in zip(torch_runs, runs, strict=True)]
    megabytes = sum(size for _, size in runs[0].arrivals) / 1e6
    return [
        loader,
        spread_text(Spread.of([one.whole_s for one in runs]), 2),
        f"{work.bound_s / statistics.median(one.whole_s for one in runs):.2f}",
        spread_text(Spread.of(ratios), 2),
        f"{megabytes / statistics.median(one.whole_s for one in runs):.0f}",
        f"{100 * statistics.median(one.waited for one in runs):.0f} %",
    ]


def _over_time(name: str, runs: dict[str, Run]) -> Callable[[Axes], None]:
    end_s = max(one.whole_s for one in runs.values())
    edges = np.linspace(0, end_s, _INTERVALS + 1)

    def draw(axes: Axes) -> None:
        for loader, one in runs.items():
            at_s, sizes = zip(*one.arrivals, strict=True)
            delivered = np.cumsum(np.histogram(at_s, edges, weights=np.array(sizes) / 1e6)[0])
            axes.plot(edges[1:], delivered, color=COLOURS[loader], label=loader, linewidth=1.5)
            axes.axvline(one.whole_s, color=COLOURS[loader], linewidth=0.8, linestyle=":")
        axes.set_title(f"{name}: MB delivered, last run")
        axes.set_xlabel("s")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6, frameon=False)

    return draw
