"""The report of ``bench.growth``: tables, exponents, and plots with logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.growth.curves import CURVES, LOADERS, slope
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread

HEAD = """\
# Cost as work grows

Written by `python -m bench.growth`.

![Time per unit against size, both logarithmic](growth.png)

One quantity grows while the others stay. Each loader gets the same dataset object and arguments, with workers that
stay; the second epoch is measured, and its samples are counted. The exponent is that of the larger half of the
sizes: 0 is a time per unit that does not depend on the size, 1 one that grows in proportion with it, and more than 1
would be a fault. Figures are medians of {repeats} repeats, with the least and the greatest in brackets.
"""
COLOURS = {"torch": "#8f99a8", "minato": "#1f6fb2"}


@dataclass
class Results:
    """Everything measured; seconds per unit, milliseconds, and MiB."""

    curves: dict[tuple[str, str], list[tuple[int, Spread]]] = field(default_factory=dict)
    starts: dict[tuple[str, int, str], Spread] = field(default_factory=dict)
    memory: dict[tuple[int, str], Spread] = field(default_factory=dict)

    def plain(self, conditions: Mapping[str, str]) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "conditions": dict(conditions),
            "seconds": {
                f"{name}, {loader}": [
                    [size, one.least, one.median, one.greatest] for size, one in it
                ]
                for (name, loader), it in self.curves.items()
            },
            "first_batch_ms": {
                f"{method}, {workers} workers, {loader}": it.median
                for (method, workers, loader), it in self.starts.items()
            },
            "peak_mib": {
                f"{nbytes} bytes, {loader}": it.median
                for (nbytes, loader), it in self.memory.items()
            },
        }


def markdown(results: Results, conditions: Mapping[str, str], repeats: int) -> str:
    """Lay out the report."""
    parts = [HEAD.format(repeats=repeats), "## Conditions\n"]
    parts.append(table(["", ""], [[name, value] for name, value in conditions.items()]))
    for curve in CURVES:
        parts.append(f"## {curve.name[0].upper()}{curve.name[1:]}\n")
        parts.append(f"Microseconds per {curve.unit}.\n")
        cells: dict[int, dict[str, str]] = {}
        exponents = ["*exponent*"]
        for loader in LOADERS:
            points = results.curves[curve.name, loader]
            for size, one in points:
                scaled = Spread(*(1e6 * value for value in (one.least, one.median, one.greatest)))
                cells.setdefault(size, {})[loader] = spread_text(scaled, 2)
            exponents.append(f"{slope([(size, one.median) for size, one in points]):.2f}")
        rows = [
            [f"{size:,}", *(found.get(loader, "") for loader in LOADERS)]
            for size, found in cells.items()
        ]
        if len(rows) > 3:
            rows.append(exponents)
        parts.append(table([curve.name, *LOADERS], rows))
    parts.append("## Cold first batch\n")
    parts.append(
        "Milliseconds from building the loader, in a fresh process, to its first batch of 8 samples.\n"
    )
    parts.append(_pairs(results.starts, ["start method", "workers"], 0))
    parts.append("## Memory\n")
    parts.append(
        "MiB (proportional set size) that an epoch of 2048 samples takes at most in the training process and its 4 "
        "workers, beyond what was there before; batches of 32, and a consumer that takes 5 ms for each. "
        "minato's is largely memory that it keeps for the next batches, already in place: of as many as were in "
        "flight, and of four more.\n"
    )
    parts.append(_pairs(results.memory, ["bytes of a sample"], 0))
    return "\n".join(parts)


def _pairs(figures: Mapping[Any, Spread], names: list[str], digits: int) -> str:
    """A table with a column per loader; the last part of each key names the loader."""
    lines: dict[Any, list[str]] = {}
    for (*key, _), one in figures.items():
        lines.setdefault(tuple(key), [str(part) for part in key]).append(spread_text(one, digits))
    return table([*names, *LOADERS], list(lines.values()))


def draw(results: Results, path: Path) -> None:
    """Plot the curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10.0, 7.0), dpi=130)
    for axis, curve in zip(axes.flat, CURVES, strict=True):
        for loader in LOADERS:
            points = [(size, one.median) for size, one in results.curves[curve.name, loader]]
            label = f"{loader}, exponent {slope(points):.2f}"
            axis.plot(
                [size for size, _ in points],
                [1e6 * value for _, value in points],
                marker="o",
                markersize=3,
                color=COLOURS[loader],
                label=label,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(curve.name, fontsize=8)
        axis.set_ylabel(f"µs per {curve.unit}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
