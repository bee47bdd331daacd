"""The slow samples of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minato.engine.history import History
from minato.observe.stats.lateness import Lateness

__all__ = ["RunningSample", "SlowSamples"]


@dataclass(frozen=True)
class RunningSample:
    """A slow sample that a worker is still loading.

    Attributes:
        index: Of the dataset.
        worker: Number of the worker.
        running_s: Time that it has taken so far, in seconds; without the time before it was deferred, if it was.
        transform: Name of the running transform; None: the dataset.
    """

    index: Any
    worker: int
    running_s: float
    transform: str | None


@dataclass(frozen=True)
class SlowSamples:
    """Which samples are slow, and where they are in the batches of one epoch.

    Attributes:
        threshold_s: A sample that takes longer, in seconds, is slow; 0: none is.
        why: ``warm-up``, ``uniform`` (costs differ too little), ``following`` (the threshold follows the costs) or
            ``fixed`` (by ``StragglerPolicy.after_s``).
        share: Share of slow samples among the latest, from 0 to 1.
        lags: Number of samples of the newest epoch for each lag, in batches behind strict order; negative: ahead of it.
        shares: Share of slow samples in each returned batch of that epoch.
        running: Slow samples that are still being loaded, the longest first; empty with iterable datasets.
    """

    threshold_s: float
    why: str
    share: float
    lags: Mapping[int, int]
    shares: tuple[float, ...]
    running: tuple[RunningSample, ...]

    @classmethod
    def of(cls, history: History, lateness: Lateness) -> SlowSamples:
        """Make it from a loader's history and the lateness of its newest epoch."""
        decision, engine = history.decision, history.engine()
        running: list[RunningSample] = []
        if decision.threshold_ns and engine is not None:
            running = [
                RunningSample(sample.key, worker, taken_ns / 1e9, sample.transform)
                for worker, sample, taken_ns in engine.running(decision.threshold_ns)
            ]
        return cls(
            decision.threshold_ns / 1e9,
            decision.phase,
            decision.slow_share,
            dict(sorted(lateness.lags.items())),
            tuple(lateness.slow_shares),
            tuple(sorted(running, key=lambda each: -each.running_s)),
        )

    def __str__(self) -> str:
        if not self.threshold_s:
            return f"No sample is slow ({self.why})."
        lines = [
            f"Samples above {self.threshold_s:.3g} s are slow ({self.why}): {self.share:.1%} of the latest.",
            f"{self.late_share:.1%} of the samples came in a later batch than their own, "
            f"at most {self.most_late} batches late.",
        ]
        lines += [
            f"Sample {each.index!r} has run for {each.running_s:.3g} s on worker {each.worker}, "
            f"in {each.transform or 'the dataset'}."
            for each in self.running
        ]
        return "\n".join(lines)

    @property
    def late_share(self) -> float:
        """Share of the samples that came in a later batch than their own; 0 before the first one."""
        late = sum(count for lag, count in self.lags.items() if lag > 0)
        return late / max(sum(self.lags.values()), 1)

    @property
    def most_late(self) -> int:
        """Batches by which the latest sample was late; 0 if none was."""
        return max([0, *self.lags])
