"""Slow samples: the cost above which a sample is slow, and the early start of those that were slow in earlier epochs.

The threshold knows neither clock nor workers. It follows histograms of service times, so that tests run the object that
schedules. The estimate of a cost is a hint: it only decides which sample a worker claims next.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from minato._core import ConsumerLedger, Histogram
from minato._core.codes import NO_INTEGER
from minato._support.values import integer_of
from minato.observe.lateness import ThresholdDecision as ThresholdDecision
from minato.observe.meters import merged, share_above

# The threshold
_CRITERIA = ((0.90, 1.5, 1.2), (0.99, 2.0, 2.0), (0.999, 4.0, 4.0))
"""Percentile, the multiple of the median that it must reach, and the least threshold then, in medians.

The rarer the slow samples, the more they must stand out. If no criterion holds, costs are uniform and no sample is
slow: a percentile alone would flag its share of noise.
"""
_HYSTERESIS = 0.9  # a criterion that holds ends to hold below this part of its ratio
_TOO_MANY, _FEW = 1.4, 1.2
"""Multiples of the share that the percentile should flag, at which the policy falls back and returns."""
_PANES_TO_FALL_BACK, _PANES_TO_RETURN = 2, 4
_FALL_BACK_SHARE = 0.4
"""The fall-back flags this part of what the percentile flags: 10 % in place of 25 %."""
_NEVER_NS = 1 << 62  # longer thresholds are this one, of a hundred years; also infinity
_MIN_SAMPLES = 8  # fewer samples are no statistics, however long they took
_MIN_NS = 100_000  # cheaper samples are never slow: deferring them costs as much
# The early start
_NEWEST = 0.5  # weight of a sample's latest cost against that of all earlier ones
_MAX_INDICES = 1 << 25  # larger indices are not recorded: 128 MiB of costs
_INT64 = 1 << 63
_MIN_MEAN_NS = 400_000
"""Recording a sample takes the training process some microseconds: at most a hundredth of the workers' time."""


