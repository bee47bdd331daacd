"""A report as rows of text, which each way of showing it lays out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minato._support.text import printable

if TYPE_CHECKING:
    from minato.observe.report.figures import Report

__all__ = ["Section", "in_words", "sections"]

_PREFIXES = ("", "k", "M", "G", "T")
_KEPT_EPOCHS = 8
"""Of more epochs than this, only the latest are shown."""


class Section(NamedTuple):
    """A table: its title, the names of its columns, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sections(report: Report) -> list[Section]:
    """The tables of a report; names and keys without control characters."""
    return [
        section._replace(rows=[tuple(map(printable, row)) for row in section.rows])
        for section in _sections(report)
    ]


def _sections(report: Report) -> list[Section]:
    run, bias = report.run, report.bias
    figures = [
        Section(title, ("figure", "value", "how to read it"), _figures(part))
        for title, part in (
            ("Waiting", run.waiting),
            ("Batches", run.batches),
            ("Workers", run.workers),
            ("Room", run.room),
            ("Machine", run.host),
            ("Slow samples", run.slowness),
            *([("Bias", bias)] if bias.samples or bias.skipped_label is not None else []),
            ("Trouble", run.trouble),
            *([("Reads and cache", run.reads)] if any(vars(run.reads).values()) else []),
        )
    ]
    return [
        *figures,
        Section(
            "GPUs",
            ("GPU", "idle", "busy otherwise", "memory", "of", "looks"),
            [
                (
                    each.name,
                    in_words(each.idle_share, "share"),
                    in_words(each.busy_share, "share"),
                    in_words(each.memory_bytes, "bytes"),
                    in_words(each.total_bytes, "bytes"),
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
                    in_words(stage.share, "share"),
                    *(
                        in_words(value, "s")
                        for value in (stage.mean_s, stage.p50_s, stage.p90_s, stage.p99_s)
                    ),
                    str(stage.count),
                )
                for stage in run.stages
            ],
        ),
        Section(
            "Slowest samples",
            ("index", "took", "epoch", "most of it in", "which took"),
            [
                (
                    str(each.index),
                    in_words(each.cost_s, "s"),
                    str(each.epoch),
                    each.stage or "–",
                    in_words(each.stage_s, "s") if each.stage else "–",
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
                    in_words(each.batches.wall_s, "s"),
                    str(each.batches.batches),
                    str(each.batches.samples),
                    in_words(each.batches.samples_per_s, ""),
                    in_words(each.waiting.share, "share"),
                    in_words(each.waiting.first_batch_s, "s"),
                    _span([point.workers for point in each.line]),
                )
                for each in report.epochs[-_KEPT_EPOCHS:]
            ],
        ),
    ]


def in_words(value: Any, unit: str) -> str:
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
    if unit == "correlation":
        return f"{value:+.2f}"
    if unit == "per s":
        return f"{_scaled(value)}/s"
    if unit.startswith("bytes"):
        return f"{_scaled(value)}B{'/s' if unit != 'bytes' else ''}"
    if isinstance(value, int):
        return f"{value} {unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def _figures(part: Any) -> list[tuple[str, ...]]:
    return [
        (
            _label(each.name, each.metadata["unit"]),
            in_words(getattr(part, each.name), each.metadata["unit"]),
            each.metadata["reading"],
        )
        for each in dataclasses.fields(part)
    ]


def _span(counts: Sequence[int]) -> str:
    """How few and how many there were."""
    least, most = min(counts, default=0), max(counts, default=0)
    return str(most) if least == most else f"{least} to {most}"


def _label(name: str, unit: str) -> str:
    return (name.removesuffix("_s") if unit == "s" else name).replace("_", " ")


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
