"""How many workers are active: measured period by period, and decided by a controller."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minato._core import now_ns
from minato._system import available_cores, machine_usage
from minato.errors import log
from minato.options import PaperController
from minato.scheduling.dispatcher import ConsumerWait
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.workers.pools import WorkerPool
from minato.workers.shared_state import SharedState

_ENOUGH = 0.02  # a consumer that waits for at most this share of its time has enough
_BUSY = 0.8
"""Workers that are busy for this share of their time are too few if the consumer waits, and enough otherwise."""
_FULL = 0.8  # if this share of the batches in flight is ready, more workers cannot help
_SATURATED = 0.95  # use of the cores at which further workers only compete for them
_PATIENCE = 4  # periods without waiting before a step down
_LEAST_GAIN = 0.5
"""A step up must raise the throughput by this share of its relative increase in workers."""
_NO_LOSS = 0.97  # a step down must keep this share of the throughput if the consumer waits
_HOLD, _MOST_DOUBLINGS = 8, 6  # periods until a reverted step may be tried again; doubled each time
_LOOK_NS = 50_000_000
_PERIOD_NS = 250_000_000  # a period lasts at least this long …
_PERIOD_SAMPLES = 4  # … and at least this many samples of each worker, …
_LONGEST_PERIOD_NS = 10_000_000_000  # … but at most this long
_ROOM_TO_GROW = 2
"""Ratio of the largest number of workers in the next epoch to the active ones of the last."""
_STARTING_NS = 20_000_000_000
"""After this time a new worker counts as active although it has not begun."""


# ---- the controllers: pure functions of the measurement of the last period ----


@dataclass(frozen=True)
class Measurement:
    """The measurement of one period; shares are between 0 and 1."""

    # Batches that were ready, of those that may be in flight (the paper's Qsize / Qmax).
    ready_share: float
    cpu_share: float  # use of the cores that the loader may use (the paper's Cusage)
    waited_share: float  # part of the period in which the consumer waited for a batch
    busy_share: float  # part of the workers' time in which they ran a sample
    blocked_share: float  # part of that in which they slept, or waited for a disk or a network
    # The time that the workers were busy, over the mean time of the samples that they finished. (To count the samples
    # would be the same, but for those that straddle the period's ends.)
    samples_per_s: float


@dataclass(frozen=True)
class ControllerSettings:
    """Limits, and the paper's constants; ``cores`` are those of this loader's rank, a fraction under a quota."""

    least: int
    most: int
    cores: float
    paper: PaperController = field(default_factory=PaperController)


@dataclass(frozen=True)
class ControllerState:
    """What a controller keeps from one period to the next.

    Attributes:
        why: The reason of the last decision: ``start``, ``grow``, ``shrink``, ``revert``, ``settle`` (what the last
            change brings is awaited), ``cpu-bound``, ``at limit`` or ``steady``.
        trial: Workers and samples per second before the last change, until that is judged.
        settled: Whether the period after the change begins.
        quiet: Periods in a row in which the consumer had enough.
        range: Fewest and most workers for ``hold`` more periods, while trials that failed are remembered.
        setbacks: Number of consecutive trials that were reverted.
    """

    workers: int
    why: str = "start"
    ready_average: float | None = None
    trial: tuple[int, float] | None = None
    settled: bool = False
    quiet: int = 0
    range: tuple[int, int] | None = None
    hold: int = 0
    setbacks: int = 0


def formula_2(settings: ControllerSettings, ready_share: float, cpu_share: float) -> float:
    """The paper's Formula 2: Δ = α (1 - Qsize / Qmax) + β (Cusage - θ)."""
    paper = settings.paper
    return paper.alpha * (1.0 - ready_share) + paper.beta * (cpu_share - paper.theta)


def formula_1(settings: ControllerSettings, workers: int, delta: float) -> int:
    """The paper's Formula 1: min(max_workers, max(1, workers + Δ)), with halves of Δ rounded away from zero."""
    rounded = int(math.copysign(math.floor(abs(delta) + 0.5), delta))
    return min(settings.most, max(settings.least, workers + rounded))


def paper(
    state: ControllerState, measured: Measurement, settings: ControllerSettings
) -> ControllerState:
    """The controller of the MinatoLoader paper as it is printed, Δ clipped, the queue averaged.

    Unlike ``corrected``, it grows while the processor is busy, however full the queue is, and hardly for a disk.
    """
    before = measured.ready_share if state.ready_average is None else state.ready_average
    average = before + settings.paper.smoothing * (measured.ready_share - before)
    delta, clip = formula_2(settings, average, measured.cpu_share), settings.paper.clip
    workers = formula_1(settings, state.workers, min(clip, max(-clip, delta)))
    change = workers - state.workers
    why = "grow" if change > 0 else "shrink" if change < 0 else "steady"
    return replace(state, workers=workers, why=why, ready_average=average)


