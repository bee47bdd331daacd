"""A report as text: values with units, six figures, tables of all details; and reports as a page of HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from minato._support.values import counted, digits, printable, seconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from minato.observe.report import Report


T = TypeVar("T")

_PREFIXES = ("", "k", "M", "G", "T")
_KEPT_EPOCHS = 8


def lines_of(report: Report) -> list[str]:
    """At most twelve lines: the verdict, six figures, the change to make and its effect."""
    verdict = report.verdict
    lines = [verdict.summary, *verdict.evidence]
    lines += [f"  {name:15}{words}" for name, words in headline(report)]
    if verdict.advice:
        lines.append(f"Try: {verdict.advice}")
    if verdict.speedup > 1.005:
        lines.append(f"Estimated speed-up: {digits(verdict.speedup)}×")
    return [printable(line) for line in lines]


def headline(report: Report) -> list[tuple[str, str]]:
    """Names and texts of the six figures of the run that say most; none before the first batch."""
    run = report.run
    waiting, rates, workers, window = run.waiting, run.throughput, run.workers, run.prefetch_window
    batches = rates.batches
    if not batches:
        return []

    def per_batch(seconds: float) -> str:
        return f"{format_value(seconds / batches, 's')} per batch"

    step_s = rates.wall_s - waiting.total_s - waiting.pin_memory_s - waiting.ranks_s
    waits, rate = format_value(waiting.share, "share"), digits(rates.samples_per_s)
    busy = "none, loading takes"
    if report.setup.num_workers:
        busy = f"{workers.count}, busy {format_value(workers.busy_share, 'share')} of their time,"
    rows = [
        ("waiting", f"{waits} of the loop's time, {per_batch(waiting.total_s)}"),
        ("training step", per_batch(max(step_s, 0.0))),
        ("throughput", f"{rate} samples/s, {digits(rates.batches_per_s)} batches/s"),
        ("workers", f"{busy} {per_batch(workers.busy_s)}"),
    ]
    if waiting.ranks_s:
        rows.insert(1, ("other ranks", f"waits for them {per_batch(waiting.ranks_s)}"))
    if run.stages:
        stage = max(run.stages, key=lambda stage: stage.share)
        share = format_value(stage.share, "share")
        # Not the mean of the timed ones: of cheap samples these are few, and often the first of a file or a group.
        cost = format_value(stage.share * workers.busy_s / max(rates.samples, 1), "s")
        rows.append(("slowest", f"{stage.name}, {share} of loading, {cost} per sample"))
    if report.setup.num_workers:
        open_, most = digits(window.in_flight), counted(window.limit, "batches")
        told = f"{open_} of at most {most} in flight"
        if window.in_flight > window.limit:  # until their size was known
            told = f"{open_} in flight, now at most {most}"
        rows.append(("prefetch", told))
    return rows


def details(report: Report) -> str:
    """All figures but those that are zero, in tables."""
    return "\n\n".join(map(_table, sections(report)))


def _table(section: Section) -> str:
    rows = [section.columns, *section.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, ("", *row), (0, *widths))).rstrip() for row in rows)
    return "\n".join([section.title, *lines])


# ---- tables ---------------------------------------------------------------------------------


class Section(NamedTuple):
    """A table: its title, the names of its columns, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sections(report: Report) -> list[Section]:
    """The tables of a report, without figures that are zero, and without control characters."""
    run = report.run
    parts: dict[str, DataclassInstance] = {
        "Waiting": run.waiting,
        "Throughput": run.throughput,
        "Workers": run.workers,
        "Prefetch window": run.prefetch_window,
        "Machine": run.machine,
        "Stragglers": run.stragglers,
        "Errors": run.errors,
        "Reads and cache": run.reads,
    }
    tables = [
        *(_figures(title, part) for title, part in parts.items()),
        _table_of(
            "GPUs",
            run.gpus,
            {
                "GPU": lambda gpu: gpu.name,
                "idle": lambda gpu: format_value(gpu.idle_share, "share"),
                "busy otherwise": lambda gpu: format_value(gpu.busy_share, "share"),
                "memory": lambda gpu: format_value(gpu.memory_bytes, "bytes"),
                "of": lambda gpu: format_value(gpu.total_bytes, "bytes"),
                "samples": lambda gpu: str(gpu.samples),
            },
        ),
        _table_of(
            "Dataset",
            [each for each in report.dataset.items() if each[1]],
            {"figure": lambda each: each[0], "value": lambda each: format_value(each[1], "")},
        ),
        _table_of(
            "Stages",
            [each for each in run.stages if each.share],
            {
                "stage": lambda stage: stage.name,
                "share": lambda stage: format_value(stage.share, "share"),
                "mean": lambda stage: format_value(stage.mean_s, "s"),
                "P50": lambda stage: format_value(stage.p50_s, "s"),
                "P90": lambda stage: format_value(stage.p90_s, "s"),
                "P99": lambda stage: format_value(stage.p99_s, "s"),
                "timed": lambda stage: str(stage.count),
            },
        ),
        *_tables_of_samples(report),
    ]
    return [table for table in tables if table.rows]


