"""From what a journal has noted to a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minato._core.histogram import Histogram
from minato._system import available_cores
from minato.observe.report.bias import Labels, bias_of
from minato.observe.report.figures import (
    Batches,
    Gpu,
    Host,
    Period,
    Point,
    Reads,
    Report,
    Room,
    Setup,
    Slowness,
    SlowSample,
    Stage,
    Trouble,
    Waiting,
    Workers,
)
from minato.observe.report.verdict import judge
from minato.observe.stats.counters import Readings
from minato.observe.stats.epoch_log import EpochNotes, Journal
from minato.observe.stats.summary import to_words

__all__ = ["report_of", "setup_of"]

_FIRST_BUCKET = 8
_COST_CLASSES = 48


def report_of(
    setup: Setup,
    steps: Sequence[str],
    journal: Journal,
    labels: Labels | None = None,
) -> Report:
    """The report of what a loader did so far.

    Args:
        steps: Names of the transforms.
        labels: Tells the label of a key.
    """
    notes = journal.notes()
    epochs = tuple(_period(each, f"epoch {each.epoch}", steps) for each in notes)
    whole = EpochNotes(-1)
    if notes:
        last = notes[-1]
        whole.line, whole.decision, whole.held_by_budget = (
            last.line,
            last.decision,
            last.held_by_budget,
        )
        whole.finished, whole.machine = last.finished, last.machine
    whole.readings = sum((each.readings for each in notes), journal.forgotten)
    run = _period(whole, "run", steps)
    slowest = tuple(
        SlowSample(
            each.key,
            each.cost_ns / 1e9,
            each.epoch,
            _stage_name(each.stage, steps),
            each.stage_ns / 1e9,
        )
        for each in journal.slow
    )
    costs = _classes(whole.readings.histograms.get("total", Histogram()))
    late = _histogram(whole.readings, "late")
    bias, warnings = bias_of(journal.reservoir.rows, late, labels, journal.skipped)
    return Report(setup, judge(setup, run), run, epochs, slowest, costs, bias, warnings)


def setup_of(loader: Any, fetch_concurrency: int, may_fetch_more: bool, bounded: bool) -> Setup:
    """What a report says about a loader's arguments.

    Args:
        fetch_concurrency: Samples that each worker reads at once.
        may_fetch_more: Whether ``fetch_concurrency`` is possible.
        bounded: Whether ``prefetch_factor`` was given.
    """
    return Setup(
        loader.num_workers,
        loader._options.worker_kind,
        loader._options.order,
        loader.batch_size,
        fetch_concurrency,
        may_fetch_more,
        int(loader.prefetch_factor) if bounded and loader.prefetch_factor else None,
        loader.persistent_workers,
        bool(loader.pin_memory),
        available_cores(whole_node=bool(loader.shared_pool)),
        loader._options.name,
    )


def _period(notes: EpochNotes, name: str, steps: Sequence[str]) -> Period:
    readings = notes.readings
    counts = readings.counts
    last = notes.line.points[-1][-1] if notes.line.points else None
    waits = _histogram(readings, "wait")
    wall_s = counts["wall_ns"] / 1e9
    waited_s = (counts["start_ns"] + waits.total) / 1e9
    waiting = Waiting(
        waited_s,
        _ratio(waited_s, wall_s),
        waits.percentile(0.5) / 1e9,
        waits.percentile(0.99) / 1e9,
        waits.max / 1e9,
        _ratio(counts["start_ns"] / 1e9, counts["epochs"]),
        _ratio(counts["first_ns"] / 1e9, counts["epochs"]),
        counts["slept_ns"] / 1e9,
        counts["pinned_ns"] / 1e9,
    )
    step = _histogram(readings, "step")
    batches = Batches(
        wall_s,
        counts["batches"],
        counts["samples"],
        counts["bytes"],
        _ratio(counts["batches"], wall_s),
        _ratio(counts["samples"], wall_s),
        _ratio(counts["bytes"], wall_s),
        step.percentile(0.5) / 1e9,
        step.mean / 1e9,
        _ratio(counts["delivered"], counts["asked"]),
    )
    line = notes.line.points
    room = Room(
        _mean(_ratio(each.ready, each.limit) for *_, each in line),
        _mean(each.in_flight for *_, each in line),
        0 if last is None else last.limit,
        max((each.memory_bytes for *_, each in line), default=0),
        0 if last is None else last.budget_bytes,
        notes.held_by_budget,
    )
    return Period(
        name,
        counts["epochs"],
        notes.finished,
        waiting,
        batches,
        _workers(readings, 0 if last is None else last.workers),
        room,
        _slowness(notes),
        Trouble(*(counts[each.name] for each in dataclasses.fields(Trouble))),
        _reads(counts),
        Host(
            len(notes.machine.gpus),
            _ratio(counts["disk_read_bytes"], wall_s),
            notes.machine.available_bytes,
            notes.machine.limit_bytes,
        ),
        _gpus(notes),
        _stages(readings, steps),
        tuple(
            Point(at_ns / 1e9, number, waited_ns / 1e9, *standing[:-1])
            for at_ns, number, waited_ns, standing in line
        ),
    )


def _reads(counts: Mapping[str, int]) -> Reads:
    hits, misses = counts["cache_hits"], counts["cache_misses"]
    return Reads(
        counts["source_retries"],
        counts["fetch_hedged"],
        counts["fetch_hedges_won"],
        hits,
        misses,
        _ratio(hits, hits + misses),
        counts["cache_damaged"],
        counts["cache_errors"],
        counts["cache_full"],
        counts["cache_stored_bytes"],
    )


def _workers(readings: Readings, count: int) -> Workers:
    counts, busy_ns = readings.counts, readings.counts["busy_ns"]
    there_ns = busy_ns + counts["idle_ns"]
    room_ns = min(_histogram(readings, "room").total, counts["idle_ns"])
    # The clock of a thread stands still while it queues for a core.
    queued = _ratio(max(counts["queued_ns"], 0), max(counts["ran_ns"], 0))
    on_core = _ratio(_histogram(readings, "cpu").total, _timed_ns(readings)) * (1 + queued)
    return Workers(
        count,
        busy_ns / 1e9,
        _ratio(busy_ns, there_ns),
        _ratio(counts["idle_ns"] - room_ns, there_ns),
        _ratio(room_ns, there_ns),
        min(on_core, 1.0),
        min(_ratio(counts["cores_used_ns"], counts["cores_there_ns"]), 1.0),
        counts["deaths"],
    )


def _slowness(notes: EpochNotes) -> Slowness:
    decision, readings = notes.decision, notes.readings
    phase, threshold_ns, percentile, share = "", 0, 0.0, 0.0
    if decision is not None:
        threshold_ns, percentile, share, phase = decision
    deferred = _histogram(readings, "deferred")
    lag = _histogram(readings, "lag")
    return Slowness(
        phase,
        threshold_ns / 1e9,
        percentile,
        share,
        deferred.count,
        deferred.percentile(0.99) / 1e9,
        lag.percentile(0.5),
        lag.max,
    )


def _gpus(notes: EpochNotes) -> tuple[Gpu, ...]:
    counts, found = notes.readings.counts, []
    for number, (name, total_bytes) in enumerate(notes.machine.gpus):
        samples, idle, busy_percent, used_mib = (
            counts[f"gpu{number}_{what}"]
            for what in ("samples", "idle", "busy_percent", "used_mib")
        )
        found.append(
            Gpu(
                f"{number} {name}",
                samples,
                _ratio(idle, samples),
                _ratio(busy_percent / 100, samples - idle),
                round(_ratio(used_mib, samples) * 2**20),
                total_bytes,
            )
        )
    return tuple(found)


def _stages(readings: Readings, steps: Sequence[str]) -> tuple[Stage, ...]:
    """The dataset, each transform, and what workers do with finished samples."""
    total = _histogram(readings, "total")
    busy_ns = max(readings.counts["busy_ns"], total.total)
    if not busy_ns:
        return ()
    timed_ns = _timed_ns(readings)
    named = [("dataset", "source", "dataset")]
    named += [(name, "transform", f"{number} {name}") for number, name in enumerate(steps)]
    stages = []
    if timed_ns:
        for name, kind, key in named:
            values = _histogram(readings, key)
            share = values.total / timed_ns * total.total / busy_ns
            stages.append(_stage(name, kind, values, share))
    else:
        stages.append(_stage("samples", "source", total, total.total / busy_ns))
    left_ns = busy_ns - total.total
    mean_s = _ratio(left_ns / 1e9, total.count)
    count = total.count
    assembly = Stage(
        "collate and copy", "assembly", count, mean_s, mean_s, mean_s, mean_s, left_ns / busy_ns
    )
    return (*stages, assembly)


def _stage(name: str, kind: str, values: Histogram, share: float) -> Stage:
    p50, p90, p99 = (values.percentile(q) / 1e9 for q in (0.5, 0.9, 0.99))
    return Stage(name, kind, values.count, values.mean / 1e9, p50, p90, p99, share)


def _timed_ns(readings: Readings) -> int:
    """Time of all stages of the samples that were timed stage by stage."""
    names = ["dataset", *(name for name in readings.histograms if name[:1].isdigit())]
    return sum(_histogram(readings, name).total for name in names)


def _stage_name(stage: int, steps: Sequence[str]) -> str:
    if stage == -1:
        return "dataset"
    return steps[stage] if 0 <= stage < len(steps) else ""


def _classes(costs: Histogram) -> tuple[tuple[float, float, int], ...]:
    """The costs of samples in a few classes of equal ratio, in seconds."""
    words = {int(i): count for i, count in to_words(costs).items() if int(i) >= _FIRST_BUCKET}
    if not words:
        return ()
    low, high = _edge(min(words) - _FIRST_BUCKET), _edge(max(words) - _FIRST_BUCKET + 1)
    ratio = max((high / max(low, 1)) ** (1 / _COST_CLASSES), 17 / 16)
    found: list[list[float]] = []
    edge = float(max(low, 1))
    for i, count in sorted(words.items()):
        at = _edge(i - _FIRST_BUCKET)
        while not found or at >= found[-1][1]:
            found.append([edge, edge * ratio, 0])
            edge *= ratio
        found[-1][2] += count
    return tuple((low / 1e9, high / 1e9, int(count)) for low, high, count in found)


def _edge(bucket: int) -> int:
    """The smallest value in a bucket of a histogram."""
    if bucket < 32:
        return bucket
    shift = bucket // 16 - 1
    return (bucket - shift * 16) << shift


def _histogram(readings: Readings, name: str) -> Histogram:
    return readings.histograms.get(name) or Histogram()


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held) if held else 0.0
