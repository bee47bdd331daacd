"""A report as HTML: for Jupyter, or as a page with charts; it loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from minato.observe.report import charts
from minato.observe.report.figures import ReportFigures
from minato.observe.report.text import Section, sections, verdict_lines

__all__ = ["PREFIX", "fragment", "page", "table"]

PREFIX = b"<!doctype html><html lang='en'><head>"
"""The first bytes of each page."""

_STYLE = """
.minato{font:14px/1.45 system-ui,sans-serif;max-width:60rem}
.minato table{border-collapse:collapse;font-size:13px}
.minato .wide{overflow-x:auto}
.minato td,.minato th{padding:.15rem .6rem .15rem 0;text-align:left;vertical-align:top}
.minato th{font-weight:600;border-bottom:1px solid #8884}
.minato .verdict{border-left:4px solid #2a7;padding:.4rem .8rem;margin:.6rem 0}
.minato .note{border-left:4px solid #d9822b;padding:.4rem .8rem;margin:.6rem 0}
.minato summary{font-weight:600;cursor:pointer;margin-top:.5rem}
.minato td:not(:last-child){white-space:nowrap}
.minato .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(22rem,100%),1fr));gap:0 2rem}
.minato figure{margin:1rem 0}.minato svg{width:100%;height:auto}
.minato figcaption{font-weight:600}
"""
_PAGE_STYLE = "body{margin:0 auto;max-width:60rem;padding:1rem;color:#222;background:#fff}"


def fragment(report: ReportFigures, *, charted: bool = False) -> str:
    """The report as a part of a page, with charts if ``charted``."""
    pictures = "".join(charts.all_of(report)) if charted else ""
    tables = "".join(map(_table, filter(lambda section: section.rows, sections(report))))
    notes = "".join(f"<div class='note'>{escape(words)}</div>" for words in report.warnings)
    return (
        f"<style>{_STYLE}</style><div class='minato'>{_verdict(report)}{notes}"
        f"<div class='charts'>{pictures}</div>{tables}</div>"
    )


def page(report: ReportFigures, before: str = "") -> str:
    """The report as a complete page, after the HTML ``before``."""
    return (
        f"{PREFIX.decode()}<meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>minato report</title><style>{_PAGE_STYLE}</style></head><body>"
        f"<h1>minato report</h1>{before}{fragment(report, charted=True)}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _table(section: Section) -> str:
    is_open = " open" if section.title in ("Waiting", "Stages") else ""
    return (
        f"<details{is_open}><summary>{escape(section.title)}</summary>"
        f"{table(section.columns, section.rows)}</details>"
    )


def _verdict(report: ReportFigures) -> str:
    summary, *rest = map(escape, verdict_lines(report.verdict))
    return f"<div class='verdict'>{'<br>'.join([f'<strong>{summary}</strong>', *rest])}</div>"
