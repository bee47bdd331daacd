"""What an experiment is told, and what it hands back: a part of the page, with a chart."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#444444"
_WIDTH = 118
COLOURS = {
    "torch": "#c9ced6",
    "torch, in_order=False": "#8f99a8",
    "minato": "#7fb8e6",
    "minato, arrival": "#1f6fb2",
}


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        short: A smoke run.
        repeats: Runs of each loader where time is measured.
        data: Folder that ``make data`` has filled.
    """

    short: bool
    repeats: int
    data: Path


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: Its heading.
        text: Markdown below it.
        panels: Functions that draw one diagram each, side by side.
    """

    title: str
    text: str
    panels: tuple[Callable[[Axes], None], ...] = ()


def prose(text: str, **values: Any) -> str:
    """A paragraph with values in it, wrapped anew."""
    filled = " ".join(text.format(**values).split())
    return textwrap.fill(filled, _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def draw(section: Section, path: Path) -> None:
    """Save a section's diagrams as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(section.panels)
    figure, axes = pyplot.subplots(ncols=count, figsize=(4.2 * count, 3.2), dpi=130, squeeze=False)
    for axis, panel in zip(axes[0], section.panels, strict=True):
        panel(axis)
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=7, which="both")
        axis.xaxis.label.set_fontsize(8)
        axis.yaxis.label.set_fontsize(8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
