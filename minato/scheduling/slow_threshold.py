"""From which cost on a sample counts as slow: a threshold that follows the costs.

The policy knows no clock and no worker: it is fed histograms of service times and answers with a
threshold, so that the tests run the very object that schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from minato._core.histogram import Histogram
from minato.observe.stats.histograms import merged, share_above

__all__ = ["SlowThreshold", "SlowThresholdSettings", "ThresholdDecision"]

_GATES = ((0.90, 1.5, 1.2), (0.99, 2.0, 2.0), (0.999, 4.0, 4.0))
"""Percentile, how many times the median it must reach, and how many times the median the threshold then is at least.

The rarer the slow samples, the more they must stand out. Where none of these holds, costs are uniform and nothing is
slow: a percentile alone would flag its share of noise.
"""
_CLOSING = 0.9
"""A gate that is open closes below this part of its ratio."""
_TOO_MANY, _FEW = 1.4, 1.2
"""Times the share that the percentile should flag: what makes the policy fall back, and what lets it return."""
_PANES_TO_FALL_BACK, _PANES_TO_RETURN = 2, 4
_FALL_BACK_SHARE = 0.4
"""The fall-back flags this part of what the percentile flags: 10 % in place of 25 %."""
_FEWEST = 8
"""So few samples are no statistics, however long they took."""


@dataclass(frozen=True)
class SlowThresholdSettings:
    """What the user may choose.

    Attributes:
        percentile: Share of samples that are fast, between 0 and 1; 0.75 as in the MinatoLoader paper.
        fixed_s: A threshold in seconds in place of all statistics, from the first sample on.
        warm_up_samples: Nothing is slow before so many samples are known …
        warm_up_s: … or so many seconds are over, whichever comes first.
        pane_samples: How many samples go by between two looks at them.
        panes: How many looks back the costs are remembered.
        least_ns: Cheaper samples are never slow: to defer them costs as much.

    Raises:
        ValueError: A value is not possible.
    """

    percentile: float = 0.75
    fixed_s: float | None = None
    warm_up_samples: int = 32
    warm_up_s: float = 600.0
    pane_samples: int = 256
    panes: int = 8
    least_ns: int = 100_000

    def __post_init__(self) -> None:
        if not 0.0 < self.percentile < 1.0:
            raise ValueError(f"percentile={self.percentile} is not between 0 and 1")
        if self.fixed_s is not None and not self.fixed_s > 0:
            raise ValueError(f"fixed_s={self.fixed_s} is not more than 0 seconds")
        if min(self.warm_up_samples, self.pane_samples, self.panes) < 1:
            raise ValueError("warm_up_samples, pane_samples and panes are at least 1")

    @property
    def fall_back(self) -> float:
        """The percentile in force while too many samples are slow: 0.90 for 0.75."""
        return 1.0 - _FALL_BACK_SHARE * (1.0 - self.percentile)


class ThresholdDecision(NamedTuple):
    """What the policy says.

    Attributes:
        threshold_ns: Service time above which a sample is slow; 0: none is.
        percentile: The one in force, 0 with a fixed threshold.
        slow_share: Share of the latest samples that cost more than the threshold they ran under.
        phase: ``warm-up``, ``uniform`` (costs differ too little), ``following`` or ``fixed``.
    """

    threshold_ns: int
    percentile: float
    slow_share: float
    phase: str


class SlowThreshold:
    """Follows the costs of samples and says which are slow.

    Feed it from one thread. While ``due(samples)`` is false, there is nothing to feed, so that a caller need not
    even merge histograms.

    The statistics must hold each delivered sample once with all of its active time, set-aside samples included and
    waiting excluded: were only the quick ones counted, the threshold would sink with every look at them.

    Args:
        settings: What the user chose.
        known: Costs from an earlier run (its ``recent``); the first samples are then no warm-up.
    """

    def __init__(
        self, settings: SlowThresholdSettings | None = None, known: Histogram | None = None
    ) -> None:
        self.settings = settings or SlowThresholdSettings()
        self.decision = ThresholdDecision(0, self.settings.percentile, 0.0, "warm-up")
        """The answer of the latest look."""
        self._seen = Histogram()
        self._panes: deque[Histogram] = deque(maxlen=self.settings.panes)
        self._usual_ns = 0  # the threshold without the fall-back
        self._gate: int | None = None
        self._fallen_back = False
        self._streak = 0  # panes in a row that speak for changing the percentile
        if self.settings.fixed_s is not None:
            self.decision = ThresholdDecision(round(1e9 * self.settings.fixed_s), 0.0, 0.0, "fixed")
        elif known is not None and known.count >= _FEWEST:
            self._panes.append(known.snapshot())
            self._decide(known, 0.0)

    @property
    def recent(self) -> Histogram:
        """The costs that the threshold is taken from; what a later run can start with."""
        return merged(self._panes)

    def due(self, samples: int, elapsed_s: float = 0.0) -> bool:
        """Whether so many finished samples, so long after the start, are worth another look."""
        seen = self._seen.count
        if self.decision.phase == "warm-up" and elapsed_s >= self.settings.warm_up_s:
            return samples - seen >= _FEWEST
        # At first after 32, 64, 128 … samples: an early estimate is soon replaced.
        least = max(self.settings.warm_up_samples, seen)
        return samples - seen >= min(least, max(self.settings.pane_samples, _FEWEST))

    def observe(
        self,
        times: Histogram,
        elapsed_s: float = 0.0,
        running_ns: Iterable[int] = (),
    ) -> ThresholdDecision:
        """Look at the costs again, if a look is due.

        Args:
            times: Service times in ns of all samples finished since the start of the run; never cleared.
            elapsed_s: Seconds since the start.
            running_ns: How long each unfinished sample has been active. Those that are slow already count as
                such; of the others nothing is known yet.

        Returns:
            The decision in force.
        """
        if not self.due(times.count, elapsed_s):
            return self.decision
        pane = times.subtract(self._seen)
        self._seen = times.snapshot()
        threshold_ns = self.decision.threshold_ns
        slow_share = share_above(pane, threshold_ns) if threshold_ns else 0.0
        if self.decision.phase == "fixed":
            self._panes.append(pane)
            self.decision = self.decision._replace(slow_share=slow_share)
            return self.decision
        self._choose_percentile(pane)
        self._panes.append(pane)
        costs = self.recent
        for active_ns in running_ns:
            if 0 < threshold_ns < active_ns:
                costs.record(active_ns)
        self._decide(costs, slow_share)
        return self.decision

    def _choose_percentile(self, pane: Histogram) -> None:
        """Fall back while too many samples are slow, and return when they are not; both only after a while.

        What counts is how many the usual percentile flags, whichever one is in force: as the fall-back flags fewer
        by construction, its own share would always ask for a return.
        """
        if not self._usual_ns:
            return
        usual = 1.0 - self.settings.percentile
        share = share_above(pane, self._usual_ns)
        too_many = share > _TOO_MANY * usual
        if self._fallen_back:
            speaks, needed = share <= _FEW * usual, _PANES_TO_RETURN
        else:
            speaks, needed = too_many, _PANES_TO_FALL_BACK
        self._streak = self._streak + 1 if speaks else 0
        if self._streak == needed:
            self._fallen_back = not self._fallen_back
            self._streak = 0
        if self._fallen_back and too_many:
            # Costs have risen: what is remembered is out of date.
            while len(self._panes) > 1:
                self._panes.popleft()

    def _decide(self, costs: Histogram, slow_share: float) -> None:
        settings = self.settings
        percentile = settings.fall_back if self._fallen_back else settings.percentile
        median_ns = costs.percentile(0.5)
        self._gate = self._open_gate(costs, median_ns)
        if self._gate is None:
            self._usual_ns = 0
            self.decision = ThresholdDecision(0, percentile, slow_share, "uniform")
            return
        least_ns = max(round(_GATES[self._gate][2] * median_ns), settings.least_ns)
        self._usual_ns = max(costs.percentile(settings.percentile), least_ns)
        threshold_ns = max(costs.percentile(percentile), least_ns)
        self.decision = ThresholdDecision(threshold_ns, percentile, slow_share, "following")

    def _open_gate(self, costs: Histogram, median_ns: int) -> int | None:
        for number, (percentile, ratio, _) in enumerate(_GATES):
            slack = _CLOSING if number == self._gate else 1.0
            if costs.percentile(percentile) >= slack * ratio * max(median_ns, 1):
                return number
        return None