class SlowThreshold:
    """Follows the costs of samples and decides which are slow. Only one thread may call it.

    The histograms hold each sample once, with its active time: deferred samples included, waits excluded. If only
    fast samples counted, the threshold would fall with each update.

    Args:
        percentile: Share of samples that are fast, between 0 and 1; 0.75 as in the MinatoLoader paper.
        fixed_s: A threshold in seconds in place of all statistics, from the first sample on.
        known: The ``recent`` costs of an earlier run, which replace the warm-up.
        warm_up_samples, warm_up_s: No sample is slow before this number of samples is known, or of seconds is over.
        pane_samples: Samples between two updates of the threshold, for which those of the last ``panes`` count.

    Attributes:
        fall_back: The percentile in force while too many samples are slow: 0.90 for 0.75.
    """

    def __init__(
        self,
        percentile: float = 0.75,
        fixed_s: float | None = None,
        known: Histogram | None = None,
        *,
        warm_up_samples: int = 32,
        warm_up_s: float = 600.0,
        pane_samples: int = 256,
        panes: int = 8,
    ) -> None:
        self.percentile = percentile
        self.fall_back = 1.0 - _FALL_BACK_SHARE * (1.0 - percentile)
        self._warm_up_samples, self._warm_up_s = warm_up_samples, warm_up_s
        self._pane_samples = max(pane_samples, _MIN_SAMPLES)
        self.decision = ThresholdDecision(0, percentile, 0.0, "warm-up")
        self._seen = Histogram()
        self._panes: deque[Histogram] = deque(maxlen=panes)
        self._usual_ns = 0  # the threshold without the fall-back
        self._criterion: int | None = None
        self._fallen_back = False
        self._streak = 0  # consecutive panes after which the percentile should change
        if fixed_s is not None:
            fixed_ns = round(min(1e9 * fixed_s, _NEVER_NS))
            self.decision = ThresholdDecision(fixed_ns, 0.0, 0.0, "fixed")
        elif known is not None and known.count >= _MIN_SAMPLES:
            self._panes.append(known.snapshot())
            self._decide(known, 0.0)

    @property
    def recent(self) -> Histogram:
        """The costs that decide the threshold; a later run can start with them."""
        return merged(self._panes)

    def due(self, samples: int, elapsed_s: float = 0.0) -> bool:
        """Whether the threshold is to be updated, after ``samples`` finished samples and ``elapsed_s`` seconds."""
        seen = self._seen.count
        if self.decision.phase == "warm-up" and elapsed_s >= self._warm_up_s:
            return samples - seen >= _MIN_SAMPLES
        # At first after 32, 64, 128 … samples: an early estimate is soon replaced.
        return samples - seen >= min(max(self._warm_up_samples, seen), self._pane_samples)

    def observe(
        self, times: Histogram, elapsed_s: float = 0.0, running_ns: Iterable[int] = ()
    ) -> ThresholdDecision:
        """Update the threshold if that is due, and return the decision in force.

        ``times`` are the service times in ns of all samples that have finished since the start of the run; never
        cleared. Of unfinished samples, those count whose active time makes them slow already.
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
        """Fall back while too many samples are slow, and return when they are not; both after several panes.

        The share above the usual percentile counts, whichever percentile is in force: the fall-back flags fewer by
        construction, so that its own share would always suggest a return.
        """
        if not self._usual_ns:
            return
        usual = 1.0 - self.percentile
        share = share_above(pane, self._usual_ns)
        too_many = share > _TOO_MANY * usual
        if self._fallen_back:
            suggests, needed = share <= _FEW * usual, _PANES_TO_RETURN
        else:
            suggests, needed = too_many, _PANES_TO_FALL_BACK
        self._streak = self._streak + 1 if suggests else 0
        if self._streak == needed:
            self._fallen_back = not self._fallen_back
            self._streak = 0
        if self._fallen_back and too_many:
            # Costs have risen: older panes are out of date.
            while len(self._panes) > 1:
                self._panes.popleft()

    def _decide(self, costs: Histogram, slow_share: float) -> None:
        percentile = self.fall_back if self._fallen_back else self.percentile
        median_ns = costs.percentile(0.5)
        self._criterion = self._find_criterion(costs, median_ns)
        if self._criterion is None:
            self._usual_ns = 0
            self.decision = ThresholdDecision(0, percentile, slow_share, "uniform")
            return
        min_ns = max(round(_CRITERIA[self._criterion][2] * median_ns), _MIN_NS)
        self._usual_ns = max(costs.percentile(self.percentile), min_ns)
        threshold_ns = max(costs.percentile(percentile), min_ns)
        self.decision = ThresholdDecision(threshold_ns, percentile, slow_share, "following")

    def _find_criterion(self, costs: Histogram, median_ns: int) -> int | None:
        for number, (percentile, ratio, _) in enumerate(_CRITERIA):
            slack = _HYSTERESIS if number == self._criterion else 1.0
            if costs.percentile(percentile) >= slack * ratio * max(median_ns, 1):
                return number
        return None


# ---- the early start ----


def integers_of(indices: Sequence[object] | np.ndarray | torch.Tensor) -> list[int] | None:
    """The integers that indices equal, for costs and reports; ``NO_INTEGER`` for one without, None for all without."""
    values = indices.tolist() if isinstance(indices, (np.ndarray, torch.Tensor)) else indices
    found = [integer_of(index) for index in values]
    if len(found) != len(indices) or all(number is None for number in found):
        return None
    return [
        NO_INTEGER if number is None or not -_INT64 <= number < _INT64 else number
        for number in found
    ]


class CostModel:
    """The cost of each index, averaged over the epochs so far; 4 bytes for each index up to the largest one seen."""

    def __init__(self) -> None:
        self._costs = array("f")  # 0: not seen; single elements are faster than NumPy's

    def predict(self, index: object) -> float | None:
        """The cost of a sample in ns; None if it is unknown."""
        number = integer_of(index)
        if number is not None and 0 <= number < len(self._costs):
            return self._costs[number] or None
        return None

    def observe(self, index: object, cost_ns: float) -> None:
        """Record the cost of a sample; only indices that are integers from 0 to 2**25 count."""
        number = integer_of(index)
        if number is None or not 0 <= number < _MAX_INDICES:
            return
        if number >= len(self._costs):
            # Grow by half: ten million indices in ascending order cost a few dozen copies.
            length = min(_MAX_INDICES, max(1024, number + 1 + number // 2))
            self._costs.frombytes(bytes(self._costs.itemsize * (length - len(self._costs))))
        known = self._costs[number]
        self._costs[number] = cost_ns if known == 0 else known + _NEWEST * (cost_ns - known)

    @property
    def nbytes(self) -> int:
        """Bytes that the costs take."""
        return self._costs.itemsize * len(self._costs)


class EarlyStart:
    """Starts samples that were slow in earlier epochs early, so that no epoch ends with one of them.

    A sample that costs as much as n others starts earlier, by the number of samples that all workers run in that time.
    So it ends about when n others would have ended in its place. The costs of earlier epochs, to which those of this
    engine are added, are in ns.

    Attributes:
        threshold_ns: Samples that cost more start early; 0: none do.
    """

    def __init__(self, *, ledger: ConsumerLedger, costs: CostModel, num_workers: int) -> None:
        self._ledger, self._costs = ledger, costs
        self._num_workers = max(num_workers, 1)
        self._mean_ns = self.threshold_ns = 0.0

    def resize(self, num_workers: int) -> None:
        """Change the number of workers."""
        self._num_workers = max(num_workers, 1)
        self.follow(self._mean_ns)

    def follow(self, mean_ns: float) -> None:
        """Note the mean cost of the samples, 0 if it is unknown, and from which cost on they are slow now."""
        self._mean_ns, slow_ns = mean_ns, self._ledger.slow_ns
        is_felt = mean_ns >= _MIN_MEAN_NS * self._num_workers
        self.threshold_ns = max(slow_ns, mean_ns) if slow_ns and is_felt else 0.0

    def learn(self, batch: int) -> None:
        """Record the costs of a full batch; only where samples start early."""
        for index, cost_ns in self._ledger.costs(batch):
            self._costs.observe(index, cost_ns)

    def hint(self, first: int, indices: Iterable[object], epoch_start: int) -> None:
        """Let slow samples of a batch start early, but not before their epoch: earlier ones are needed sooner.

        ``first`` is the position of the batch's first sample; only where samples start early.
        """
        for position, index in enumerate(indices, first):
            cost_ns = self._costs.predict(index)
            if cost_ns is not None and cost_ns > self.threshold_ns:
                others = (cost_ns - self._mean_ns) / self._mean_ns
                ahead = min(math.ceil(others * self._num_workers), position - epoch_start)
                self._ledger.start_early(position, ahead)
