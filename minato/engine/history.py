"""What a loader has learned, kept from one iterator to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minato._core.histogram import Histogram
from minato.observe.stats.epoch_log import EpochLog
from minato.options import Options
from minato.scheduling.cost_model import CostModel
from minato.scheduling.slow_threshold import Decision, TimeoutPolicy
from minato.workers.runner import CostEstimate
from minato.workers.scaler import AutoscaleState

if TYPE_CHECKING:
    from minato.engine.engine import Engine

__all__ = ["Experience"]


def _nobody() -> None:
    """In place of a reference to an engine that is gone."""


@dataclass
class Experience:
    """What a loader knows of its samples from one iterator to the next.

    Attributes:
        cost_model: What each sample cost in earlier epochs.
        costs: Service times in ns of late.
        decision: Which samples are slow, as of the last look.
        habits: What the worker in line has learned.
        staffing: How many workers help; None: all of them work.
        journal: What reports are made from; None: nothing is noted.
        engine: The newest one, while it is in use.
    """

    cost_model: CostModel = field(default_factory=CostModel)
    costs: Histogram | None = None
    decision: Decision = TimeoutPolicy().decision
    habits: CostEstimate = field(default_factory=CostEstimate)
    staffing: AutoscaleState | None = None
    journal: EpochLog | None = None
    engine: Callable[[], Engine | None] = _nobody

    @classmethod
    def of(cls, options: Options, num_workers: int) -> Experience:
        """What a new loader knows."""
        scale = options.autoscale
        staffing = None
        if scale is not None:
            staffing = AutoscaleState.of(scale.controller, num_workers, scale.min, scale.max)
        return cls(staffing=staffing, journal=EpochLog() if options.stats else None)
