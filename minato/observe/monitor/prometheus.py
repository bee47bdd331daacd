"""The metrics of loaders in Prometheus's text format."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from minato.observe.monitor.nvml_process import INTERVAL_S
from minato.observe.stats.epoch_log import EpochLog
from minato.observe.stats.snapshot import EpochSnapshot

__all__ = ["LoaderMetrics", "text_of"]

_FAMILIES = {
    "minato_epoch": ("gauge", "Number of the current epoch."),
    "minato_batches_total": ("counter", "Batches returned to the training loop."),
    "minato_samples_total": ("counter", "Samples in the returned batches."),
    "minato_batch_bytes_total": ("counter", "Bytes in the returned batches."),
    "minato_wait_seconds_total": ("counter", "Time that the training loop waited for batches."),
    "minato_epoch_seconds_total": ("counter", "Duration of all epochs."),
    "minato_workers": ("gauge", "Active workers."),
    "minato_ready_batches": ("gauge", "Batches that are ready."),
    "minato_prefetch_window_batches": ("gauge", "Largest number of batches in flight."),
    "minato_worker_busy_seconds_total": ("counter", "Time that workers processed samples."),
    "minato_worker_idle_seconds_total": ("counter", "Time that workers were idle."),
    "minato_stage_seconds_total": ("counter", "Time in a stage, for the samples that were timed."),
    "minato_stage_samples_total": ("counter", "Samples that were timed in a stage."),
    "minato_gpu_observed_seconds_total": ("counter", "Time that a GPU was monitored."),
    "minato_gpu_idle_seconds_total": ("counter", "Time that a GPU was idle."),
    "minato_gpu_busy_seconds_total": ("counter", "Time that a GPU was busy, times utilization."),
}
_GPU_SECONDS = {
    "minato_gpu_observed_seconds_total": ("samples", INTERVAL_S),
    "minato_gpu_idle_seconds_total": ("idle", INTERVAL_S),
    "minato_gpu_busy_seconds_total": ("busy_percent", INTERVAL_S / 100),
}

_numbers = itertools.count(2)
_exporters: weakref.WeakSet[LoaderMetrics] = weakref.WeakSet()


class LoaderMetrics:
    """The metrics of one loader: of all past epochs and the current one.

    Attributes:
        name: The value of the label ``loader``, unique in this process.
        url: Where the metrics are served; None until then.

    Args:
        name: Of the loader; a number is appended if another loader has it.
        stages: Names of the dataset's stage and of the transforms.
    """

    def __init__(self, log: EpochLog, name: str, stages: Sequence[str]) -> None:
        self._log = log
        if any(each.name == name for each in _exporters):
            name = f"{name} {next(_numbers)}"
        self.name: str = name
        self._stages = stages
        self._past: Counter[str] = Counter()
        self.url: str | None = None
        _exporters.add(self)
        log.observers.append(self)

    def started(self) -> None:
        """Nothing to do: each request takes a snapshot of the log."""

    def ended(self) -> None:
        """Add the epoch that has ended."""
        record = self._log.past[-1]
        counts = record.metrics.counts
        for name in ("batches", "samples", "bytes"):
            self._past[name] += counts[name]
        self._past["waited_ns"] += counts["start_ns"] + record.waits.total
        self._past["wall_ns"] += counts["wall_ns"]

    def series(self) -> Iterator[tuple[str, str, float]]:
        """Name, labels and value of each time series; between two epochs only totals over epochs."""
        past, snapshot = self._past, self._log.snapshot()
        now = snapshot or EpochSnapshot()
        loader = _labels(loader=self.name)
        yield "minato_batches_total", loader, past["batches"] + now.batches
        yield "minato_samples_total", loader, past["samples"] + now.samples
        yield "minato_batch_bytes_total", loader, past["bytes"] + now.nbytes
        yield "minato_wait_seconds_total", loader, (past["waited_ns"] + now.waited_ns) / 1e9
        yield "minato_epoch_seconds_total", loader, (past["wall_ns"] + now.at_ns) / 1e9
        if snapshot is None:
            return
        yield "minato_epoch", loader, now.epoch
        if now.loader is not None:
            yield "minato_workers", loader, now.loader.workers
            yield "minato_ready_batches", loader, now.loader.ready
            yield "minato_prefetch_window_batches", loader, now.loader.limit
        yield "minato_worker_busy_seconds_total", loader, now.activity.busy_ns / 1e9
        yield "minato_worker_idle_seconds_total", loader, now.activity.idle_ns / 1e9
        for stage, (count, total_ns) in zip(self._stages, now.activity.stages, strict=True):
            labels = _labels(loader=self.name, stage=stage)
            yield "minato_stage_seconds_total", labels, total_ns / 1e9
            yield "minato_stage_samples_total", labels, count
        for number, (gpu, _) in enumerate(now.machine.gpus):
            for name, (field, seconds) in _GPU_SECONDS.items():
                count = now.machine.counts.get(f"gpu{number}_{field}", 0)
                yield name, _labels(gpu=str(number), name=gpu), count * seconds


def text_of(loaders: Iterable[LoaderMetrics]) -> str:
    """All metrics, each with its help text and type."""
    values: dict[str, dict[str, float]] = {name: {} for name in _FAMILIES}
    for loader in loaders:
        for name, labels, value in loader.series():
            values[name][labels] = value  # GPUs are the same for every loader
    lines = []
    for name, (kind, description) in _FAMILIES.items():
        if values[name]:
            lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
            lines += (f"{name}{labels} {value:.15g}" for labels, value in values[name].items())
    return "\n".join(lines) + "\n"


def _labels(**labels: str) -> str:
    escaped = (
        f'{name}="{value}"'
        for name, value in (
            (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
            for name, value in labels.items()
        )
    )
    return "{" + ",".join(escaped) + "}"
