"""The runs in one picture: how uneven the chain is, and when the training waited for it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import matplotlib
import numpy as np
import torch

from demo.report import LARGE_OTHERS_SHARE, Conditions
from demo.train import Run

COLOURS = ("#8c8c8c", "#d08a2e", "#1f6fb4")


def _draw_costs(axes: matplotlib.axes.Axes, runs: list[Run]) -> None:
    costs_ms = 1e3 * np.concatenate([run.costs_s for run in runs])
    edges = np.geomspace(max(0.01, costs_ms.min()), costs_ms.max() * 1.01, 41).tolist()
    axes.hist(costs_ms, edges, color="#6a8caf", edgecolor="white", linewidth=0.4)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for the legend
    mean = costs_ms.mean()
    median, p90, p99 = np.percentile(costs_ms, (50, 90, 99))
    axes.set_title("What one sample costs in the chain (all runs)")
    axes.set_xlabel("processor time per sample, ms (log scale)")
    axes.set_ylabel("samples")
    for value, style in ((median, "-"), (mean, "--"), (p99, ":")):
        axes.axvline(value, color="black", linestyle=style, linewidth=1)
    axes.legend(
        axes.lines[-3:],
        [f"median {median:.1f} ms", f"mean {mean:.1f} ms", f"99th percentile {p99:.0f} ms"],
        title=f"slowest tenth: above {p90:.0f} ms",
        loc="upper center",
    )


def _draw_cumulative(axes: matplotlib.axes.Axes, runs: list[Run]) -> None:
    for run, colour in zip(runs, COLOURS, strict=False):
        label = f"{run.name}: {run.wait_s:.1f} s of {run.total_s:.1f} s"
        steps = range(1, len(run.waits_s) + 1)
        axes.plot(steps, list(accumulate(run.waits_s)), color=colour, linewidth=2, label=label)
    axes.set_title("Time waited for data since the start")
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds waited")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _draw_steps(
    axes: matplotlib.axes.Axes, run: Run, colour: str, num_epochs: int, top_ms: float
) -> None:
    steps = np.arange(1, len(run.waits_s) + 1)
    axes.vlines(steps, 0, 1e3 * np.array(run.waits_s), color=colour, linewidth=1.6)
    for epoch in range(1, num_epochs):
        axes.axvline(
            epoch * len(steps) / num_epochs + 0.5, color="#cccccc", linewidth=0.8, zorder=0
        )
    axes.set_ylim(0, top_ms)
    axes.set_xlim(0, len(steps) + 1)
    axes.set_ylabel("ms")
    axes.set_title(run.name, loc="left", fontsize=10)


def draw(runs: list[Run], conditions: Conditions, output: Path) -> None:
    """Save the chart as PNG."""
    matplotlib.use("Agg")  # a file is wanted, no window
    from matplotlib import pyplot  # after the choice above, which it would otherwise make itself

    figure = pyplot.figure(figsize=(12, 5 + 1.5 * len(runs)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(4.0, 1.5 * len(runs)))
    costs_axes, cumulative_axes = upper.subplots(1, 2)
    _draw_costs(costs_axes, runs)
    _draw_cumulative(cumulative_axes, runs)
    strips = lower.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    top_ms = 1.05e3 * max(max(run.waits_s) for run in runs)
    for axes, run, colour in zip(strips, runs, COLOURS, strict=False):
        _draw_steps(axes, run, colour, conditions.num_epochs, top_ms)
    lower.suptitle("Waiting before each step (grey lines: epochs begin)", fontsize=12)
    strips[-1].set_xlabel("training step")
    version = f"torch {torch.__version__}"
    caption = f"3D U-Net on the MNI152 brain, CPU, {version}; {conditions}; one run each."
    others = max(run.others_share or 0.0 for run in runs)
    if others > LARGE_OTHERS_SHARE:
        caption += (
            f"\nOther programs took up to {others:.0%} of the cores: a disturbed measurement."
        )
    figure.supxlabel(caption, fontsize=9)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)
