"""The chart of a run: sleeping work against its bound, copying work against torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.macro.suite import Figures, RowResult, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = (
    ("torch", "#c9ced6", "torch DataLoader"),
    ("torch-any-order", "#8f99a8", "torch, in_order=False"),
    ("minato", "#7fb8e6", "minato DataLoader"),
    ("minato-any-order", "#1f6fb2", "minato, in_order=False"),
)
IN_PLACE_OF = {"minato": "minato-seed"}
"""Where a row has the second, its bar stands for the first; the row's name says so."""
SLEEPING = {
    "stragglers": "1 % stragglers\n1 ms / 201 ms",
    "lognormal": "log-normal\nabout 10 ms",
    "balanced": "the same, and a\nconsumer as fast",
    "bimodal-35": "every fifth slow\n5 ms / 35 ms",
    "bimodal-105": "every fifth slow\n5 ms / 105 ms",
}
COPYING = {
    "image": "images\n602 KB",
    "patch": "patches\n49 KB",
    "tabular": "rows of 16\nPython floats",
}
INK = "#444444"


def draw(results: Sequence[RowResult], conditions: Mapping[str, str], path: Path) -> None:
    """Draw the charted rows among ``results``, medians with their range, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {result.row.name: result for result in results}
    figure, (left, right) = pyplot.subplots(
        ncols=2, width_ratios=(len(SLEEPING), len(COPYING)), figsize=(11.0, 4.0), dpi=150
    )
    _bars(left, measured, SLEEPING, lambda figures: figures.share, lambda v: f"{100 * v:.0f}")
    left.set_title(
        "Uneven samples: share of the bound (work / workers), %", fontsize=10, loc="left"
    )
    left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
    left.set_ylim(0, 1.08)
    _bars(right, measured, COPYING, lambda figures: figures.ratio, _times)
    right.set_title("Cheap samples: speed, torch = 1", fontsize=10, loc="left")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(BARS), frameon=False, fontsize=9)
    note = (
        f"{conditions['cpu']}, {conditions['usable cores']} cores, torch {conditions['torch']}; "
        "the same workers for every loader; bars are medians, lines "
        "the least and the greatest; minato with seed= in groups 2 and 3"
    )
    figure.text(0.5, 0.01, note, ha="center", fontsize=7.5, color=INK)
    figure.tight_layout(rect=(0, 0.03, 1, 0.93))
    figure.savefig(path)
    pyplot.close(figure)


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _bars(
    axes: Axes,
    measured: Mapping[str, RowResult],
    names: Mapping[str, str],
    value: Callable[[Figures], Spread | None],
    text: Callable[[float], str],
) -> None:
    width = 0.84 / len(BARS)
    for place, (loader, colour, label) in enumerate(BARS):
        spreads = [_spread(measured.get(row), loader, value) for row in names]
        offset = (place - (len(BARS) - 1) / 2) * width
        shown = [(x + offset, spread) for x, spread in enumerate(spreads) if spread is not None]
        below = [spread.median - spread.least for _, spread in shown]
        above = [spread.greatest - spread.median for _, spread in shown]
        bars = axes.bar(
            [x for x, _ in shown],
            [spread.median for _, spread in shown],
            width * 0.92,
            color=colour,
            label=label,
            yerr=[below, above],
            error_kw={"elinewidth": 0.8, "ecolor": INK},
        )
        axes.bar_label(bars, [text(s.median) for _, s in shown], fontsize=7.5, padding=2)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), list(names.values()), fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.tick_params(axis="y", labelsize=8)


def _spread(
    result: RowResult | None, loader: str, value: Callable[[Figures], Spread | None]
) -> Spread | None:
    if result is None:
        return None
    substitute = IN_PLACE_OF.get(loader, loader)
    name = substitute if substitute in result.trials else loader
    return value(result.figures(name)) if name in result.trials else None
