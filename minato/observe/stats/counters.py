"""What the counters of a loader say at one moment, and between two."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from minato._core.histogram import Histogram
from minato.observe.stats.summary import NOTHING

__all__ = ["Readings"]


@dataclass
class Readings:
    """Counts and histograms that only grow; those of several runs add up.

    Attributes:
        counts: By name, with the unit in the name.
        histograms: By name; to be read only.
    """

    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def since(self, older: Readings) -> Readings:
        """What has been added since an older reading of the same counters."""
        counts = Counter({name: count - older.counts[name] for name, count in self.counts.items()})
        histograms = {}
        for name, values in self.histograms.items():
            before = older.histograms.get(name, NOTHING)
            if before is values:
                histograms[name] = NOTHING
            else:
                histograms[name] = values.subtract(before) if before.count else values
        return Readings(counts, histograms)

    def __add__(self, other: Readings) -> Readings:
        whole = Readings()
        whole += self
        whole += other
        return whole

    def __iadd__(self, other: Readings) -> Readings:
        """Add other readings to a sum, which owns its histograms."""
        self.counts.update(other.counts)
        for name, values in other.histograms.items():
            self.histograms.setdefault(name, Histogram()).merge(values)
        return self
