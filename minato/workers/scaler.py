"""Measures a loader period by period, and activates the number of workers that the controller returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from minato._core.clock import now_ns
from minato._core.histogram import Histogram
from minato._core.ledger import Ledger
from minato._system import available_cores, machine_usage
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.protocols import Pool
from minato.scheduling.wait_stats import ConsumerWait
from minato.workers.active_workers import ActiveWorkers
from minato.workers.autoscale import (
    CONTROLLERS,
    ControllerSettings,
    ControllerState,
    Measurement,
)
from minato.workers.cpu_time import CpuUsage
from minato.workers.current_sample import has_begun

__all__ = ["AutoscaleState", "PolledPool", "Scaler"]

_LOOK_NS = 50_000_000
"""Shortest interval between two checks."""
_PERIOD_NS = 250_000_000
"""A period lasts at least this long …"""
_PERIOD_SAMPLES = 4
"""… and at least this many samples of each worker, …"""
_LONGEST_PERIOD_NS = 10_000_000_000
"""… but at most this long."""
_ROOM_TO_GROW = 2
"""Ratio of the largest number of workers in the next epoch to the active ones of the last."""
_STARTING_NS = 20_000_000_000
"""After this time a new worker counts as active although it has not begun."""


@dataclass
class AutoscaleState:
    """What a loader has learned about its number of workers; it outlives the workers.

    Attributes:
        controller: Name of one of ``CONTROLLERS``.
        settings: Its limits.
        state: What it has learned.
        tried: Whether it has been used.
    """

    controller: str
    settings: ControllerSettings
    state: ControllerState
    tried: bool = field(default=False)

    @classmethod
    def of(
        cls, controller: Any, first: int, least: int | None, most: int | None
    ) -> AutoscaleState | None:
        """The state of a new loader; None if the number of its workers is fixed.

        Args:
            controller: Name of a controller, or a dataclass of constants for ``paper``.
        """
        if least is None or most is None:
            return None
        constants = {} if isinstance(controller, str) else asdict(controller)
        settings = ControllerSettings(least, most, available_cores(), **constants)
        return cls("paper" if constants else controller, settings, ControllerState(first))

    def numbers(self, persistent: bool) -> tuple[int, int]:
        """The first and the largest number of workers in the next engine.

        Args:
            persistent: Whether the workers stay for further epochs.
        """
        now, most = self.state.workers, self.settings.most
        if self.tried and not persistent:
            # These workers live for one epoch, and inactive ones cost time at its start.
            most = min(most, _ROOM_TO_GROW * now)
        return now, most


class Workers(Protocol):
    """The workers, as a scaler sees them."""

    def grow(self, count: int) -> None:
        """Start workers until there are ``count``."""

    def usage(self) -> CpuUsage:
        """Processor time of all of them."""


class _Reading(NamedTuple):
    at_ns: int
    busy_ns: int
    waited_ns: int
    samples: int
    cost_ns: int
    usage: CpuUsage
    machine: tuple[float, float]


class Scaler:
    """Sets the number of active workers, in the consumer's thread, several times a second.

    Args:
        autoscale_state: The controller and its state.
        times: Service times of each worker.
        resized: Called with the number of workers when it changes.
    """

    def __init__(
        self,
        autoscale_state: AutoscaleState,
        *,
        workers: Workers,
        active_workers: ActiveWorkers,
        window: PrefetchWindow,
        wait_stats: ConsumerWait,
        ledger: Ledger,
        times: Sequence[Histogram],
        resized: Callable[[int], None] | None = None,
    ) -> None:
        self._autoscale_state = autoscale_state
        self._settings = replace(autoscale_state.settings, most=len(times))
        self._decide = CONTROLLERS[autoscale_state.controller]
        self._workers = workers
        self._active_workers = active_workers
        self._window = window
        self._wait_stats = wait_stats
        self._ledger = ledger
        self._times = times
        self._resized = resized
        self._next_ns = 0
        self._changed_ns = now_ns()
        self._before: _Reading | None = None
        # The last trial of an earlier engine has no result, and its range may be for other limits.
        autoscale_state.state = replace(
            autoscale_state.state, trial=None, settled=False, range=None, hold=0
        )
        active_workers.set_count(autoscale_state.state.workers)

    def restart(self) -> None:
        """Start a new period, which has nothing in common with the last one."""
        self._before = None

    def update(self) -> None:
        """Change the number of active workers, if a period is over and the controller decides so."""
        now = now_ns()
        if now < self._next_ns:
            return
        self._next_ns = now + _LOOK_NS
        if self._wait_stats.ending or (
            now < self._changed_ns + _STARTING_NS and not self._all_begun()
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
        elapsed_ns = now - before.at_ns
        enough = after.samples - before.samples >= _PERIOD_SAMPLES * self._active_workers.count
        if elapsed_ns < _PERIOD_NS or not (enough or elapsed_ns >= _LONGEST_PERIOD_NS):
            return
        self._before = after
        autoscale_state = self._autoscale_state
        autoscale_state.tried = True
        autoscale_state.state = self._decide(
            autoscale_state.state, self._measure(before, after), self._settings
        )
        if autoscale_state.state.workers != self._active_workers.count:
            self._changed_ns = now
            self._set_workers(autoscale_state.state.workers)

    def _set_workers(self, count: int) -> None:
        self._workers.grow(count)
        self._window.resize(count)
        self._active_workers.set_count(count)
        if self._resized is not None:
            self._resized(count)

    def _all_begun(self) -> bool:
        return all(has_begun(self._ledger, worker) for worker in range(self._active_workers.count))

    def _read(self, now: int) -> _Reading:
        busy_ns = 0
        for worker in range(len(self._times)):
            position, started_ns, _ = self._ledger.lease(worker)
            busy_ns += self._ledger.activity(worker)[1]
            if position is not None:
                busy_ns += max(now - started_ns, 0)
        return _Reading(
            now,
            busy_ns,
            self._wait_stats.waited_until(now),
            sum(times.count for times in self._times),
            sum(times.total for times in self._times),
            self._workers.usage(),
            machine_usage(),
        )

    def _measure(self, before: _Reading, after: _Reading) -> Measurement:
        elapsed_ns = after.at_ns - before.at_ns
        busy_ns = max(after.busy_ns - before.busy_ns, 1)
        ran_ns = max(after.usage.ran_ns - before.usage.ran_ns, 0)
        queued_ns = max(after.usage.queued_ns - before.usage.queued_ns, 0)
        cost_ns = max(after.cost_ns - before.cost_ns, 1)
        used_s, available_s = (
            new - old for new, old in zip(after.machine, before.machine, strict=True)
        )
        cpu_share = max(
            ran_ns / (elapsed_ns * self._settings.cores), used_s / max(available_s, 1e-9)
        )
        busy_per_ns = busy_ns / elapsed_ns
        return Measurement(
            ready_share=_share(self._wait_stats.ready / self._window.limit),
            cpu_share=_share(cpu_share),
            waited_share=_share((after.waited_ns - before.waited_ns) / elapsed_ns),
            busy_share=_share(busy_per_ns / self._active_workers.count),
            blocked_share=_share(1.0 - (ran_ns + queued_ns) / busy_ns),
            samples_per_s=1e9 * busy_per_ns * (after.samples - before.samples) / cost_ns,
        )


class PolledPool:
    """A pool whose consumer wakes at intervals to update the number of workers."""

    def __init__(self, pool: Pool, scaler: Scaler) -> None:
        self._pool = pool
        self._scaler = scaler

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the ready events exceed ``seen``, or the next check is due."""
        self._pool.wait(seen, min(timeout_s, _LOOK_NS / 1e9))

    def check(self) -> None:
        """Replace dead workers, or raise; then update the number of workers."""
        self._pool.check()
        self._scaler.update()


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
