"""The metrics of a loader: name, kind, unit and meaning of each, and their values at one moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from minato.observe.epoch_log import Totals

__all__ = ["CATALOG", "Metric", "values_of"]


class Metric(NamedTuple):
    """One metric of a loader.

    Attributes:
        name: Its key in ``loader.metrics()``; with ``minato_`` before it, its name in Prometheus.
        kind: A ``counter`` only grows, over all epochs; a ``gauge`` is of the newest epoch.
        unit: ``s``, ``bytes``, ``share`` (0 to 1), ``per s``, or the things counted.
        meaning: In one sentence.
        value: Reads it.
        exported: Whether monitoring systems get it; they derive rates from counters themselves.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    value: Callable[[Totals], float]
    exported: bool = True


def _counter(name: str, unit: str, meaning: str, count: str, scale: float = 1.0) -> Metric:
    """A counter with the value of one count.

    Args:
        scale: The count's unit in ``unit``.
    """
    return Metric(name, "counter", unit, meaning, lambda log: log.counts[count] * scale)


_NS = 1e-9

CATALOG = (
    _counter("batches_total", "batches", "Batches returned to the training loop.", "batches"),
    _counter(
        "samples_total",
        "samples",
        "Samples in the returned batches, without those that were skipped.",
        "samples",
    ),
    _counter("batch_bytes_total", "bytes", "Bytes in the returned batches.", "bytes"),
    _counter(
        "wait_seconds_total",
        "s",
        "Time that the training loop waited for batches.",
        "waited_ns",
        _NS,
    ),
    _counter("epoch_seconds_total", "s", "Duration of all epochs.", "wall_ns", _NS),
    _counter(
        "worker_busy_seconds_total", "s", "Time that workers processed samples.", "busy_ns", _NS
    ),
    _counter("worker_idle_seconds_total", "s", "Time that workers were idle.", "idle_ns", _NS),
    _counter("worker_deaths_total", "workers", "Workers that died.", "deaths"),
    _counter("sample_retries_total", "retries", "Samples that were loaded again.", "retries"),
    _counter("skipped_samples_total", "samples", "Samples that were skipped.", "skipped"),
    Metric("epoch", "gauge", "epoch", "Number of the epoch.", lambda log: log.epoch),
    Metric(
        "wait_ratio",
        "gauge",
        "share",
        "Share of the epoch that the training loop waited for batches.",
        lambda log: min(log.waited_ns / log.wall_ns, 1.0) if log.wall_ns else 0.0,
    ),
    Metric(
        "samples_per_second",
        "gauge",
        "per s",
        "Samples returned in the epoch, divided by its duration.",
        lambda log: log.samples * 1e9 / log.wall_ns if log.wall_ns else 0.0,
        exported=False,
    ),
    Metric("workers", "gauge", "workers", "Active workers.", lambda log: log.loader.workers),
    Metric(
        "ready_batches", "gauge", "batches", "Batches that are ready.", lambda log: log.loader.ready
    ),
    Metric(
        "in_flight_batches",
        "gauge",
        "batches",
        "Batches that are open or ready.",
        lambda log: log.loader.in_flight,
    ),
    Metric(
        "prefetch_window_batches",
        "gauge",
        "batches",
        "Largest number of batches in flight.",
        lambda log: log.loader.limit,
    ),
    Metric(
        "in_flight_bytes",
        "gauge",
        "bytes",
        "Approximate memory of the batches in flight.",
        lambda log: log.loader.memory_bytes,
    ),
    Metric(
        "memory_budget_bytes",
        "gauge",
        "bytes",
        "Limit of the memory of batches in flight.",
        lambda log: log.loader.budget_bytes,
    ),
)
"""All metrics, in the order in which they are shown."""


def values_of(totals: Totals) -> dict[str, float]:
    """The value of each metric; always the same keys, 0 for what is not known yet."""
    return {metric.name: float(metric.value(totals)) for metric in CATALOG}
