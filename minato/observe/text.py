"""A report as text: values with their units, tables for every renderer, and the whole report, plain or with rich."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from minato._support.text import printable
from minato.observe.figures import ReportFigures, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Section", "format_value", "plain", "rich_of", "sections", "verdict_lines"]

_PREFIXES = ("", "k", "M", "G", "T")
_KEPT_EPOCHS = 8
"""Only the latest epochs are shown."""


def plain(report: ReportFigures) -> str:
    """The report as text without colour."""
    parts = ["\n".join(map(printable, verdict_lines(report.verdict)))]
    parts += [_table(section) for section in sections(report) if section.rows]
    return "\n\n".join(parts)


def rich_of(report: ReportFigures) -> RenderableType:
    """The report for rich."""
    import rich.box
    import rich.console
    import rich.markup
    import rich.panel
    import rich.table

    escape = rich.markup.escape
    head, *rest = (escape(printable(line)) for line in verdict_lines(report.verdict))
    parts: list[RenderableType] = [rich.panel.Panel("\n".join(rest), title=f"[bold]{head}[/]")]
    for section in sections(report):
        if not section.rows:
            continue
        table = rich.table.Table(
            title=section.title, title_justify="left", box=rich.box.SIMPLE, title_style="bold"
        )
        last = len(section.columns) - 1
        for i, column in enumerate(section.columns):
            explains = section.columns[2:] == ("how to read it",) and i == last
            table.add_column(
                column,
                style="dim" if explains else None,
                justify="right" if i > 0 and not explains else "left",
            )
        for row in section.rows:
            table.add_row(*map(escape, row))
        parts.append(table)
    return rich.console.Group(*parts)


def verdict_lines(verdict: Verdict) -> list[str]:
    """Summary, evidence, advice and estimate, a sentence each."""
    lines = [verdict.summary, *verdict.evidence]
    if verdict.advice:
        lines.append(f"Try: {verdict.advice}")
    if verdict.speedup > 1.005:
        lines.append(f"Estimated speed-up: {verdict.speedup:.3g}×")
    return lines


def _table(section: Section) -> str:
    rows = [section.columns, *section.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([section.title, *lines])


# ---- tables ---------------------------------------------------------------------------------


class Section(NamedTuple):
    """A table: its title, the names of its columns, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sections(report: ReportFigures) -> list[Section]:
    """The tables of a report; names and indices without control characters."""
    return [
        section._replace(rows=[tuple(map(printable, row)) for row in section.rows])
        for section in _sections(report)
    ]


def _sections(report: ReportFigures) -> list[Section]:
    run = report.run
    figures = [
        Section(title, ("figure", "value", "how to read it"), _figures(part))
        for title, part in (
            ("Waiting", run.waiting),
            ("Throughput", run.throughput),
            ("Workers", run.workers),
            ("Prefetch window", run.prefetch_window),
            ("Machine", run.machine),
            ("Stragglers", run.stragglers),
            ("Errors", run.errors),
            *([("Reads and cache", run.reads)] if any(vars(run.reads).values()) else []),
        )
    ]
    return [
        *figures,
        Section(
            "GPUs",
            ("GPU", "idle", "busy otherwise", "memory", "of", "samples"),
            [
                (
                    each.name,
                    format_value(each.idle_share, "share"),
                    format_value(each.busy_share, "share"),
                    format_value(each.memory_bytes, "bytes"),
                    format_value(each.total_bytes, "bytes"),
                    str(each.samples),
                )
                for each in run.gpus
            ],
        ),
        Section(
            "Stages",
            ("stage", "share", "mean", "P50", "P90", "P99", "timed"),
            [
                (
                    stage.name,
                    format_value(stage.share, "share"),
                    *(
                        format_value(value, "s")
                        for value in (stage.mean_s, stage.p50_s, stage.p90_s, stage.p99_s)
                    ),
                    str(stage.count),
                )
                for stage in run.stages
            ],
        ),
        Section(
            "Slowest samples",
            ("index", "time", "epoch", "slowest stage", "of it"),
            [
                (
                    str(each.index),
                    format_value(each.cost_s, "s"),
                    str(each.epoch),
                    each.stage or "–",
                    format_value(each.stage_s, "s") if each.stage else "–",
                )
                for each in report.slowest
            ],
        ),
        Section(
            "Epochs",
            (
                "epoch",
                "time",
                "batches",
                "samples",
                "samples per s",
                "waiting",
                "first batch",
                "workers",
            ),
            [
                (
                    each.name + ("" if each.finished else " (not finished)"),
                    format_value(each.throughput.wall_s, "s"),
                    str(each.throughput.batches),
                    str(each.throughput.samples),
                    format_value(each.throughput.samples_per_s, ""),
                    format_value(each.waiting.share, "share"),
                    format_value(each.waiting.first_batch_s, "s"),
                    _span(each.workers.fewest, each.workers.most),
                )
                for each in report.epochs[-_KEPT_EPOCHS:]
            ],
        ),
    ]


def _figures(part: Any) -> list[tuple[str, ...]]:
    return [
        (
            _label(each.name, each.metadata["unit"]),
            format_value(getattr(part, each.name), each.metadata["unit"]),
            each.metadata["reading"],
        )
        for each in dataclasses.fields(part)
    ]


def _span(low: int, high: int) -> str:
    """The smallest and the largest count."""
    return str(high) if low == high else f"{low}–{high}"


def _label(name: str, unit: str) -> str:
    return (name.removesuffix("_s") if unit == "s" else name).replace("_", " ")


# ---- values ---------------------------------------------------------------------------------


def format_value(value: Any, unit: str) -> str:
    """A value with its unit, to three digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, str):
        return value or "–"
    if unit == "share":
        return f"{100 * value:.3g} %" if value < 0.9995 or value > 1.0005 else "100 %"
    if unit == "s":
        return _seconds(value)
    if unit == "per s":
        return f"{_scaled(value)}/s"
    if unit.startswith("bytes"):
        return f"{_scaled(value)}B{'/s' if unit != 'bytes' else ''}"
    if isinstance(value, int):
        return f"{value} {unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{1e9 * value:.0f} ns"


def _scaled(value: float) -> str:
    for prefix in _PREFIXES:
        if value < 1000 or prefix == _PREFIXES[-1]:
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError
