"""The charts of the page "Benchmarks by others", drawn from its tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from bench.harness import chart, record, report
from bench.harness.suite import Spread

PAGE = record.PAGES / "others.md"
NAMES = ("row", "start method", "dataset", "workers", "step", "payload", "size", "sample")
"""Heads of the columns that name a row; all others are loaders."""
SHADES = {
    "torch": ("#c9ced6", "#8f99a8"),
    "minato": ("#7fb8e6", "#1f6fb2", "#0b3c66"),
    "bare": (chart.INK,),
    "": ("#f2cf9b", "#dd9a45", "#a3621b", "#c9b8d8", "#8d6fa8"),
}
"""Colours of torch, minato and all others, from light to dark."""
_FIGURES = re.compile(r"([\d.]+)(?: \(([\d.]+)–([\d.]+)\))?")


def _short(figure: float) -> str:
    digits = 2 if figure < 1 else 1 if figure < 10 else 0
    return f"{figure:.{digits}f}".removeprefix("0")


@dataclass(frozen=True)
class Panel:
    """Bars of tables that have the same rows.

    Args:
        title: Above the panel.
        after: Texts of the page; the table after each is drawn.
        part: Which figure of a cell, from 0.
        line: Where a dashed line is drawn.
        logarithmic: The scale.
        shown: What is drawn for a figure.
    """

    title: str
    after: tuple[str, ...]
    part: int = 0
    line: float | None = None
    logarithmic: bool = False
    shown: Callable[[float], float] = float


NOTE = "medians; lines from the least to the greatest"
CHARTS: dict[str, tuple[str, Sequence[Panel]]] = {
    "dlio": (
        f"{NOTE}; dashed: what DLIO allows; shorter is better",
        [
            Panel(
                "Share of an epoch that the accelerator waits, %: 100 less the utilisation",
                ("`python -m bench.dlio",),
                line=10.0,
                shown=lambda figure: 100 - figure,
            )
        ],
    ),
    "startup": (
        "start method, size of the dataset, workers; shorter is better",
        [
            Panel("First loader of a process: seconds to its first batch", ("**Start-up**",)),
            Panel("Its next loaders: seconds to their first batch", ("**Start-up**",), part=1),
        ],
    ),
    "handoff": (
        "by the time that the loop computes after each item; shorter is better",
        [
            Panel("next(), median: µs", ("**Hand-off**",)),
            Panel("next(), 99th percentile: µs", ("**Hand-off**",), part=1),
        ],
    ),
    "transport": (
        NOTE,
        [
            Panel(
                "Transport, GB/s, logarithmic",
                ("**Transport**",),
                logarithmic=True,
                shown=lambda figure: figure / 1000,
            )
        ],
    ),
    "artifact": (
        "1 is the ideal; medians",
        [Panel("Ideal time divided by measured time", ("## The papers",), part=1)],
    ),
    "images": (NOTE, [Panel("Images per second after the first epoch", ("## torchdata",))]),
}


Cells = dict[str, dict[str, Spread | None]]
"""Figures by row and loader."""


def cells(page: str, panel: Panel) -> Cells:
    """The figures of a panel.

    Raises:
        ValueError: A table is not where it should be.
    """
    found: Cells = {}
    for text in panel.after:
        lines = page.partition(text)[2].splitlines()
        lines = list(takewhile(_is_table, dropwhile(lambda line: not _is_table(line), lines)))
        if len(lines) < 3:
            raise ValueError(f"no table after {text!r}")
        head, _, *rows = ([cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in lines)
        for row in rows:
            named = dict(zip(head, row, strict=True))
            names = [named[name] for name in NAMES[:-1] if name in named]
            if "workers" in named:
                names[-1] = f"workers: {names[-1]}"
            label = "\n".join(names).replace(", ", "\n")
            figures = found.setdefault(label, {})
            for loader in head:
                if loader not in NAMES:
                    figures[loader.replace("`", "")] = _spread(named[loader], panel)
    return found


def _is_table(line: str) -> bool:
    return line.startswith("|")


def _spread(cell: str, panel: Panel) -> Spread | None:
    parts = _FIGURES.findall(cell)
    if len(parts) <= panel.part:
        return None
    return Spread.of([panel.shown(float(each)) for each in parts[panel.part] if each])


def _colours(loaders: Sequence[str]) -> dict[str, str]:
    left = {family: iter(shades) for family, shades in SHADES.items()}
    families = {loader: re.split(r"\W", loader)[0] for loader in loaders}
    return {one: next(left[name if name in left else ""]) for one, name in families.items()}


def draw(page: str, name: str, path: Path) -> None:
    """Draw one chart."""
    note, panels = CHARTS[name]
    found = [cells(page, panel) for panel in panels]
    loaders = list(dict.fromkeys(it for each in found for row in each.values() for it in row))
    shown = [it for it in loaders if it != "ideal"]

    def value(figures: Cells) -> Callable[[str, str], Spread | None]:
        return lambda row, loader: figures[row].get(loader)

    chart.bars(
        [
            chart.Bars(
                panel.title,
                {row: row for row in figures},
                value(figures),
                _short,
                panel.line,
                panel.logarithmic,
            )
            for panel, figures in zip(panels, found, strict=True)
        ],
        {it: it for it in shown},
        note,
        path,
        _colours(shown),
        stacked=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Draw all charts; returns the exit status."""
    options = report.parser("bench.others", __doc__ or "", 1, CHARTS).parse_args(arguments)
    folder = options.out or record.PAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.rows:
        path = folder / f"others-{name}.png"
        draw(PAGE.read_text(), name, path)
        print("written:", path)
    return 0


if __name__ == "__main__":
    report.program(main)
