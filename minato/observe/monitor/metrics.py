"""Figures of loaders in Prometheus's text format."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from minato.observe.stats.epoch_log import Journal
from minato.observe.stats.snapshot import Glance

__all__ = ["Exported", "text_of"]

_KINDS = {
    "minato_epoch": ("gauge", "Number of the epoch that runs."),
    "minato_batches_total": ("counter", "Batches that the training loop got."),
    "minato_samples_total": ("counter", "Samples in them."),
    "minato_bytes_total": ("counter", "Bytes in them."),
    "minato_waiting_seconds_total": ("counter", "Time that the training loop waited."),
    "minato_running_seconds_total": ("counter", "Time that epochs took."),
    "minato_workers": ("gauge", "Workers that work."),
    "minato_ready_batches": ("gauge", "Batches that lie ready."),
    "minato_window_batches": ("gauge", "Batches that may be in flight."),
    "minato_busy_seconds_total": ("counter", "Time that workers had a sample in hand."),
    "minato_idle_seconds_total": ("counter", "Time that workers had none."),
    "minato_stage_seconds_total": ("counter", "Time in a stage, of the samples that were timed."),
    "minato_stage_samples_total": ("counter", "Samples that were timed in a stage."),
    "minato_gpu_looks_total": ("counter", "How often a GPU was looked at."),
    "minato_gpu_idle_total": ("counter", "How often it was idle then."),
    "minato_gpu_use_percent_total": ("counter", "Sum of its use in percent."),
}
_OF_GPUS = {
    "minato_gpu_looks_total": "samples",
    "minato_gpu_idle_total": "idle",
    "minato_gpu_use_percent_total": "busy_percent",
}


_numbers = itertools.count(1)
"""Two loaders may have the same dataset."""


class Exported:
    """One loader's figures: those of the epochs that are over, and of the one that runs.

    Args:
        name: Of the loader.
        stages: Names of the dataset's stage and of the transforms.
    """

    def __init__(self, journal: Journal, name: str, stages: Sequence[str]) -> None:
        self._journal = journal
        self._name = f"{name} {next(_numbers)}"
        self._stages = stages
        self._over: Counter[str] = Counter()
        self.url: str | None = None
        """Where they are told."""
        journal.watchers.append(self)

    def begun(self) -> None:
        """Nothing to be done: the journal is asked when somebody wants to know."""

    def settled(self) -> None:
        """Add the epoch that is over."""
        notes = self._journal.past[-1]
        counts = notes.readings.counts
        for name in ("batches", "samples", "bytes"):
            self._over[name] += counts[name]
        self._over["waited_ns"] += counts["start_ns"] + notes.waits.total
        self._over["wall_ns"] += counts["wall_ns"]

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """Name, labels and value of each; between two epochs only what adds up over all of them."""
        over, glance = self._over, self._journal.glance()
        now = glance or Glance()
        loader = _labelled(loader=self._name)
        yield "minato_batches_total", loader, over["batches"] + now.batches
        yield "minato_samples_total", loader, over["samples"] + now.samples
        yield "minato_bytes_total", loader, over["bytes"] + now.nbytes
        yield "minato_waiting_seconds_total", loader, (over["waited_ns"] + now.waited_ns) / 1e9
        yield "minato_running_seconds_total", loader, (over["wall_ns"] + now.at_ns) / 1e9
        if glance is None:
            return
        yield "minato_epoch", loader, now.epoch
        if now.standing is not None:
            yield "minato_workers", loader, now.standing.workers
            yield "minato_ready_batches", loader, now.standing.ready
            yield "minato_window_batches", loader, now.standing.limit
        yield "minato_busy_seconds_total", loader, now.labour.busy_ns / 1e9
        yield "minato_idle_seconds_total", loader, now.labour.idle_ns / 1e9
        for stage, (count, total_ns) in zip(self._stages, now.labour.stages, strict=True):
            labels = _labelled(loader=self._name, stage=stage)
            yield "minato_stage_seconds_total", labels, total_ns / 1e9
            yield "minato_stage_samples_total", labels, count
        for number, (gpu, _) in enumerate(now.machine.gpus):
            for name, counted in _OF_GPUS.items():
                count = now.machine.counts.get(f"gpu{number}_{counted}", 0)
                yield name, _labelled(gpu=str(number), name=gpu), count


def text_of(loaders: Iterable[Exported]) -> str:
    """All figures, each with what it means."""
    lines: dict[str, dict[str, float]] = {name: {} for name in _KINDS}
    for loader in loaders:
        for name, labels, value in loader.figures():
            lines[name][labels] = value  # GPUs are the same for every loader
    parts = []
    for name, (kind, meaning) in _KINDS.items():
        if lines[name]:
            parts += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            parts += (f"{name}{labels} {value:.15g}" for labels, value in lines[name].items())
    return "\n".join(parts) + "\n"


def _labelled(**labels: str) -> str:
    escaped = (
        f'{name}="{value}"'
        for name, value in (
            (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
            for name, value in labels.items()
        )
    )
    return "{" + ",".join(escaped) + "}"
