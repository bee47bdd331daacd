"""What the counters of a loader say at one moment, and between two."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from minato._core.histogram import Histogram

__all__ = ["Readings"]


@dataclass
class Readings:
    """Counts and histograms that only grow; those of several runs add up.

    Attributes:
        counts: By name, with the unit in the name.
        histograms: By name.
    """

    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def since(self, older: Readings) -> Readings:
        """What has been added since an older reading of the same counters."""
        counts = Counter({name: count - older.counts[name] for name, count in self.counts.items()})
        nothing = Histogram()
        histograms = {
            name: values.subtract(older.histograms.get(name, nothing))
            for name, values in self.histograms.items()
        }
        return Readings(counts, histograms)

    def __add__(self, other: Readings) -> Readings:
        whole = Readings(Counter(self.counts), {})
        for name, count in other.counts.items():
            whole.counts[name] += count
        for part in (self, other):
            for name, values in part.histograms.items():
                whole.histograms.setdefault(name, Histogram()).merge(values)
        return whole
