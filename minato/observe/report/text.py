"""A report in a terminal: with rich where it is installed, in plain text everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._support.text import printable
from minato.observe.report.rows import Section, sections

if TYPE_CHECKING:
    from rich.console import RenderableType

    from minato.observe.report.figures import Report
    from minato.observe.report.verdict import Verdict

__all__ = ["plain", "rich_of"]


def plain(report: Report) -> str:
    """The report as text without colour."""
    parts = [_verdict(report.verdict), *(f"Note: {printable(words)}" for words in report.warnings)]
    parts += [_table(section) for section in sections(report) if section.rows]
    return "\n\n".join(parts)


def rich_of(report: Report) -> RenderableType:
    """The report as rich shows it."""
    import rich.box
    import rich.console
    import rich.markup
    import rich.panel
    import rich.table

    escape = rich.markup.escape
    head, *rest = _verdict(report.verdict).split("\n")
    parts: list[RenderableType] = [
        rich.panel.Panel("\n".join(map(escape, rest)), title=f"[bold]{escape(head)}[/]")
    ]
    parts += (f"[yellow]Note:[/] {escape(printable(words))}" for words in report.warnings)
    for section in sections(report):
        if not section.rows:
            continue
        table = rich.table.Table(
            title=section.title, title_justify="left", box=rich.box.SIMPLE, title_style="bold"
        )
        last = len(section.columns) - 1
        for i, column in enumerate(section.columns):
            reads = section.columns[2:] == ("how to read it",) and i == last
            table.add_column(
                column,
                style="dim" if reads else None,
                justify="right" if i > 0 and not reads else "left",
            )
        for row in section.rows:
            table.add_row(*map(escape, row))
        parts.append(table)
    return rich.console.Group(*parts)


def _verdict(verdict: Verdict) -> str:
    lines = [verdict.summary, *verdict.evidence]
    if verdict.advice:
        lines.append(f"What to do: {verdict.advice}")
    if verdict.gain > 1.005:
        lines.append(f"By the model, the run would be {verdict.gain:.3g} times as fast.")
    return "\n".join(map(printable, lines))


def _table(section: Section) -> str:
    rows = [section.columns, *section.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([section.title, *lines])
