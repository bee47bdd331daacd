"""Reports of the loaders of a program as one page of HTML, which loads nothing and runs no script.

All shares have an axis from 0 to 100 %, and times one from 0 s, so that pages of before and after can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from minato._support.text import digits, printable
from minato.observe.text import Section, format_value, headline, sections

if TYPE_CHECKING:
    from minato.observe.report import Report

__all__ = ["BEGINS", "page"]

BEGINS = '<!doctype html>\n<html lang="en"><head><meta name="generator" content="minato">'
"""How each page begins."""
_SLOWEST = 5
_BARS = 60
"""Of the chart of waiting; each is the share of an equal part of the time."""
_WIDTH, _TOP, _BASE, _LEFT = 400, 12, 132, 44
"""Places in a chart, in units of about a pixel on a phone, where text of size 12 is legible."""
_ROW, _NAMES, _RIGHT, _NAME = 24, 150, 346, 22
"""Of the chart of stages: height of a row, where 0 and 100 % are, and most characters of a name."""
_SETTINGS = (
    *("batch_size", "num_workers", "worker_method", "order", "prefetch_factor"),
    *("fetch_concurrency", "persistent_workers", "pin_memory"),
)
_STYLE = """
:root{color-scheme:light dark;--text:#1c2024;--dim:#5b6470;--line:#d5dae0;--paper:#fff;--bar:#2f6fb3;--mark:#1f8a5b}
@media (prefers-color-scheme:dark){
:root{--text:#e6e9ed;--dim:#a2abb6;--line:#3a424c;--paper:#14181d;--bar:#6aa7e8;--mark:#4cc38a}}
@media print{
:root{color-scheme:light;--text:#000;--dim:#444;--line:#bbb;--paper:#fff;--bar:#2f6fb3;--mark:#1f8a5b}
body{max-width:none}section,figure,.tiles{break-inside:avoid}details:not([open]){display:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
body{margin:0 auto;max-width:60rem;padding:1rem;font:15px/1.45 system-ui,sans-serif;color:var(--text);
background:var(--paper)}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.2rem;margin:2rem 0 .2rem;overflow-wrap:anywhere}
h3{font-size:1rem;margin:.8rem 0 0}
.dim,figcaption span{color:var(--dim);font-size:.87rem;overflow-wrap:anywhere}
p{margin:.2rem 0}
.verdict{border-left:4px solid var(--mark);padding:.3rem .8rem;margin:.8rem 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem;margin:.8rem 0}
.tiles div{border:1px solid var(--line);border-radius:6px;padding:.5rem .8rem}
.tiles b{display:block;font-size:1.5rem;font-weight:600;line-height:1.2}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(23rem,100%),1fr));gap:0 2rem}
figure{margin:.8rem 0}figcaption,summary{font-weight:600;text-align:left}figcaption span{font-weight:400}
svg{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}
.bar{fill:var(--bar)}.axis{fill:none;stroke:var(--line)}
.wide{overflow-x:auto;margin:.6rem 0}summary{cursor:pointer;margin:.5rem 0}
table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0;border-bottom:1px solid var(--line)}
td:not(:last-child),th{white-space:nowrap}
"""


def page(reports: Sequence[Report], dropped: int = 0) -> str:
    """A complete page with a section for each report.

    Args:
        dropped: Number of loaders that are not shown.
    """
    names = ", ".join(_text(each.setup.name) for each in reports) or "no loader"
    told = " · ".join(_text(value) for each in reports[:1] for value in vars(each.origin).values())
    missing = f"{dropped} earlier loaders are not shown" if dropped else ""
    return (
        f'{BEGINS}<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{names}: minato report</title><style>{_STYLE}</style></head><body>'
        f'<h1>minato report</h1><p class="dim">{told}</p>{"".join(map(_section, reports))}'
        f'<p class="dim">{missing}</p></body></html>\n'
    )


def _section(report: Report) -> str:
    setup, verdict, six = report.setup, report.verdict, headline(report)
    given = ((name, getattr(setup, name)) for name in _SETTINGS)
    settings = ", ".join(f"{name}={value}" for name, value in given if value is not None)
    lines = [*verdict.evidence, *([f"Try: {verdict.advice}"] if verdict.advice else [])]
    tables = {each.title: each for each in sections(report)}
    slowest = tables.pop("Slowest samples", None)
    parts = [
        f'<section><h2>{_text(setup.name)}</h2><p class="dim">{_text(settings)}</p>',
        f'<div class="verdict"><p><b>{_text(verdict.summary)}</b></p>',
        *(f"<p>{_text(line)}</p>" for line in lines),
        f'</div><div class="tiles">{_tiles(report)}</div>' if six else "</div>",
        _table(Section("", (), [*six])),
        f'<div class="charts">{_waiting_chart(report)}{_stages_chart(report)}</div>',
    ]
    if slowest is not None:
        parts += [
            "<h3>Slowest samples</h3>",
            _table(slowest._replace(rows=slowest.rows[:_SLOWEST])),
        ]
    more = "".join(f"<h3>{_text(each.title)}</h3>{_table(each)}" for each in tables.values())
    if more:
        parts.append(f"<details><summary>All figures</summary>{more}</details>")
    return "".join([*parts, "</section>"])


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _tiles(report: Report) -> str:
    run = report.run
    tiles = {
        "waiting": format_value(run.waiting.share, "share"),
        "samples/s": digits(run.throughput.samples_per_s),
        "workers busy": format_value(run.workers.busy_share, "share"),
        "estimated speed-up": f"{digits(report.verdict.speedup)}×",
    }
    return "".join(f"<div><b>{_text(value)}</b>{name}</div>" for name, value in tiles.items())


def _table(section: Section) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in section.columns)
    rows = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in section.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>' if body else ""


# ---- charts ---------------------------------------------------------------------------------


def _figure(title: str, note: str, height: float, content: Iterable[str]) -> str:
    return (
        f"<figure><figcaption>{title} <span>{_text(note)}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{title}">{"".join(content)}</svg></figure>'
    )


def _label(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{_text(words)}</text>'


def _bar(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _waiting_chart(report: Report) -> str:
    """The share of waiting in equal parts of the time, from 0 s and from 0 to 100 %."""
    times, sums, begin_s, before_s = [0.0], [0.0], 0.0, 0.0
    for epoch in report.epochs:
        whole = epoch.throughput.wall_s, epoch.waiting.total_s
        for at_s, waited_s in (*epoch.waited, whole):
            times.append(begin_s + at_s)
            sums.append(before_s + waited_s)
        begin_s, before_s = times[-1], sums[-1]
    if begin_s <= 0:
        return ""
    edges = [begin_s * part / _BARS for part in range(_BARS + 1)]
    shares = np.clip(np.diff(np.interp(edges, times, sums)) * _BARS / begin_s, 0, 1).tolist()
    right = _WIDTH - 8
    tall, wide = _BASE - _TOP, (right - _LEFT) / _BARS
    content = [
        *(
            _bar(_LEFT + i * wide, _BASE - tall * share, wide, tall * share)
            for i, share in enumerate(shares)
        ),
        f'<path class="axis" d="M{_LEFT} {_TOP}V{_BASE}H{right}M{_LEFT} {_TOP}H{right}"/>',
        _label(_LEFT - 6, _TOP + 4, "100 %", "end"),
        _label(_LEFT - 6, _BASE, "0 %", "end"),
        _label(_LEFT, _BASE + 16, "0 s"),
        _label(right, _BASE + 16, format_value(begin_s, "s"), "end"),
    ]
    return _figure("Waiting over time", "of the loop, epoch after epoch", _BASE + 22, content)


def _stages_chart(report: Report) -> str:
    """The share of each stage, from 0 to 100 %."""
    stages = [each for each in report.run.stages if each.share]
    content: list[str] = []
    for number, stage in enumerate(stages):
        y = _TOP + number * _ROW
        name = stage.name if len(stage.name) <= _NAME else f"{stage.name[: _NAME - 1]}…"
        content += [
            _label(0, y + 12, name),
            _bar(_NAMES, y, (_RIGHT - _NAMES) * stage.share, _ROW - 8),
            _label(_WIDTH, y + 12, format_value(stage.share, "share"), "end"),
        ]
    base = _TOP + len(stages) * _ROW
    content += [
        f'<path class="axis" d="M{_NAMES} {_TOP - 4}V{base}H{_RIGHT}V{_TOP - 4}"/>',
        _label(_NAMES, base + 16, "0 %"),
        _label(_RIGHT, base + 16, "100 %", "end"),
    ]
    note = "of the time in which samples are loaded"
    return _figure("Stages", note, base + 22, content) if stages else ""
