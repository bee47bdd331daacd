"""The metrics of loaders in Prometheus's text format."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence

from minato.observe.monitor.nvml_process import INTERVAL_S
from minato.observe.stats.catalog import CATALOG, values_of
from minato.observe.stats.epoch_log import EpochLog

__all__ = ["LoaderMetrics", "text_of"]

_FAMILIES = {
    **{f"minato_{each.name}": (each.kind, each.meaning) for each in CATALOG if each.exported},
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
        taken, given = {each.name for each in _exporters}, name
        while name in taken:
            name = f"{given} {next(_numbers)}"
        self.name: str = name
        self._stages = stages
        self.url: str | None = None
        _exporters.add(self)
        log.observers.append(self)

    def started(self) -> None:
        """Nothing to do: each request reads the log."""

    def ended(self) -> None:
        """Nothing to do."""

    def series(self) -> Iterator[tuple[str, str, float]]:
        """Name, labels and value of each time series; between two epochs only totals over epochs."""
        values, now = values_of(self._log), self._log.snapshot()
        loader = _labels(loader=self.name)
        for metric in CATALOG:
            if metric.exported and (now is not None or metric.kind == "counter"):
                yield f"minato_{metric.name}", loader, values[metric.name]
        if now is None:
            return
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
