"""Charts of a page, drawn from its tables: groups of bars with their ranges, in a light and a dark version."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.suite import Spread

COLOURS_OF_A_FILE = 64
"""Enough for smooth letters; such a file is half as large as one with all colours."""
PANEL_IN = 4.0
"""Height of a row of panels, in inches."""
WIDTH_IN = 11.0
SHARE_OF_A_GROUP = 0.84
Tables = Mapping[str, Mapping[str, Mapping[str, str]]]
"""``[heading][first cell of the row][head of the column]``: the first table below each heading of a page."""


class Scheme(NamedTuple):
    """Colours of letters, axes and each loader's bars that can be seen on a light or on a dark page."""

    ink: str
    bars: Mapping[str, str]


BARS = ("torch", "torch, in_order=False", "minato", "minato, in_order=False")
_LIGHT, _DARK = "#c9ced6 #8f99a8 #7fb8e6 #1f6fb2", "#4d545f #7d8796 #5ea8e0 #2f7cc4"
SCHEMES = {
    "": Scheme("#444444", dict(zip(BARS, _LIGHT.split(), strict=True))),
    "-dark": Scheme("#dfe3e8", dict(zip(BARS, _DARK.split(), strict=True))),
}
"""By the end of the file's name."""


@dataclass(frozen=True)
class Bars:
    """A panel of grouped bars: ``value(group, loader)``, with ``text(median)`` above, on an axis from 0 to ``top``."""

    title: str
    groups: Mapping[str, str]
    value: Callable[[str, str], Spread | None]
    text: Callable[[float], str]
    top: float | None = None


def images(name: str, alt: str) -> str:
    """The two versions of the chart of page ``name``, in Markdown: the reader's colour scheme chooses."""
    return "\n".join(
        f"```{{image}} {name}{version}.png\n:alt: {alt}\n:class: {shown}\n```\n"
        for version, shown in (("", "only-light"), ("-dark", "only-dark"))
    )


def tables_of(page: Path) -> Tables:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for section in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        lines = re.search(r"(?:^\|.*\|\n)+", section, re.MULTILINE)
        if lines:
            head, _, *rows = (
                [cell.strip() for cell in line[1:-1].split("|")] for line in lines[0].splitlines()
            )
            found[heading] = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    return found


def spread_in(tables: Tables, heading: str, row: str, column: str) -> Spread | None:
    """The figure of a cell, ``median (least–greatest)``; None if there is none."""
    cell = tables.get(heading, {}).get(row, {}).get(column, "")
    numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]+", cell)]
    if not numbers:
        return None
    median, least, greatest = numbers if len(numbers) > 1 else numbers * 3
    return Spread(least, median, greatest)


def times(ratio: float) -> str:
    """A ratio to torch above a bar; torch itself needs none."""
    return "" if ratio == 1 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def bars(panels: Sequence[Bars], columns: int, page: Path, shown: str) -> None:
    """Draw panels in rows of ``columns``, as ``NAME.png`` and ``NAME-dark.png`` next to the page; a note says what is
    shown.
    """
    conditions = {name: cells[""] for name, cells in tables_of(page)["Conditions"].items()}
    note = (
        f"{conditions['cpu']}, {conditions['usable cores']} cores, torch {conditions['torch']}; the same workers for "
        f"every loader; {shown}"
    )
    for version, scheme in SCHEMES.items():
        figure = _figure(panels, columns, scheme, note)
        _save(figure, page.with_name(f"{page.stem}{version}.png"))


def _figure(panels: Sequence[Bars], columns: int, scheme: Scheme, note: str) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // columns)
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with pyplot.rc_context(dict.fromkeys(inks, scheme.ink)):
        figure, axes = pyplot.subplots(
            rows,
            columns,
            width_ratios=[len(panel.groups) for panel in panels[:columns]],
            figsize=(WIDTH_IN, PANEL_IN * rows),
            dpi=140,
            squeeze=False,
        )
        for axis, panel in zip(axes.flat, panels, strict=True):
            _draw(axis, panel, scheme)
        handles = {
            label: handle
            for axis in axes.flat
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles, loc="upper center", ncols=len(handles), frameon=False
        )
        figure.text(0.5, 0.01, note, ha="center", fontsize=7.5)
        figure.tight_layout(rect=(0, 0.03, 1, 1 - 0.3 / (PANEL_IN * rows)))
    return figure


def _draw(axis: Any, panel: Bars, scheme: Scheme) -> None:
    values = {
        loader: [(x, panel.value(name, loader)) for x, name in enumerate(panel.groups)]
        for loader in scheme.bars
    }
    shown = {
        loader: [(x, spread) for x, spread in found if spread is not None]
        for loader, found in values.items()
    }
    there = [loader for loader, found in shown.items() if found]
    width = SHARE_OF_A_GROUP / max(1, len(there))
    for place, loader in enumerate(there):
        spreads = [spread for _, spread in shown[loader]]
        drawn = axis.bar(
            [x + (place - (len(there) - 1) / 2) * width for x, _ in shown[loader]],
            [spread.median for spread in spreads],
            width * 0.92,
            color=scheme.bars[loader],
            label=loader,
            yerr=[
                [spread.median - spread.least for spread in spreads],
                [spread.greatest - spread.median for spread in spreads],
            ],
            error_kw={"elinewidth": 0.8, "ecolor": scheme.ink},
        )
        axis.bar_label(
            drawn, [panel.text(spread.median) for spread in spreads], fontsize=7, padding=2
        )
    axis.set_xticks(range(len(panel.groups)), list(panel.groups.values()))
    axis.set_ylim(0, panel.top)
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7.5)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, transparent=True)
    pyplot.close(figure)
    few_colours = Image.open(drawn).quantize(COLOURS_OF_A_FILE, Image.Quantize.FASTOCTREE)
    few_colours.save(path, optimize=True)
