"""Report: the figures of a loader, and every way to show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minato.observe.report import html, text
from minato.observe.report.figures import ReportFigures
from minato.observe.report.units import format_value

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Report"]


@dataclass(frozen=True, repr=False)
class Report(ReportFigures):
    """The result of ``loader.report()``: text for ``print``, colour for ``rich.print``, a table in Jupyter."""

    def to_html(self) -> str:
        """One page with charts; it loads no other file."""
        return html.page(self)

    def __repr__(self) -> str:
        return (
            f"<Report: {self.run.epochs} epochs, {self.run.throughput.batches} batches, waiting "
            f"{format_value(self.run.waiting.share, 'share')}, bottleneck {self.verdict.bottleneck!r}>"
        )

    def __str__(self) -> str:
        return text.plain(self)

    def __rich__(self) -> RenderableType:
        return text.rich_of(self)

    def _repr_html_(self) -> str:
        return html.fragment(self)
