"""Report: the figures of a loader from its epoch log, and every way to show them."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from minato._core import Histogram
from minato._distribution import __version__
from minato._support.values import counted
from minato.observe import figures, text
from minato.observe.epoch_log import EpochLog, EpochRecord, LoaderUse
from minato.observe.machine import MachineSnapshot
from minato.observe.observers import Metrics
from minato.observe.verdict import judge

if TYPE_CHECKING:
    from rich.text import Text

_ERRORS = dataclasses.fields(figures.Errors)


@dataclass(frozen=True, repr=False)
class Report:
    """The result of ``loader.report()``.

    ``print`` shows at most twelve lines: the verdict, six figures, the change to make and its estimated effect.

    Attributes:
        origin: The program.
        setup: The loader.
        verdict: The bottleneck, and the change to make.
        run: All epochs together; the prefetch window and the active workers are those of the last one with a batch.
            The fewest and the most workers are those of ``epochs``.
        epochs: The latest 64 that have ended, and the one that runs.
        slowest: The twenty slowest samples of the run.
        dataset: What ``minato_figures()`` of the dataset returned, if it has such a method.
    """

    origin: figures.Origin
    setup: figures.Setup
    verdict: figures.Verdict
    run: figures.Period
    epochs: tuple[figures.Period, ...]
    slowest: tuple[figures.SlowSample, ...]
    dataset: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data, with ``legend``: unit and reading of each.

        JSON has no number that is not finite: such a figure of the dataset is None.
        """
        told: dict[str, object] = dict(self.dataset)
        for name, value in told.items():
            if isinstance(value, float) and not math.isfinite(value):
                told[name] = None
        return {**dataclasses.asdict(self), "dataset": told, "legend": figures.legend()}

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def details(self) -> str:
        """All figures as text, in tables, with how to read each; without those that are zero."""
        return text.details(self)

    def to_html(self) -> str:
        """A page of HTML with charts, for a file to send to somebody; it loads nothing from elsewhere."""
        return text.page([self])

    def __repr__(self) -> str:
        return (
            f"<Report: {counted(self.run.epochs, 'epochs')}, "
            f"{counted(self.run.throughput.batches, 'batches')}, waiting "
            f"{text.format_value(self.run.waiting.share, 'share')}, bottleneck {self.verdict.bottleneck!r}>"
        )

    def __str__(self) -> str:
        return "\n".join(text.lines_of(self))

    def __rich__(self) -> Text:
        from rich.text import Text

        head, *rest = text.lines_of(self)
        return Text("\n").join([Text(head, "bold"), *map(Text, rest)])


def report_of(
    setup: figures.Setup,
    steps: Sequence[str],
    log: EpochLog,
    dataset: Mapping[str, float] = MappingProxyType({}),
) -> Report:
    """The report of all epochs of a loader so far, and figures of its dataset."""
    epochs, total = log.look()
    whole = dataclasses.replace(epochs[-1][0], epoch=-1) if epochs else EpochRecord(-1)
    seen = [each.use for each, _ in epochs if each.use.last is not None]
    whole.use = seen[-1] if seen else whole.use  # an epoch that has no batch yet shows nothing
    total.counts.update(log.reads)
    numbers = [number for each in seen for number in each.workers] or [0]
    run = _period(whole, total, "run", steps, (min(numbers), max(numbers)))
    return Report(
        origin=_origin(),
        setup=setup,
        verdict=judge(setup, run),
        run=run,
        epochs=tuple(
            _period(each, metrics, f"epoch {each.epoch}", steps, each.use.workers)
            for each, metrics in epochs
        ),
        slowest=tuple(
            figures.SlowSample(
                index=each.key,
                cost_s=each.cost_ns / 1e9,
                epoch=each.epoch,
                stage=_stage_name(each.stage, steps),
                stage_s=each.stage_ns / 1e9,
            )
            for each in log.slow
        ),
        dataset=dict(dataset),
    )