def corrected(
    state: ControllerState, measured: Measurement, settings: ControllerSettings
) -> ControllerState:
    """Grow while the consumer waits and workers have cores or wait themselves; shrink while they idle.

    Both ways the step is as large as the measurement says, at most a doubling, and each step is a trial: as far as one
    did not raise the throughput, or made the consumer wait, it is reverted, and not repeated for a while.
    """
    if state.trial is not None and not state.settled:
        # Half of this period was before the change.
        return replace(state, why="settle", settled=True)
    starved = measured.waited_share > _ENOUGH
    state = replace(
        state,
        quiet=0 if starved else state.quiet + 1,
        hold=max(state.hold - 1, 0),
        range=state.range if state.hold > 1 else (settings.least, settings.most),
    )
    if state.trial is not None:
        kept = _judge(state, measured, starved)
        state = replace(state, trial=None, settled=False)
        if kept != state.workers:
            return _revert(state, kept, settings)
        state = replace(state, setbacks=0)
    target, why = _target(state, measured, settings, starved)
    if target == state.workers:
        return replace(state, why=why)
    trial = state.workers, measured.samples_per_s
    return replace(state, workers=target, why=why, quiet=0, trial=trial)


def _target(
    state: ControllerState, measured: Measurement, settings: ControllerSettings, starved: bool
) -> tuple[int, str]:
    """The number of workers that the measurement calls for, and the reason."""
    workers = state.workers
    least, most = state.range or (settings.least, settings.most)
    on_core = max(1.0 - measured.blocked_share, 1e-3)
    useful = min(max(math.ceil(settings.cores / on_core), settings.least), settings.most)
    crowded = measured.cpu_share >= _SATURATED and measured.blocked_share < 0.5
    if starved and measured.busy_share >= _BUSY and measured.ready_share < _FULL:
        if crowded:
            return max(min(workers, useful), least), "cpu-bound"
        # The workers that the consumer needs in order not to wait.
        factor = min(1.0 / max(1.0 - measured.waited_share, 0.5), 2.0)
        target = min(math.ceil(workers * factor), useful, most)
        return (target, "grow") if target > workers else (workers, "at limit")
    if state.quiet >= _PATIENCE and measured.busy_share < _BUSY:
        target = max(math.ceil(workers * measured.busy_share / _BUSY), least)
        if target < workers:
            return target, "shrink"
    return workers, "steady"


def _judge(state: ControllerState, measured: Measurement, starved: bool) -> int:
    """The number of workers to keep after a trial."""
    assert state.trial is not None
    former, rate_before = state.trial
    ratio = measured.samples_per_s / max(rate_before, 1e-9)
    if state.workers > former:
        if not starved or ratio - 1.0 >= _LEAST_GAIN * (state.workers / former - 1.0):
            return state.workers
        return min(max(math.ceil(former * ratio), former), state.workers)
    return former if starved and ratio < _NO_LOSS else state.workers


def _revert(state: ControllerState, kept: int, settings: ControllerSettings) -> ControllerState:
    """Return to ``kept`` workers, and do not repeat the step for a while, longer each time."""
    limits = (settings.least, kept) if kept < state.workers else (kept, settings.most)
    hold = _HOLD << min(state.setbacks, _MOST_DOUBLINGS)
    state = replace(state, range=limits, hold=hold, setbacks=state.setbacks + 1)
    return replace(state, workers=kept, why="revert", quiet=0)


Controller = Callable[[ControllerState, Measurement, ControllerSettings], ControllerState]

CONTROLLERS: dict[str, Controller] = {"corrected": corrected, "paper": paper}
"""By name; the first is the default."""


# ---- measuring a period, and activating workers ----


@dataclass
class AutoscaleState:
    """What a loader has learned about its number of workers by one of ``CONTROLLERS``; it outlives the workers."""

    controller: str
    settings: ControllerSettings
    state: ControllerState
    tried: bool = False

    @classmethod
    def of(
        cls, controller: str | PaperController, first: int, least: int, most: int
    ) -> AutoscaleState:
        """The state of a new loader; ``controller`` is a controller's name, or constants for ``paper``."""
        paper, name = PaperController(), controller
        if isinstance(name, PaperController):
            paper, name = name, "paper"
        settings = ControllerSettings(least, most, available_cores(), paper)
        return cls(name, settings, ControllerState(first))

    def numbers(self, persistent: bool) -> tuple[int, int]:
        """The first and the largest number of workers in the next engine; ``persistent`` ones stay for more epochs."""
        now, most = self.state.workers, self.settings.most
        if self.tried and not persistent:
            # These workers live for one epoch, and inactive ones cost time at its start.
            most = min(most, _ROOM_TO_GROW * now)
        return now, most


