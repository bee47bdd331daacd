"""A report as text: values with their units, six figures between verdict and advice, and tables of all details."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from minato._support.text import digits, printable, seconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from minato.observe.report import Report

__all__ = ["Section", "details", "format_value", "headline", "lines_of", "sections"]

T = TypeVar("T")

_PREFIXES = ("", "k", "M", "G", "T")
_KEPT_EPOCHS = 8
"""Only the latest epochs are shown."""


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
    busy = f"{workers.count}, busy {format_value(workers.busy_share, 'share')} of their time, "
    rows = [
        (
            "waiting",
            f"{format_value(waiting.share, 'share')} of the loop's time, {per_batch(waiting.total_s)}",
        ),
        ("training step", per_batch(max(step_s, 0.0))),
        (
            "throughput",
            f"{digits(rates.samples_per_s)} samples/s, {digits(rates.batches_per_s)} batches/s",
        ),
        (
            "workers",
            (busy if report.setup.num_workers else "none, loading takes ")
            + per_batch(workers.busy_s),
        ),
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
        rows.append(
            ("prefetch", f"{digits(window.in_flight)} of at most {window.limit} batches in flight")
        )
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
        return f"{100 * value:.3g} %" if value < 0.9995 or value > 1.0005 else "100 %"
    if unit == "s":
        return seconds(value)
    if unit == "per s":
        return f"{_scaled(value)}/s"
    if unit.startswith("bytes"):
        return f"{_scaled(value)}B{'/s' if unit != 'bytes' else ''}"
    if isinstance(value, int):
        return f"{value} {unit}".rstrip()
    return f"{digits(value)} {unit}".rstrip()


def _scaled(value: float) -> str:
    value = float(f"{value:.3g}")
    for prefix in _PREFIXES:
        if value < 1000 or prefix == _PREFIXES[-1]:
            return f"{digits(value)} {prefix}"
        value /= 1000
    raise AssertionError