def _origin() -> figures.Origin:
    return figures.Origin(
        script="".join(sys.argv[:1]).encode("utf-8", "backslashreplace").decode(),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=f"{platform.node()}, {platform.system()} {platform.machine()}",
        versions=f"minato {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    )


def _period(
    record: EpochRecord,
    metrics: Metrics,
    name: str,
    steps: Sequence[str],
    numbers: tuple[int, int],
) -> figures.Period:
    """All figures of a record; ``numbers``: the fewest and the most active workers."""
    counts, use = metrics.counts, record.use
    return figures.Period(
        name=name,
        epochs=counts["epochs"],
        finished=record.finished,
        waiting=_waiting(metrics),
        throughput=_throughput(metrics),
        workers=_workers(metrics, use, *numbers),
        prefetch_window=figures.WindowFigures(
            occupancy=use.occupancy,
            in_flight=use.in_flight,
            limit=0 if use.last is None else use.last.limit,
            memory_bytes=use.memory_bytes,
            budget_bytes=0 if use.last is None else use.last.budget_bytes,
            held_by_budget=record.held_by_budget,
        ),
        stragglers=_stragglers(record, metrics),
        errors=figures.Errors(**{each.name: counts[each.name] for each in _ERRORS}),
        reads=_reads(counts),
        machine=figures.Machine(
            gpus=len(record.machine.gpus),
            disk_bytes_per_s=_ratio(counts["disk_read_bytes"], counts["wall_ns"] / 1e9),
            available_bytes=record.machine.available_bytes,
            limit_bytes=record.machine.limit_bytes,
        ),
        gpus=gpus_of(record.machine, counts),
        stages=_stages(metrics, steps),
        waited=() if name == "run" else _waited(use),
    )


_POINTS = 100  # of an epoch's curve of waiting, if it has as many; less than twice as many are kept


def _waited(use: LoaderUse) -> tuple[tuple[float, float], ...]:
    seconds = [ns / 1e9 for ns in use.waited]
    pairs = list(zip(seconds[::2], seconds[1::2], strict=True))
    return tuple(pairs[:: len(pairs) // _POINTS or 1])


def _waiting(metrics: Metrics) -> figures.Waiting:
    counts, waits = metrics.counts, _histogram(metrics, "wait")
    waited_ns = counts["waited_ns"]
    return figures.Waiting(
        total_s=waited_ns / 1e9,
        share=_ratio(waited_ns, counts["wall_ns"]),
        p50_s=waits.percentile(0.5) / 1e9,
        p99_s=waits.percentile(0.99) / 1e9,
        max_s=waits.max / 1e9,
        start_s=_ratio(counts["start_ns"] / 1e9, counts["epochs"]),
        end_s=_ratio(counts["end_ns"] / 1e9, counts["epochs"]),
        first_batch_s=_ratio(counts["first_ns"] / 1e9, counts["epochs"]),
        starved_s=counts["slept_ns"] / 1e9,
        pin_memory_s=counts["pinned_ns"] / 1e9,
        pinning_s=counts["pinning_ns"] / 1e9,
        queueing_s=counts["queueing_ns"] / 1e9,
        ranks_s=counts["ranks_ns"] / 1e9,
        sampler_s=counts["sampling_ns"] / 1e9,
    )


def _throughput(metrics: Metrics) -> figures.Throughput:
    counts, step = metrics.counts, _histogram(metrics, "step")
    wall_s = counts["wall_ns"] / 1e9
    return figures.Throughput(
        wall_s=wall_s,
        batches=counts["batches"],
        samples=counts["samples"],
        nbytes=counts["bytes"],
        batches_per_s=_ratio(counts["batches"], wall_s),
        samples_per_s=_ratio(counts["samples"], wall_s),
        bytes_per_s=_ratio(counts["bytes"], wall_s),
        step_p50_s=step.percentile(0.5) / 1e9,
        step_mean_s=step.mean / 1e9,
        coverage=_ratio(counts["delivered"], counts["asked"]),
    )


def _workers(metrics: Metrics, use: LoaderUse, fewest: int, most: int) -> figures.Workers:
    counts, busy_ns = metrics.counts, metrics.counts["busy_ns"]
    idle_ns = counts["idle_ns"]
    if use.last is not None:
        # Workers that stay are idle between two epochs, too, which is not the loader's doing.
        idle_ns = min(idle_ns, max(most * counts["wall_ns"] - busy_ns, 0))
    total_ns = busy_ns + idle_ns
    window_full_ns = min(_histogram(metrics, "window_full").total, idle_ns)
    # The clock of a thread does not advance while the thread is queued for a core.
    queued = _ratio(max(counts["queued_ns"], 0), max(counts["ran_ns"], 0))
    timed_ns, samples_ns = _timed_ns(metrics), _histogram(metrics, "total").total
    # Concurrent reads overlap.
    on_core = _ratio(_histogram(metrics, "cpu").total, min(timed_ns, samples_ns)) * (1 + queued)
    if not timed_ns or 2 * samples_ns < busy_ns or _histogram(metrics, "reading").count:
        # Calls that load a whole batch, collate it, or read items, are not timed like this.
        on_core = _ratio(max(counts["ran_ns"], 0) * (1 + queued), busy_ns)
    return figures.Workers(
        count=0 if use.last is None else use.last.workers,
        fewest=fewest,
        most=most,
        busy_s=busy_ns / 1e9,
        busy_share=_ratio(busy_ns, total_ns),
        busiest_share=min(_ratio(counts["busiest_ns"], counts["wall_ns"]), 1.0),
        no_work_share=_ratio(idle_ns - window_full_ns, total_ns),
        window_full_share=_ratio(window_full_ns, total_ns),
        on_core_share=min(on_core, 1.0),
        cores_share=min(_ratio(counts["cores_used_ns"], counts["cores_there_ns"]), 1.0),
        deaths=counts["deaths"],
    )


def _stragglers(record: EpochRecord, metrics: Metrics) -> figures.Stragglers:
    decision = record.decision
    deferred, lag = _histogram(metrics, "deferred"), _histogram(metrics, "lag")
    return figures.Stragglers(
        phase="" if decision is None else decision.phase,
        threshold_s=0.0 if decision is None else decision.threshold_ns / 1e9,
        percentile=0.0 if decision is None else decision.percentile,
        slow_share=0.0 if decision is None else decision.slow_share,
        deferrals=deferred.count,
        deferred_p99_s=deferred.percentile(0.99) / 1e9,
        lag_p50=lag.percentile(0.5),
        lag_max=lag.max,
    )


def _reads(counts: Mapping[str, int]) -> figures.Reads:
    hits, misses = counts["cache_hits"], counts["cache_misses"]
    named = ("cache_damaged", "cache_errors", "cache_full", "cache_stored_bytes")
    return figures.Reads(
        retries=counts["source_retries"],
        hedged=counts["fetch_hedged"],
        hedges_won=counts["fetch_hedges_won"],
        cache_hits=hits,
        cache_misses=misses,
        cache_hit_rate=_ratio(hits, hits + misses),
        **{name: counts[name] for name in named},
    )


def gpus_of(machine: MachineSnapshot, counts: Mapping[str, int]) -> tuple[figures.Gpu, ...]:
    """The use of each GPU."""
    found = []
    for number, (name, total_bytes) in enumerate(machine.gpus):
        fields = ("samples", "idle", "busy_percent", "used_mib")
        samples, idle, busy_percent, used_mib = (
            counts.get(f"gpu{number}_{field}", 0) for field in fields
        )
        gpu = figures.Gpu(
            name=f"{number} {name}",
            samples=samples,
            idle_share=_ratio(idle, samples),
            busy_share=_ratio(busy_percent / 100, samples - idle),
            memory_bytes=round(_ratio(used_mib, samples) * 2**20),
            total_bytes=total_bytes,
        )
        found.append(gpu)
    return tuple(found)


def _stages(metrics: Metrics, steps: Sequence[str]) -> tuple[figures.Stage, ...]:
    total, reading = _histogram(metrics, "total"), _histogram(metrics, "reading")
    busy_ns = max(metrics.counts["busy_ns"], total.total + reading.total)
    if not busy_ns:
        return ()
    named = [(name, "transform", f"{number} {name}") for number, name in enumerate(steps)]
    stages = []
    if reading.count:  # the dataset of the transforms is what readers gave before
        stages.append(_stage("dataset", "source", reading, reading.total / busy_ns))
    else:
        named = [("dataset", "source", "dataset"), *named]
    timed_ns = sum(_histogram(metrics, key).total for *_, key in named)
    if timed_ns:
        for name, kind, key in named:
            values = _histogram(metrics, key)
            share = values.total / timed_ns * total.total / busy_ns
            stages.append(_stage(name, kind, values, share))
    elif not reading.count:
        stages.append(_stage("samples", "source", total, total.total / busy_ns))
    share = max(1.0 - sum(stage.share for stage in stages), 0.0)
    count = total.count or reading.count
    mean_s = _ratio(share * busy_ns / 1e9, count)
    spread_s = mean_s, mean_s, mean_s  # not measured
    rest = figures.Stage("collate and copy", "collate", count, mean_s, *spread_s, share)
    return *stages, rest


def _stage(name: str, kind: str, values: Histogram, share: float) -> figures.Stage:
    p50, p90, p99 = (values.percentile(q) / 1e9 for q in (0.5, 0.9, 0.99))
    return figures.Stage(name, kind, values.count, values.mean / 1e9, p50, p90, p99, share)


def _timed_ns(metrics: Metrics) -> int:
    """Time of all stages of the samples that were timed stage by stage."""
    names = ["dataset", *(name for name in metrics.histograms if name[:1].isdigit())]
    return sum(_histogram(metrics, name).total for name in names)


def _stage_name(stage: int, steps: Sequence[str]) -> str:
    if stage == -1:
        return "dataset"
    return steps[stage] if 0 <= stage < len(steps) else ""


def _histogram(metrics: Metrics, name: str) -> Histogram:
    return metrics.histograms.get(name) or Histogram()


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
