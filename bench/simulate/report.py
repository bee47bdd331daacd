"""The simulation's report, as Markdown, and its chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.simulate.control import Moment
from bench.simulate.trials import Result
from bench.simulate.workloads import TABLE_2, Figures

_INTRODUCTION = """# Simulation

Written by `python -m bench.simulate --day --out docs/benchmarks`. Nothing here was measured: loaders run in virtual
time, over drawn costs, with the timeout policy, the window and the worker controllers that the engine uses. Dispatch,
copies, collation and start-up cost nothing, and every worker has a core. Read the figures as ratios of one another.

![Workers, threshold and queue over time](simulate.png)
"""

_LOADERS = """## Loaders

{workers} workers, {batches} batches each, the same costs in the same order for every loader. Figures leave the first
quarter of the batches out, except *first batch*.

* *Bound*: what so many workers can make, or the consumer can take. More than 1 is the end of a run.
* *P99 gap*: between two batches.
* *Waiting*: share of the time in which the consumer waits.
* *Lag*: batches by which a sample came later than a sequential loader would bring it, at most.
* *Repeated*: share of the work that had been done before.
* *Deferral*: a worker sets a slow sample aside between two transforms while the consumer waits, and resumes it later.
  In `strict` and `batch` order samples run to their end. In the speech workloads the last transform is the slow one,
  and nothing can be deferred after it.
* *Algorithm 1* is the MinatoLoader paper's, as printed and with the one change that avoids repeated work; a quarter of
  its workers do nothing but go on with slow samples.
"""

_CONTROL = """## Worker controllers

Image segmentation in order `arrival`, from 2 workers, at most 32, 16 cores; a period is two seconds. *Over* and *under*
are mean numbers of workers that were too many or too few for the load of the moment, after the first minute.

* *drift*: costs double in the middle third, and the consumer becomes four times as slow for the last quarter.
* *CPU-bound*: samples compute, the consumer takes whatever comes. More than 16 workers gain nothing.
* *GPU-bound*: the consumer takes 6 samples a second, which need 3 workers.
* *I/O-bound*: samples wait for a disk. The consumer takes 24 samples a second, which need 12 workers.
"""


def table_2() -> str:
    """The generators against the paper's table."""
    lines = [
        "## Costs",
        "",
        "The generators against table 2 of the MinatoLoader paper: ms, drawn / printed.",
        "",
        "| workload | mean | median | P75 | P90 | min | max | deviation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in TABLE_2:
        assert workload.printed is not None
        drawn = Figures.of(workload.costs_s(10_000, np.random.default_rng(0)))
        pairs = zip(astuple(drawn), astuple(workload.printed), strict=True)
        cells = (f"{1e3 * one:.0f} / {1e3 * other:.0f}" for one, other in pairs)
        lines.append(f"| {workload.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def loaders(results: Mapping[str, Mapping[str, Result]], workers: int, batches: int) -> str:
    """A table for each workload."""
    parts = [_LOADERS.format(workers=workers, batches=batches)]
    for workload, by_loader in results.items():
        bound = next(iter(by_loader.values())).bound
        parts.append(f"### {workload}\n\nBound: {bound:.3g} batches a second.\n")
        parts.append(_rows(by_loader))
    return "\n".join(parts)


def _rows(by_loader: Mapping[str, Result]) -> str:
    lines = [
        "| loader | of the bound | first batch, s | P99 gap, s | waiting | lag | repeated |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in by_loader.items():
        share = result.batches_per_s / result.bound
        lines.append(
            f"| {name} | {share:.3f} | {result.first_batch_s:.2f} | {result.p99_gap_s:.3f} "
            f"| {100 * result.waited_share:.1f} % | {result.worst_lag} "
            f"| {100 * result.repeated_share:.1f} % |"
        )
    return "\n".join([*lines, ""])


def day(name: str, by_loader: Mapping[str, Result], ranks: int, workers: int) -> str:
    """The large run."""
    result = next(iter(by_loader.values()))
    return (
        f"## A day on {ranks * workers} cores and {ranks} GPUs\n\n"
        f"{name}: {ranks} ranks of {workers} workers, {result.samples:,} samples. The ranks take their steps together, "
        "so each waits for the slowest. The bound is that of one rank, the other figures too.\n\n"
        + _rows(by_loader)
    )


def control(
    traces: Mapping[str, Mapping[str, Sequence[Moment]]], needed: Mapping[str, Sequence[float]]
) -> str:
    """A line for each scenario and controller."""
    lines = [
        _CONTROL,
        "| load | controller | samples/s | waiting | workers | over | under | changes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for scenario, by_controller in traces.items():
        for controller, moments in by_controller.items():
            settled = moments[30:]
            ideal = np.interp(
                np.linspace(0, 1, len(settled)),
                np.linspace(0, 1, len(needed[scenario])),
                needed[scenario],
            )
            workers = np.array([moment.workers for moment in settled])
            lines.append(
                f"| {scenario} | {controller} "
                f"| {np.mean([moment.samples_per_s for moment in settled]):.1f} "
                f"| {100 * np.mean([moment.waited_share for moment in settled]):.1f} % "
                f"| {workers.mean():.1f} "
                f"| {np.maximum(workers - ideal, 0).mean():.1f} "
                f"| {np.maximum(ideal - workers, 0).mean():.1f} "
                f"| {int(np.sum(np.diff(workers) != 0))} |"
            )
    return "\n".join([*lines, ""])


def introduction() -> str:
    """The head of the page."""
    return _INTRODUCTION


class Standing(Protocol):
    """How a loader stood at one moment."""

    @property
    def at_s(self) -> float:
        """When."""

    @property
    def threshold_s(self) -> float:
        """From which cost on samples were slow."""

    @property
    def slow_share(self) -> float:
        """How many were."""

    @property
    def ready(self) -> int:
        """Batches that lay ready."""

    @property
    def workers(self) -> int:
        """Those that worked."""


def draw(moments: Sequence[Standing], path: Path, title: str, time_label: str) -> None:
    """Draw what the controller and the timeout policy did over time, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at_s = [moment.at_s for moment in moments]
    figure, panels = pyplot.subplots(nrows=4, sharex=True, figsize=(9.0, 6.5), dpi=150)
    lines = (
        ("threshold, s", [moment.threshold_s for moment in moments]),
        ("slow share", [moment.slow_share for moment in moments]),
        ("ready batches", [float(moment.ready) for moment in moments]),
        ("workers", [float(moment.workers) for moment in moments]),
    )
    for panel, (label, values) in zip(panels, lines, strict=True):
        panel.step(at_s, values, where="post", color="#1f6fb2", linewidth=1.2)
        panel.set_ylabel(label, fontsize=9)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_title(title, fontsize=10, loc="left")
    panels[-1].set_xlabel(time_label, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
