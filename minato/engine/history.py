"""Measurements of a loader that outlive its iterators: costs of samples, number of workers, log of the epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from minato._core import Histogram
from minato.batching.handover import Handover
from minato.engine.spec import LoaderSpec
from minato.errors import warn
from minato.observe.cost_history import CostHistory
from minato.observe.epoch_log import EpochLog
from minato.observe.observers import Observer
from minato.scheduling.cost_model import CostModel
from minato.scheduling.slow_threshold import SlowThreshold, ThresholdDecision
from minato.workers.runner import CostEstimate
from minato.workers.shared_state import CurrentSample

if TYPE_CHECKING:  # loaders with a fixed number of workers start without it
    from minato.observe.endpoint import ServedMetrics
    from minato.workers.autoscale import AutoscaleState

__all__ = ["History", "RunningEngine"]


class RunningEngine(Protocol):
    """The engine of the newest iterator, as reports see it."""

    def running(self, least_ns: int) -> list[tuple[int, CurrentSample, int]]:
        """Worker, sample and time in ns of each sample that has run for at least ``least_ns``."""


def _no_engine() -> None:
    """A dead reference to an engine."""


@dataclass
class History:
    """Measurements that a loader keeps from one iterator to the next.

    Attributes:
        cost_model: Cost of each sample in earlier epochs.
        costs: Costs of recent samples, in ns.
        cost_history: The directory of the costs of earlier programs.
        decision: The latest decision on which samples are slow.
        cost_estimate: The cost estimate of the worker in the main process.
        autoscale: The number of active workers and its controller; None: all workers are active.
        epoch_log: The log of epochs that reports read; None: nothing is measured.
        observers: Follow all engines: the log, and the views of the program.
        served_metrics: The metrics at an HTTP address; None for none.
        views_of: The loader and the process for which the views are open; None: they are not.
        may_travel: Whether another worker may collate a sample than the one that made it; None: not known.
        engine: A weak reference to the newest engine.
        warned_of_generators: Whether a warning has named generators that are not bound to samples.
    """

    cost_model: CostModel = field(default_factory=CostModel)
    costs: Histogram | None = None
    cost_history: CostHistory | None = None
    decision: ThresholdDecision = SlowThreshold().decision
    cost_estimate: CostEstimate = field(default_factory=CostEstimate)
    autoscale: AutoscaleState | None = None
    epoch_log: EpochLog | None = None
    observers: list[Observer] = field(default_factory=list)
    served_metrics: ServedMetrics | None = None
    views_of: object = None
    may_travel: bool | None = None
    engine: Callable[[], RunningEngine | None] = _no_engine
    warned_of_generators: bool = False

    def learn(self, handover: Handover) -> None:
        """Keep what an engine's workers have found out."""
        self.may_travel = handover.answer

    def warn_of_generators(
        self, names: list[str], cause: str = "minato does not know how to write their states"
    ) -> None:
        """Warn once of generators of dataset and transforms that are not bound to samples."""
        if not names or self.warned_of_generators:
            return
        self.warned_of_generators = True
        warn(
            f"the dataset or its transforms hold random generators that cannot be bound to samples, as {cause}: "
            f"{', '.join(names)}. Their numbers depend on which worker runs which sample, so a seeded run does "
            "not repeat. Call minato.numpy_rng(), python_rng() or torch_rng() inside the sample instead",
            stacklevel=2,
        )

    @classmethod
    def of(cls, spec: LoaderSpec) -> History:
        """The history of a new loader."""
        options = spec.options
        scale = options.autoscale
        autoscale = None
        if scale is not None:
            from minato.workers.autoscale import AutoscaleState

            count = spec.workers.count
            autoscale = AutoscaleState.of(scale.controller, count, scale.min, scale.max)
        log = EpochLog() if options.observe.stats else None
        return cls(autoscale=autoscale, epoch_log=log, observers=[] if log is None else [log])
