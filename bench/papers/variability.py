"""How uneven preprocessing is: the paper's figure 2 and table 2 on real input."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np

from bench.macro.report import table
from bench.papers.costs import Measured, measured, workloads
from bench.papers.page import INK, Section, Settings
from bench.simulate.workloads import Figures
from bench.workloads.segmentation import ClipNormalise, PadTo, Resample, Volume
from bench.workloads.volumes import volumes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 25
"""Samples in a diagram, as in the paper."""
NAMES = ("segmentation", "detection", "speech-3s")
_HEAD = [
    "workload",
    "samples",
    "mean",
    "median",
    "P75",
    "P90",
    "min",
    "max",
    "deviation",
    "P90 / median",
]
_TEXT = """\
Milliseconds of processor time for a sample, reading included, of one thread that works alone; each sample several
times, with other random decisions. The speech workload's light and heavy steps count with what they would sleep.
Rows *as printed* are the paper's, for other data and another machine: the shape is to be compared, not the size.
"""


def run(settings: Settings) -> Section:
    """Measure all samples of the workloads."""
    found = {name: measured(name, settings) for name in NAMES}
    rows = []
    for name, one in found.items():
        figures = Figures.of(one.costs_s.ravel())
        rows.append(_row(name, f"{one.costs_s.shape[1]} × {one.costs_s.shape[0]}", figures))
        printed = workloads(settings)[name].printed
        if printed is not None:
            rows.append(_row("*as printed*", "", printed))
    parts = [_TEXT, table(_HEAD, rows), "Mean milliseconds of each step:\n"]
    for name, one in found.items():
        means_ms = 1e3 * one.times_s.mean((0, 1))
        steps = zip(one.steps, means_ms, strict=True)
        parts.append(f"* {name}: " + ", ".join(f"{step} {mean:.1f}" for step, mean in steps))
    parts += offline(settings)
    panels = tuple(_bars(name, one) for name, one in found.items())
    return Section(
        "Variability of preprocessing (figure 2, table 2)", "\n".join(parts) + "\n", panels
    )


def offline(settings: Settings) -> list[str]:
    """What preparing each volume of the packages takes, once, in lines of the page."""
    steps = (Resample(), PadTo())
    taken_ms: dict[str, list[float]] = {}
    for number, (_, volume) in enumerate(volumes(settings.data / "volumes")):
        if settings.short and number == 2:
            break
        for step in steps:
            volume = _clocked(step, volume, taken_ms)
        _clocked(ClipNormalise.fitted(volume.image), volume, taken_ms)
    if not taken_ms:
        return []
    lines = [f"\nThe offline part, once for each of {len(taken_ms['Resample'])} volumes, ms:\n"]
    rows = [
        [name, f"{np.mean(times):.0f}", f"{min(times):.0f}", f"{max(times):.0f}", printed]
        for (name, times), printed in zip(taken_ms.items(), ("380", "55", "115"), strict=True)
    ]
    return [
        *lines,
        table(["step", "mean", "min", "max", "mean *as printed* by SpeedyLoader"], rows),
    ]


def _clocked(
    step: Callable[[Volume], Volume], volume: Volume, taken_ms: dict[str, list[float]]
) -> Volume:
    begun_s = time.thread_time()
    done = step(volume)
    taken_ms.setdefault(type(step).__name__, []).append(1e3 * (time.thread_time() - begun_s))
    return done


def _row(name: str, samples: str, figures: Figures) -> list[str]:
    cells = [f"{1e3 * value:.0f}" for value in astuple(figures)]
    return [name, samples, *cells, f"{figures.p90 / figures.median:.1f}"]


def _bars(name: str, one: Measured) -> Callable[[Axes], None]:
    costs_ms = 1e3 * one.costs_s[0]
    chosen = np.random.default_rng(0).permutation(len(costs_ms))[:SHOWN]

    def draw(axes: Axes) -> None:
        axes.bar(range(len(chosen)), costs_ms[chosen], color="#6a8caf")
        axes.axhline(costs_ms.mean(), color=INK, linestyle="--", linewidth=1)
        axes.set_title(f"{name}: {len(chosen)} samples, and the mean")
        axes.set_xticks([])
        axes.set_xlabel("sample")
        axes.set_ylabel("ms")

    return draw
