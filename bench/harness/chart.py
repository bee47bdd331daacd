"""Charts of a run as PNG: groups of bars with their ranges, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from bench.harness.suite import Spread

INK = "#444444"
COLOURS = {
    "torch": "#c9ced6",
    "torch-any-order": "#8f99a8",
    "minato": "#7fb8e6",
    "minato-any-order": "#1f6fb2",
    "ideal": INK,
}

COLOURS_OF_A_FILE = 48
"""Enough for smooth letters; such a file is half as large as one with all colours."""


@dataclass(frozen=True)
class Bars:
    """One panel of grouped bars.

    Args:
        title: above the panel.
        groups: label of each group by its name.
        value: ``(group, loader)`` to the spread of the bar, or None for no bar.
        text: writes a median above its bar.
    """

    title: str
    groups: Mapping[str, str]
    value: Callable[[str, str], Spread | None]
    text: Callable[[float], str]


@dataclass(frozen=True)
class Lines:
    """One panel of curves with logarithmic axes.

    Args:
        x, y: labels of the axes.
        curves: ``(label, colour, points)``.
    """

    x: str
    y: str
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]


def _figure(widths: Sequence[int], rows: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, len(widths), width_ratios=widths, figsize=size, dpi=140, squeeze=False
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7.5)
    return figure, axes


def _save(figure: Any, path: Path, top: float = 1.0) -> None:
    from matplotlib import pyplot
    from PIL import Image

    figure.tight_layout(rect=(0, 0.03, 1, top))
    drawn = BytesIO()
    figure.savefig(drawn)
    pyplot.close(figure)
    few_colours = Image.open(drawn).convert("RGB").quantize(COLOURS_OF_A_FILE)
    few_colours.save(path, optimize=True)


def bars(panels: Sequence[Bars], labels: Mapping[str, str], note: str, path: Path) -> None:
    """Draw panels side by side; ``labels`` names the loaders in the legend."""
    figure, axes = _figure([len(panel.groups) for panel in panels], 1, (11.0, 4.0))
    width = 0.84 / len(labels)
    for axis, panel in zip(axes.flat, panels, strict=True):
        for place, (loader, label) in enumerate(labels.items()):
            offset = (place - (len(labels) - 1) / 2) * width
            found = [(x + offset, panel.value(name, loader)) for x, name in enumerate(panel.groups)]
            shown = [(x, spread) for x, spread in found if spread is not None]
            below = [spread.median - spread.least for _, spread in shown]
            above = [spread.greatest - spread.median for _, spread in shown]
            drawn = axis.bar(
                [x for x, _ in shown],
                [spread.median for _, spread in shown],
                width * 0.92,
                color=COLOURS[loader],
                label=label,
                yerr=[below, above],
                error_kw={"elinewidth": 0.8, "ecolor": INK},
            )
            texts = [panel.text(spread.median) for _, spread in shown]
            axis.bar_label(drawn, texts, fontsize=7.5, padding=2)
        axis.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(panel.groups)), list(panel.groups.values()))
        axis.set_title(panel.title, fontsize=10, loc="left")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.text(0.5, 0.01, note, ha="center", fontsize=7.5, color=INK)
    _save(figure, path, top=0.925)


def lines(panels: Sequence[Lines], path: Path) -> None:
    """Draw panels in two columns."""
    figure, axes = _figure([1, 1], -(-len(panels) // 2), (10.0, 7.0))
    for axis, panel in zip(axes.flat, panels, strict=True):
        for label, colour, points in panel.curves:
            x, y = zip(*points, strict=True)
            axis.plot(x, y, marker="o", markersize=3, color=colour, label=label)
        values = [y for _, _, points in panel.curves for _, y in points]
        decades = [
            10.0 ** math.floor(math.log10(min(values))),
            10.0 ** math.ceil(math.log10(max(values))),
        ]
        axis.set(xscale="log", yscale="log", ylim=decades)
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(
                lambda value, _: f"{value:,g}" if value < 1e6 else f"{value / 1e6:g} M"
            )
            each.set_minor_formatter("")
        axis.set_xlabel(panel.x, fontsize=8)
        axis.set_ylabel(panel.y, fontsize=8)
        axis.legend(fontsize=7, frameon=False)
    _save(figure, path)
