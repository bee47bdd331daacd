"""What a loader knows of its slow samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minato.engine import Experience
from minato.source.prediction import Quality, quality_of
from minato.stats.lateness import Lateness

__all__ = ["SlowSamples"]


@dataclass(frozen=True)
class SlowSamples:
    """Which samples are slow, where they lay in the batches of one epoch, and how well they were foretold.

    Attributes:
        threshold_s: A sample that takes longer, in seconds, is slow; 0: none is.
        why: ``warm-up``, ``uniform`` (costs differ too little), ``following`` (the threshold follows the costs) or
            ``fixed`` (by ``slow_after_s``).
        share: Of the latest samples, the share that was slow, from 0 to 1.
        lags: How many samples of the newest iterator's epoch came so many batches later than in the sampler's order;
            negative: earlier. 0 for all of them in ``strict`` order.
        shares: Of each batch of that epoch, as they were delivered, the share of its samples that were slow.
        prediction: How good the latest expectations were. Rank correlation, from -1 to 1: whether dearer samples were
            expected to be dearer. Hit rate: the share of the slow samples that were expected to be slow. Precision: the
            share of those expected to be slow that were. All of it 0 in a first epoch, unless transforms plan.
    """

    threshold_s: float
    why: str
    share: float
    lags: Mapping[int, int]
    shares: tuple[float, ...]
    prediction: Quality

    @classmethod
    def of(cls, experience: Experience, lateness: Lateness) -> SlowSamples:
        """From what a loader has learned, and the record of its newest epoch."""
        decision = experience.decision
        return cls(
            decision.threshold_ns / 1e9,
            decision.phase,
            decision.slow_share,
            dict(sorted(lateness.lags.items())),
            tuple(lateness.slow_shares),
            quality_of(experience.foresight.pairs, decision.threshold_ns),
        )

    @property
    def late_share(self) -> float:
        """Share of the samples that came in a later batch than their own; 0 before the first one."""
        late = sum(count for lag, count in self.lags.items() if lag > 0)
        return late / max(sum(self.lags.values()), 1)

    @property
    def most_late(self) -> int:
        """Batches by which the latest sample was late; 0 if none was."""
        return max([0, *self.lags])
