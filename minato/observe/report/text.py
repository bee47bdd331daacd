"""A report as text: plain, or with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._support.text import printable
from minato.observe.report.figures import ReportFigures, Verdict
from minato.observe.report.tables import Section, sections

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["plain", "rich_of", "verdict_lines"]


def plain(report: ReportFigures) -> str:
    """The report as text without colour."""
    parts = ["\n".join(map(printable, verdict_lines(report.verdict)))]
    parts += [f"Note: {printable(words)}" for words in report.warnings]
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
    parts += (f"[yellow]Note:[/] {escape(printable(words))}" for words in report.warnings)
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