class _Reading(NamedTuple):
    """All counters at a time, or by how much they have grown."""

    at_ns: int
    busy_ns: int
    waited_ns: int
    samples: int
    cost_ns: int
    ran_ns: int
    queued_ns: int
    used_s: float
    available_s: float


class Scaler:
    """A pool of ``most`` workers whose number of active ones it sets, and tells ``resized``, several times a second."""

    def __init__(
        self,
        autoscale_state: AutoscaleState,
        *,
        state: SharedState,
        pool: WorkerPool,
        window: PrefetchWindow,
        wait_stats: ConsumerWait,
        most: int,
        resized: Callable[[int], None] | None = None,
    ) -> None:
        self._autoscale_state = autoscale_state
        self._times = [state.meters(number).total for number in range(most)]
        self._settings = replace(autoscale_state.settings, most=most)
        self._decide = CONTROLLERS[autoscale_state.controller]
        self._pool, self._state, self._window, self._wait_stats = pool, state, window, wait_stats
        self._resized = resized
        self._next_ns = 0
        self._changed_ns = now_ns()
        self._before: _Reading | None = None
        # The last trial of an earlier engine has no result, and its range may be for other limits.
        autoscale_state.state = replace(
            autoscale_state.state, trial=None, settled=False, range=None, hold=0
        )
        state.active.set_count(autoscale_state.state.workers)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``, or the next check is due."""
        self._pool.wait(seen, min(timeout_s, _LOOK_NS / 1e9))

    def check(self) -> None:
        """Replace dead workers, or raise; then update the number of workers."""
        self._pool.check()
        self.update()

    def restart(self) -> None:
        """Start a new period, which has nothing in common with the last one."""
        self._before = None

    def update(self) -> None:
        """Change the number of active workers, if a period is over and the controller decides so."""
        now = now_ns()
        if now < self._next_ns:
            return
        self._next_ns = now + _LOOK_NS
        count = self._state.active.count
        if self._wait_stats.ending or (
            now < self._changed_ns + _STARTING_NS
            and not all(map(self._state.has_begun, range(count)))
        ):
            self._before = None
            return
        try:
            after, before = self._read(now), self._before
        except OSError:  # a program without free descriptors still trains
            return
        if before is None:
            self._before = after
            return
        grown = _Reading(*map(operator.sub, after, before))
        enough = grown.samples >= _PERIOD_SAMPLES * count or grown.at_ns >= _LONGEST_PERIOD_NS
        if grown.at_ns < _PERIOD_NS or not enough:
            return
        self._before = after
        known = self._autoscale_state
        known.tried = True
        known.state = self._decide(known.state, self._measure(grown), self._settings)
        if known.state.workers != count:
            log("%d workers instead of %d: %s", known.state.workers, count, known.state.why)
            self._changed_ns, count = now, known.state.workers
            self._pool.grow(count)
            self._window.resize(count)
            self._state.active.set_count(count)
            if self._resized is not None:
                self._resized(count)

    def _read(self, now: int) -> _Reading:
        ledger, workers, times = self._state.ledger, range(len(self._times)), self._times
        leases = [ledger.lease(worker) for worker in workers]
        busy_ns = sum(ledger.activity(worker).busy_ns for worker in workers)
        busy_ns += sum(max(now - on.started_ns, 0) for on in leases if on.position is not None)
        return _Reading(
            now,
            busy_ns,
            self._wait_stats.waited_until(now),
            sum(each.count for each in times),
            sum(each.total for each in times),
            *self._pool.usage(),
            *machine_usage(),
        )

    def _measure(self, grown: _Reading) -> Measurement:
        busy_ns, ran_ns = max(grown.busy_ns, 1), max(grown.ran_ns, 0)
        cores_ns = grown.at_ns * self._settings.cores
        cpu_share = max(ran_ns / cores_ns, grown.used_s / max(grown.available_s, 1e-9))
        busy_per_ns = busy_ns / grown.at_ns
        return Measurement(
            ready_share=_share(self._wait_stats.ready / max(self._window.most, 1)),
            cpu_share=_share(cpu_share),
            waited_share=_share(grown.waited_ns / grown.at_ns),
            busy_share=_share(busy_per_ns / self._state.active.count),
            blocked_share=_share(1.0 - (ran_ns + max(grown.queued_ns, 0)) / busy_ns),
            samples_per_s=1e9 * busy_per_ns * grown.samples / max(grown.cost_ns, 1),
        )


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
