"""The charts of a report, as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from minato.observe.report.figures import ReportFigures
from minato.observe.report.text import format_value

__all__ = ["all_of"]

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 400, 170, 52, 26, 12
"""Narrow enough for a phone: a unit is about a pixel there, so text of size 12 is legible."""
_ROW = 22
_LABEL, _BAR = 150, 175
_COLOURS = ("#2563a8", "#d9822b", "#3a9d5d")


def all_of(report: ReportFigures) -> Iterator[str]:
    """The charts that have data."""
    line = report.run.timeline
    if len(line) > 1:
        times = [point.at_s for point in line]
        pairs = list(itertools.pairwise(line))
        shares = [
            (later.waited_s - point.waited_s) / max(later.at_s - point.at_s, 1e-9)
            for point, later in pairs
        ]
        yield _lines("Waiting over time", times[1:], {"share of time in next()": shares}, "share")
        state: dict[str, Sequence[float]] = {
            "batches in flight": [point.in_flight for point in line],
            "ready batches": [point.ready for point in line],
            "workers": [point.workers for point in line],
        }
        yield _lines("Workers and batches in flight over time", times, state, "")
    if report.costs:
        yield _histogram(report)
    if report.run.stages:
        stages = [(stage.name, stage.share) for stage in report.run.stages]
        yield _bars("Share of the workers' time", stages, "share")
    if report.slowest:
        slowest = [(f"{each.index} {each.stage}", each.cost_s) for each in report.slowest]
        yield _bars("Slowest samples", slowest, "s")


def _figure(title: str, height: int, content: str, legend: str = "") -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}<svg viewBox='0 0 {_WIDTH} {height}' "
        f"role='img' aria-label='{escape(title, quote=True)}' font-size='12' font-family='sans-serif' "
        f"fill='currentColor'>{content}</svg></figure>"
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(words)}</text>"


def _axes(low: str, high: str, top: str) -> str:
    base = _HEIGHT - _BELOW
    return (
        f"<path d='M{_LEFT} {_ABOVE}V{base}H{_WIDTH - 8}' fill='none' stroke='#8888'/>"
        + _text(_LEFT, _HEIGHT - 8, low)
        + _text(_WIDTH - 8, _HEIGHT - 8, high, "end")
        + _text(_LEFT - 6, _ABOVE + 8, top, "end")
        + _text(_LEFT - 6, base, "0", "end")
    )


def _lines(
    title: str, times: Sequence[float], series: dict[str, Sequence[float]], unit: str
) -> str:
    top = max(max((max(values) for values in series.values()), default=0.0), 1e-9)
    first, last = times[0], max(times[-1], times[0] + 1e-9)
    width, height = _WIDTH - 8 - _LEFT, _HEIGHT - _BELOW - _ABOVE
    legend = "".join(
        f"<span style='color:{colour};margin-right:1em'>{escape(name)}</span>"
        for colour, name in zip(_COLOURS, series, strict=False)
    )
    parts = [
        _axes(format_value(first, "s"), format_value(last, "s"), format_value(float(top), unit))
    ]
    for number, values in enumerate(series.values()):
        colour = _COLOURS[number]
        points = " ".join(
            f"{_LEFT + width * (at - first) / (last - first):.1f},{_ABOVE + height * (1 - value / top):.1f}"
            for at, value in zip(times, values, strict=True)
        )
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>"
        )
    return _figure(title, _HEIGHT, "".join(parts), legend)


def _histogram(report: ReportFigures) -> str:
    costs = report.costs
    top = max(count for *_, count in costs)
    width, height = (_WIDTH - 8 - _LEFT) / len(costs), _HEIGHT - _BELOW - _ABOVE
    parts = [_axes(format_value(costs[0][0], "s"), format_value(costs[-1][1], "s"), str(top))]
    threshold_s = report.run.stragglers.threshold_s
    for number, (low_s, high_s, count) in enumerate(costs):
        bar = height * count / top
        slow = 0 < threshold_s <= low_s
        parts.append(
            f"<rect x='{_LEFT + number * width:.1f}' y='{_ABOVE + height - bar:.1f}' width='{width * 0.9:.1f}' "
            f"height='{bar:.1f}' fill='{_COLOURS[1] if slow else _COLOURS[0]}'/>"
        )
        if low_s <= threshold_s < high_s:
            x = _LEFT + number * width
            parts.append(f"<path d='M{x:.1f} {_ABOVE}v{height}' stroke='{_COLOURS[1]}'/>")
            words = f"slow above {format_value(threshold_s, 's')}"
            parts.append(_text(min(x + 4, _WIDTH - 120), _ABOVE + 10, words))
    return _figure("Cost of samples (number by time, logarithmic)", _HEIGHT, "".join(parts))


def _bars(title: str, rows: Sequence[tuple[str, float]], unit: str) -> str:
    top = max(max(value for _, value in rows), 1e-9)
    parts = []
    for number, (name, value) in enumerate(rows):
        y = _ABOVE + number * _ROW
        wide = _BAR * value / top
        parts.append(_text(0, y + 12, name if len(name) <= 22 else f"{name[:21]}…"))
        parts.append(
            f"<rect x='{_LABEL}' y='{y}' width='{wide:.1f}' height='{_ROW - 6}' fill='{_COLOURS[0]}'/>"
        )
        parts.append(_text(_LABEL + 6 + wide, y + 12, format_value(value, unit)))
    return _figure(title, _ABOVE + len(rows) * _ROW + 4, "".join(parts))
