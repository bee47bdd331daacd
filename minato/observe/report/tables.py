"""A report as tables of text, for every renderer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from minato._support.text import printable
from minato.observe.report.figures import ReportFigures
from minato.observe.report.units import format_value

__all__ = ["Section", "sections"]

_KEPT_EPOCHS = 8
"""Only the latest epochs are shown."""


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
    run, bias = report.run, report.bias
    figures = [
        Section(title, ("figure", "value", "how to read it"), _figures(part))
        for title, part in (
            ("Waiting", run.waiting),
            ("Throughput", run.throughput),
            ("Workers", run.workers),
            ("Prefetch window", run.prefetch_window),
            ("Machine", run.machine),
            ("Stragglers", run.stragglers),
            *([("Bias", bias)] if bias.samples or bias.skipped_label is not None else []),
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
                    _span([point.workers for point in each.timeline]),
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


def _span(counts: Sequence[int]) -> str:
    """The smallest and the largest count."""
    low, high = min(counts, default=0), max(counts, default=0)
    return str(high) if low == high else f"{low}–{high}"


def _label(name: str, unit: str) -> str:
    return (name.removesuffix("_s") if unit == "s" else name).replace("_", " ")