def _tables_of_samples(report: Report) -> list[Section]:
    return [
        _table_of(
            "Slowest samples",
            report.slowest,
            {
                "index": lambda each: str(each.index),
                "time": lambda each: format_value(each.cost_s, "s"),
                "epoch": lambda each: str(each.epoch),
                "slowest stage": lambda each: each.stage or "not timed",
                "of it": lambda each: format_value(each.stage_s, "s") if each.stage else "",
            },
        ),
        _table_of(
            "Epochs",
            report.epochs[-_KEPT_EPOCHS:],
            {
                "epoch": lambda each: each.name + ("" if each.finished else " (not finished)"),
                "time": lambda each: format_value(each.throughput.wall_s, "s"),
                "batches": lambda each: str(each.throughput.batches),
                "samples": lambda each: str(each.throughput.samples),
                "samples per s": lambda each: format_value(each.throughput.samples_per_s, ""),
                "waiting": lambda each: format_value(each.waiting.share, "share"),
                "first batch": lambda each: format_value(each.waiting.first_batch_s, "s"),
                "workers": lambda each: _span(each.workers.fewest, each.workers.most),
            },
        ),
    ]


def _table_of(title: str, items: Iterable[T], columns: dict[str, Callable[[T], str]]) -> Section:
    rows = [tuple(printable(text(item)) for text in columns.values()) for item in items]
    return Section(title, tuple(columns), rows)


def _figures(title: str, part: DataclassInstance) -> Section:
    columns: dict[str, Callable[[dataclasses.Field[Any]], str]] = {
        "figure": lambda each: _label(each.name, each.metadata["unit"]),
        "value": lambda each: format_value(getattr(part, each.name), each.metadata["unit"]),
        "how to read it": lambda each: each.metadata["reading"],
    }
    shown = [each for each in dataclasses.fields(part) if getattr(part, each.name)]
    return _table_of(title, shown, columns)


def _span(low: int, high: int) -> str:
    return str(high) if low == high else f"{low}–{high}"


def _label(name: str, unit: str) -> str:
    return (name.removesuffix("_s") if unit == "s" else name).replace("_", " ")


# ---- values ---------------------------------------------------------------------------------


def format_value(value: bool | float | str | None, unit: str) -> str:
    """A value with its unit, to three digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, str):
        return value or "–"
    if unit == "share":
        return f"{round(100 * value, 4):.3g} %" if value < 0.9995 or value > 1.0005 else "100 %"
    if unit == "s":
        return seconds(value)
    if unit == "per s":
        return f"{_scaled(value)}/s"
    if unit.startswith("bytes"):
        return f"{_scaled(value)}B{'/s' if unit != 'bytes' else ''}"
    if isinstance(value, int):
        return counted(value, unit).rstrip()
    return counted(digits(value), unit).rstrip()


def _scaled(value: float) -> str:
    value = float(f"{value:.3g}")
    for prefix in _PREFIXES:
        if value < 1000 or prefix == _PREFIXES[-1]:
            return f"{digits(value)} {prefix}"
        value /= 1000
    raise AssertionError


# ---- the page of HTML -----------------------------------------------------------------------


BEGINS = '<!doctype html>\n<html lang="en"><head><meta name="generator" content="minato">'
_SLOWEST = 5
_BARS = 60  # of the chart of waiting; each is the share of an equal part of the time
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
    """A complete page with a section for each report, and the number of loaders that are not shown."""
    names = ", ".join(_text(each.setup.name) for each in reports) or "no loader"
    told = " · ".join(_text(value) for each in reports[:1] for value in vars(each.origin).values())
    missing = f"not shown: {counted(dropped, 'earlier loaders')}" if dropped else ""
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
        _html_table(Section("", (), [*six])),
        f'<div class="charts">{_waiting_chart(report)}{_stages_chart(report)}</div>',
    ]
    if slowest is not None:
        first = slowest._replace(rows=slowest.rows[:_SLOWEST])
        parts += ["<h3>Slowest samples</h3>", _html_table(first)]
    more = "".join(f"<h3>{_text(each.title)}</h3>{_html_table(each)}" for each in tables.values())
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


def _html_table(section: Section) -> str:
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


def _svg_text(x: float, y: float, words: str, anchor: str = "start") -> str:
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
        _svg_text(_LEFT - 6, _TOP + 4, "100 %", "end"),
        _svg_text(_LEFT - 6, _BASE, "0 %", "end"),
        _svg_text(_LEFT, _BASE + 16, "0 s"),
        _svg_text(right, _BASE + 16, format_value(begin_s, "s"), "end"),
    ]
    return _figure("Waiting over time", "of the loop, epoch after epoch", _BASE + 22, content)


def _stages_chart(report: Report) -> str:
    stages = [each for each in report.run.stages if each.share]
    content: list[str] = []
    for number, stage in enumerate(stages):
        y = _TOP + number * _ROW
        name = stage.name if len(stage.name) <= _NAME else f"{stage.name[: _NAME - 1]}…"
        content += [
            _svg_text(0, y + 12, name),
            _bar(_NAMES, y, (_RIGHT - _NAMES) * stage.share, _ROW - 8),
            _svg_text(_WIDTH, y + 12, format_value(stage.share, "share"), "end"),
        ]
    base = _TOP + len(stages) * _ROW
    content += [
        f'<path class="axis" d="M{_NAMES} {_TOP - 4}V{base}H{_RIGHT}V{_TOP - 4}"/>',
        _svg_text(_NAMES, base + 16, "0 %"),
        _svg_text(_RIGHT, base + 16, "100 %", "end"),
    ]
    note = "of the time in which samples are loaded"
    return _figure("Stages", note, base + 22, content) if stages else ""
