"""From glances at an epoch to how it goes at present."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minato.observe.report.rows import in_words
from minato.observe.stats.snapshot import Glance, Machine

__all__ = ["Pace", "Paced"]

_RECENT_NS = 5_000_000_000
"""Rates are those of so much time."""


@dataclass(frozen=True)
class Pace:
    """How an epoch goes.

    Attributes:
        title: Of which loader, and which epoch.
        batches: Delivered so far.
        length: How many there will be; None if nobody knows.
        elapsed_s: Since the epoch's begin.
        left_s: Until its end at the present rate; None if nobody knows.
        samples_per_s, batches_per_s, bytes_per_s: Of the last seconds.
        waiting: Share of these in which the loop waited.
        busy: Share of the workers' time in which they had a sample in hand.
        workers: How many work.
        ready: Batches that lay ready when last looked.
        limit: How many may be in flight.
        slowest: The dataset or transform that took most of the workers' time; empty if nothing was timed.
        slowest_share: Its share of the time of all of these.
        slowest_s: Its mean time for a sample.
        machine: What it does, in words.
        gpus: What they do, in words; empty if there are none.
    """

    title: str
    batches: int
    length: int | None
    elapsed_s: float
    left_s: float | None
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
        """Share of the epoch that is done, None if nobody knows."""
        return min(self.batches / self.length, 1.0) if self.length else None

    def rows(self) -> list[tuple[str, str]]:
        """What to show below the progress: a name and a text each."""
        rates = (
            f"{in_words(self.samples_per_s, '')} samples/s".replace("  ", " "),
            f"{in_words(self.batches_per_s, '')} batches/s".replace("  ", " "),
            *([in_words(self.bytes_per_s, "bytes per s")] if self.bytes_per_s else []),
        )
        slowest = "–"
        if self.slowest:
            share = in_words(self.slowest_share, "share")
            slowest = f"{self.slowest}, {share} of their time, {in_words(self.slowest_s, 's')} each"
        return [
            ("throughput", ", ".join(rates)),
            ("waiting", f"{in_words(self.waiting, 'share')} of the loop's time"),
            ("workers", f"{self.workers}, busy {in_words(self.busy, 'share')} of their time"),
            ("window", f"{self.ready} of at most {self.limit} batches ready"),
            ("slowest", slowest),
            ("machine", self.machine),
            *([("GPUs", self.gpus)] if self.gpus else []),
        ]

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        if self.length is None:
            return f"{self.batches} batches in {clock(self.elapsed_s)}"
        left = "" if self.left_s is None else f", {clock(self.left_s)} left"
        return f"{self.batches} of {self.length} batches in {clock(self.elapsed_s)}{left}"

    @property
    def line(self) -> str:
        """All of it that matters in one line."""
        slowest = f", slowest: {self.slowest}" if self.slowest else ""
        return (
            f"{self.title}: {self.progress}, {in_words(self.samples_per_s, '')} samples/s, "
            f"waiting {in_words(self.waiting, 'share')}, {self.workers} workers, "
            f"{self.ready} of {self.limit} ready{slowest}"
        ).replace("  ", " ")


class Paced:
    """Makes a pace of each glance and those before it.

    Args:
        name: Of the loader.
        stages: Names of the dataset's stage and of the transforms.
    """

    def __init__(self, name: str, stages: Sequence[str]) -> None:
        self._name = name
        self._stages = stages
        self._seen: deque[Glance] = deque()

    def add(self, glance: Glance) -> Pace:
        """The pace now."""
        seen = self._seen
        if seen and seen[-1].epoch != glance.epoch:
            seen.clear()
        seen.append(glance)
        while len(seen) > 2 and glance.at_ns - seen[1].at_ns >= _RECENT_NS:
            seen.popleft()
        first = seen[0]
        if len(seen) == 1:  # nothing to compare with but the epoch's begin
            first = Glance(glance.epoch, machine=glance.machine)
        recent_s = max(glance.at_ns - first.at_ns, 1) / 1e9
        rate = (glance.batches - first.batches) / recent_s
        left = None if glance.length is None or not rate else glance.length - glance.batches
        busy_ns = glance.labour.busy_ns - first.labour.busy_ns
        there_ns = busy_ns + glance.labour.idle_ns - first.labour.idle_ns
        standing = glance.standing
        return Pace(
            f"{self._name}, epoch {glance.epoch}",
            glance.batches,
            glance.length,
            glance.at_ns / 1e9,
            None if left is None else max(left, 0) / rate,
            (glance.samples - first.samples) / recent_s,
            rate,
            (glance.nbytes - first.nbytes) / recent_s,
            min(max((glance.waited_ns - first.waited_ns) / 1e9 / recent_s, 0.0), 1.0),
            busy_ns / there_ns if there_ns else 0.0,
            0 if standing is None else standing.workers,
            0 if standing is None else standing.ready,
            0 if standing is None else standing.limit,
            *self._slowest(first, glance),
            _of_machine(first.machine, glance.machine, recent_s),
            _of_gpus(first.machine, glance.machine),
        )

    def _slowest(self, first: Glance, glance: Glance) -> tuple[str, float, float]:
        """Name, share and mean time in s of the stage that took most time of late, or else so far."""
        so_far = glance.labour.stages
        of_late = [
            (count - count_before, total - total_before)
            for (count, total), (count_before, total_before) in zip(
                so_far, first.labour.stages, strict=False
            )
        ]
        times = of_late if any(count for count, _ in of_late) else list(so_far)
        whole_ns = sum(total for _, total in times)
        if whole_ns <= 0:
            return "", 0.0, 0.0
        number = max(range(len(times)), key=lambda i: times[i][1])
        count, total = times[number]
        return self._stages[number], total / whole_ns, total / max(count, 1) / 1e9


def _of_machine(before: Machine, now: Machine, seconds: float) -> str:
    """What cores, disks and memory do."""
    used, there, read = (
        now.counts.get(name, 0) - before.counts.get(name, 0)
        for name in ("cores_used_ns", "cores_there_ns", "disk_read_bytes")
    )
    cores = f"cores {in_words(min(used / there, 1.0), 'share')}, " if there > 0 else ""
    return (
        f"{cores}disks {in_words(read / seconds, 'bytes per s')}, "
        f"{in_words(now.available_bytes, 'bytes')} of {in_words(now.limit_bytes, 'bytes')} free"
        + ("" if now.gpus else ", no GPU")
    )


def _of_gpus(before: Machine, now: Machine) -> str:
    """How the GPUs are used."""
    found = []
    for number, (_, total_bytes) in enumerate(now.gpus):
        samples, idle, busy_percent, used_mib = (
            now.counts.get(f"gpu{number}_{what}", 0) - before.counts.get(f"gpu{number}_{what}", 0)
            for what in ("samples", "idle", "busy_percent", "used_mib")
        )
        if samples > 0:
            busy = busy_percent / 100 / max(samples - idle, 1)
            memory = in_words(used_mib / samples * 2**20, "bytes")
            found.append(
                f"{number}: idle {in_words(idle / samples, 'share')}, busy {in_words(busy, 'share')} otherwise, "
                f"{memory} of {in_words(total_bytes, 'bytes')}"
            )
    return "; ".join(found)


def clock(seconds: float) -> str:
    """A duration as 0:42 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
