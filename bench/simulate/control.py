"""The worker controllers in virtual time, on loads that change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Training
from bench.simulate.sample_loader import SampleLoader
from bench.simulate.workloads import SEGMENTATION, Workload
from minato.options import DEFAULT_MAX_LAG
from minato.scheduler.controller import (
    CONTROLLERS,
    ControllerSettings,
    ControllerState,
    Measurement,
)
from minato.scheduler.in_flight import Order

_PERIOD_S = 2.0


@dataclass(frozen=True)
class Moment:
    """What held at the end of a period."""

    at_s: float
    threshold_s: float
    slow_share: float
    ready: int
    window: int
    workers: int
    why: str
    waited_share: float
    samples_per_s: float


@dataclass(frozen=True)
class Scenario:
    """A load that changes.

    Args:
        name: What it is called in the report.
        cost_factor: ``share of all samples -> factor`` of their costs.
        step_s: ``share of the time -> time of a step``.
        duration_s: About how long it goes on.
        cores, on_core: As :class:`SampleLoader` has them.
    """

    name: str
    cost_factor: Callable[[float], float]
    step_s: Callable[[float], float]
    duration_s: float = 600.0
    cores: float = 16.0
    on_core: float = 1.0
    workload: Workload = SEGMENTATION
    samples_per_s: float = 24.0

    def needed(self) -> list[float]:
        """How many workers would do, from the beginning to the end."""
        mean_s = 0.5  # of a sample of image segmentation
        found = []
        for share in (i / 200 for i in range(200)):
            cost_s = mean_s * self.cost_factor(share)
            asked = self.workload.batch_size / self.step_s(share) * cost_s
            found.append(float(min(math.ceil(asked), math.ceil(self.cores / self.on_core))))
        return found


DRIFT = Scenario(
    "drift",
    # Costs double over the middle third; then the consumer becomes four times as slow.
    cost_factor=lambda share: 1.0 + min(max(3 * share - 1, 0.0), 1.0),
    step_s=lambda share: 0.25 if share < 0.75 else 1.0,
    samples_per_s=10.0,
)
CPU_BOUND = Scenario("CPU-bound", lambda _: 1.0, lambda _: 0.01, samples_per_s=32.0)
GPU_BOUND = Scenario("GPU-bound", lambda _: 1.0, lambda _: 0.5, samples_per_s=6.0)
IO_BOUND = Scenario("I/O-bound", lambda _: 1.0, lambda _: 0.125, on_core=0.02)
SCENARIOS = (DRIFT, CPU_BOUND, GPU_BOUND, IO_BOUND)


class Controlled:
    """Runs a scenario with one of the controllers.

    Args:
        controller: Name of one.
        start: Workers at first.
        most: Most workers.
    """

    def __init__(self, scenario: Scenario, controller: str, start: int, most: int) -> None:
        self._decide = CONTROLLERS[controller]
        self._limits = ControllerSettings(1, most, scenario.cores)
        self._state = ControllerState(start)
        self._clock = Clock()
        size = scenario.workload.batch_size
        batches = round(scenario.duration_s * scenario.samples_per_s / size)
        samples = batches * size
        costs = Costs.of(
            scenario.workload, 2000, 0, lambda position: scenario.cost_factor(position / samples)
        )
        self._loader = SampleLoader(
            self._clock,
            costs,
            size,
            start,
            batches,
            Order("arrival", DEFAULT_MAX_LAG),
            defers=True,
            cores=scenario.cores,
            on_core=scenario.on_core,
        )
        self._training = Training(
            self._clock,
            [self._loader],
            lambda now_s: scenario.step_s(now_s / scenario.duration_s),
            batches,
        )
        self._batches = batches
        self._before = (0.0, 0.0, 0, 0)  # busy, waited, samples, their time in ns
        self.moments: list[Moment] = []

    def run(self) -> list[Moment]:
        """Every period until the last batch is delivered."""
        self._clock.after(_PERIOD_S, self._period)
        self._training.run()
        return self.moments

    def _period(self) -> None:
        loader, state = self._loader, self._state
        busy_s = loader.busy_until_now_s()
        waited_s = sum(loader.record.waited_s) + loader.waiting_for_s
        now = busy_s, waited_s, loader.times.count, loader.times.total
        spent_s, lost_s, finished, cost_ns = (
            new - old for new, old in zip(now, self._before, strict=True)
        )
        self._before = now
        in_use = spent_s / _PERIOD_S * loader.on_core
        measured = Measurement(
            ready_share=min(loader.ready / loader.window.limit, 1.0),
            cpu_share=min(in_use / loader.cores, 1.0),
            waited_share=min(lost_s / _PERIOD_S, 1.0),
            busy_share=min(spent_s / _PERIOD_S / loader.workers, 1.0),
            blocked_share=(1.0 - loader.on_core) / max(1.0, in_use / loader.cores),
            samples_per_s=spent_s / _PERIOD_S * finished / max(cost_ns / 1e9, 1e-9),
        )
        self._state = self._decide(state, measured, self._limits)
        decision = loader.timeouts.decision
        self.moments.append(
            Moment(
                self._clock.now_s,
                decision.threshold_ns / 1e9,
                decision.slow_share,
                loader.ready,
                loader.window.limit,
                state.workers,
                self._state.why,
                measured.waited_share,
                measured.samples_per_s,
            )
        )
        if self._state.workers != state.workers:
            loader.set_workers(self._state.workers)
        if len(loader.record.delivered_s) < self._batches:
            self._clock.after(_PERIOD_S, self._period)
