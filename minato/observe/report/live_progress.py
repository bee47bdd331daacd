"""From snapshots of an epoch to its progress and its present rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minato.observe.report.text import format_value
from minato.observe.stats.snapshot import EpochSnapshot, MachineSnapshot

__all__ = ["EpochProgress", "ProgressEstimator", "clock"]

_RECENT_NS = 5_000_000_000
"""Rates are averages over this time."""


@dataclass(frozen=True)
class EpochProgress:
    """The progress of an epoch.

    Attributes:
        title: The loader and the epoch.
        batches: Returned so far.
        length: Batches of the whole epoch; None if unknown.
        elapsed_s: Since the start of the epoch.
        remaining_s: Until its end at the present rate; None if unknown.
        samples_per_s, batches_per_s, bytes_per_s: In the last seconds.
        waiting: Share of the last seconds in which the loop waited.
        busy: Share of the workers' time in which they had a current sample.
        workers: Active workers.
        ready: Batches that were ready at the last update.
        limit: Batches in flight at most.
        slowest: The dataset or transform that took most of the workers' time; empty if none was timed.
        slowest_share: Its share of the time of all of these.
        slowest_s: Its mean time for a sample.
        machine: Cores, disks and memory, as text.
        gpus: The GPUs, as text; empty if there are none.
    """

    title: str
    batches: int
    length: int | None
    elapsed_s: float
    remaining_s: float | None
    samples_per_s: float
    batches_per_s: float
    bytes_per_s: float
    waiting: float
    busy: float
    workers: int
    ready: int
    limit: int
    slowest: str
    slowest_share: float
    slowest_s: float
    machine: str
    gpus: str

    @property
    def done(self) -> float | None:
        """Share of the epoch that is done, None if unknown."""
        return min(self.batches / self.length, 1.0) if self.length else None

    def rows(self) -> list[tuple[str, str]]:
        """The rows below the progress bar: a name and a text each."""
        rates = (
            f"{format_value(self.samples_per_s, '')} samples/s".replace("  ", " "),
            f"{format_value(self.batches_per_s, '')} batches/s".replace("  ", " "),
            *([format_value(self.bytes_per_s, "bytes per s")] if self.bytes_per_s else []),
        )
        slowest = "–"
        if self.slowest:
            share, mean = (
                format_value(self.slowest_share, "share"),
                format_value(self.slowest_s, "s"),
            )
            slowest = f"{self.slowest}, {share} of the workers' time, {mean} per sample"
        return [
            ("throughput", ", ".join(rates)),
            ("waiting", f"{format_value(self.waiting, 'share')} of the loop's time"),
            ("workers", f"{self.workers}, busy {format_value(self.busy, 'share')} of their time"),
            ("prefetch", f"{self.ready} of at most {self.limit} batches ready"),
            ("slowest", slowest),
            ("machine", self.machine),
            *([("GPUs", self.gpus)] if self.gpus else []),
        ]

    @property
    def progress(self) -> str:
        """Batches and time, as text."""
        if self.length is None:
            return f"{self.batches} batches in {clock(self.elapsed_s)}"
        remaining = "" if self.remaining_s is None else f", {clock(self.remaining_s)} left"
        return f"{self.batches} of {self.length} batches in {clock(self.elapsed_s)}{remaining}"

    @property
    def line(self) -> str:
        """The main figures in one line."""
        slowest = f", slowest: {self.slowest}" if self.slowest else ""
        return (
            f"{self.title}: {self.progress}, {format_value(self.samples_per_s, '')} samples/s, "
            f"waiting {format_value(self.waiting, 'share')}, {self.workers} workers, "
            f"{self.ready} of {self.limit} ready{slowest}"
        ).replace("  ", " ")


class _SlowestStage(NamedTuple):
    name: str = ""
    share: float = 0.0
    mean_s: float = 0.0


class ProgressEstimator:
    """Estimates the progress from the snapshots of the last seconds.

    Args:
        name: Of the loader.
        stages: Names of the dataset's stage and of the transforms.
    """

    def __init__(self, name: str, stages: Sequence[str]) -> None:
        self._name = name
        self._stages = stages
        self._recent: deque[EpochSnapshot] = deque()

    def add(self, snapshot: EpochSnapshot) -> EpochProgress:
        """The progress as of a new snapshot."""
        recent = self._recent
        if recent and not _is_later(snapshot, recent[-1]):
            recent.clear()
        recent.append(snapshot)
        while len(recent) > 2 and snapshot.at_ns - recent[1].at_ns >= _RECENT_NS:
            recent.popleft()
        first = recent[0]
        if len(recent) == 1:  # rates since the start of the epoch
            first = EpochSnapshot(snapshot.epoch, machine=snapshot.machine)
        seconds = max(snapshot.at_ns - first.at_ns, 1) / 1e9
        rate = (snapshot.batches - first.batches) / seconds
        remaining = (
            None if snapshot.length is None or not rate else snapshot.length - snapshot.batches
        )
        busy_ns = snapshot.activity.busy_ns - first.activity.busy_ns
        total_ns = busy_ns + snapshot.activity.idle_ns - first.activity.idle_ns
        loader, slowest = snapshot.loader, self._slowest(first, snapshot)
        return EpochProgress(
            title=f"{self._name}, epoch {snapshot.epoch}",
            batches=snapshot.batches,
            length=snapshot.length,
            elapsed_s=snapshot.at_ns / 1e9,
            remaining_s=None if remaining is None else max(remaining, 0) / rate,
            samples_per_s=(snapshot.samples - first.samples) / seconds,
            batches_per_s=rate,
            bytes_per_s=(snapshot.nbytes - first.nbytes) / seconds,
            waiting=min(max((snapshot.waited_ns - first.waited_ns) / 1e9 / seconds, 0.0), 1.0),
            busy=busy_ns / total_ns if total_ns else 0.0,
            workers=0 if loader is None else loader.workers,
            ready=0 if loader is None else loader.ready,
            limit=0 if loader is None else loader.limit,
            slowest=slowest.name,
            slowest_share=slowest.share,
            slowest_s=slowest.mean_s,
            machine=_machine_text(first.machine, snapshot.machine, seconds),
            gpus=_gpu_text(first.machine, snapshot.machine),
        )

    def _slowest(self, first: EpochSnapshot, snapshot: EpochSnapshot) -> _SlowestStage:
        """The stage that took most time in the last seconds, or else in the epoch so far."""
        so_far = snapshot.activity.stages
        recent = [
            (count - count_before, total - total_before)
            for (count, total), (count_before, total_before) in zip(
                so_far, first.activity.stages, strict=False
            )
        ]
        times = recent if any(count for count, _ in recent) else list(so_far)
        whole_ns = sum(total for _, total in times)
        if whole_ns <= 0:
            return _SlowestStage()
        number = max(range(len(times)), key=lambda i: times[i][1])
        count, total = times[number]
        return _SlowestStage(self._stages[number], total / whole_ns, total / max(count, 1) / 1e9)


def _is_later(snapshot: EpochSnapshot, earlier: EpochSnapshot) -> bool:
    """Whether both are of one epoch; the program may give several one number."""
    same = (snapshot.epoch, snapshot.began_ns) == (earlier.epoch, earlier.began_ns)
    return same and snapshot.at_ns >= earlier.at_ns


def _machine_text(before: MachineSnapshot, now: MachineSnapshot, seconds: float) -> str:
    """Cores, disks and memory."""
    used, total, read = (
        now.counts.get(name, 0) - before.counts.get(name, 0)
        for name in ("cores_used_ns", "cores_there_ns", "disk_read_bytes")
    )
    cores = f"cores {format_value(min(used / total, 1.0), 'share')}, " if total > 0 else ""
    return (
        f"{cores}disks {format_value(read / seconds, 'bytes per s')}, "
        f"{format_value(now.available_bytes, 'bytes')} of {format_value(now.limit_bytes, 'bytes')} free"
        + ("" if now.gpus else ", no GPU")
    )


def _gpu_text(before: MachineSnapshot, now: MachineSnapshot) -> str:
    """Utilization and memory of each GPU."""
    found = []
    for number, (_, total_bytes) in enumerate(now.gpus):
        samples, idle, busy_percent, used_mib = (
            now.counts.get(f"gpu{number}_{field}", 0) - before.counts.get(f"gpu{number}_{field}", 0)
            for field in ("samples", "idle", "busy_percent", "used_mib")
        )
        if samples > 0:
            busy = busy_percent / 100 / max(samples - idle, 1)
            memory = format_value(used_mib / samples * 2**20, "bytes")
            found.append(
                f"{number}: idle {format_value(idle / samples, 'share')}, busy {format_value(busy, 'share')} "
                f"otherwise, {memory} of {format_value(total_bytes, 'bytes')}"
            )
    return "; ".join(found)


def clock(seconds: float) -> str:
    """A duration as 0:42 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
