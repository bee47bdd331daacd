"""All counters of an engine in one place, for observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import thread_time_ns

from minato._core import now_ns
from minato._core.codes import Activity
from minato._system import CpuUsage
from minato.batching.arena import DeviceTimes
from minato.observe.meters import CostStats, Meters, SlowSample
from minato.observe.observers import Counts, Metrics, MetricsSource
from minato.scheduling.dispatcher import ConsumerWait
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.slow_samples import SlowThreshold, ThresholdDecision
from minato.workers.error_policy import FailureCount
from minato.workers.supervision import RestartPolicy

_LOOK_NS = 100_000_000
_LOOK_SHARE = 200
"""The workers' processor time is read at most every 0.1 s, and reading takes at most a 200th of the time."""


@dataclass(kw_only=True, eq=False)
class EngineMetrics(MetricsSource):
    """The counters of an engine's parts.

    It must not refer to the engine or its loader, because the epoch log keeps it until their end.

    Attributes:
        device_times: What the training process has spent on a device.
        window, wait_stats, restart_policy: None without workers.
        usage: Processor time of the workers at the last reading; some may have ended since.
    """

    activity: Callable[[int], Activity]
    meters: Sequence[Meters]
    costs: CostStats
    slow_threshold: SlowThreshold
    failures: FailureCount | None
    device_times: DeviceTimes
    window: PrefetchWindow | None = None
    wait_stats: ConsumerWait | None = None
    restart_policy: RestartPolicy | None = None
    usage: CpuUsage = field(default_factory=lambda: CpuUsage(0, 0))
    _look_due_ns: int = 0

    def look(self, usage: Callable[[], CpuUsage]) -> None:
        """Read the workers' processor time, if that is due."""
        now = now_ns()
        if now >= self._look_due_ns:
            # Not the clock, which goes on while other programs have the processor.
            began_ns = thread_time_ns()
            self.usage = usage()
            self._look_due_ns = now + max(_LOOK_NS, _LOOK_SHARE * (thread_time_ns() - began_ns))

    def metrics(self) -> Metrics:
        counts = Counts()
        if self.failures is not None:
            self.failures.look()
            counts.update(self.failures.totals)
        counts.update(self.quick_counts())
        # Else nobody has touched the pages of the meters.
        costs = self.costs.update(self.meters) if counts["busy_ns"] else self.costs.run
        counts["slept_ns"] = 0 if self.wait_stats is None else self.wait_stats.waited_ns
        counts["pinning_ns"] = self.device_times.pinning_ns
        counts["queueing_ns"] = self.device_times.queueing_ns
        counts["ran_ns"], counts["queued_ns"] = self.usage.ran_ns, self.usage.queued_ns
        return Metrics(counts, costs)

    @property
    def stands_still(self) -> bool:
        return self.window is None

    def stages(self) -> tuple[tuple[int, int], ...]:
        stages = zip(*([each.source, *each.steps] for each in self.meters), strict=True)
        return tuple(
            (sum(each.count for each in stage), sum(each.total for each in stage))
            for stage in stages
        )

    def quick_counts(self) -> dict[str, int]:
        activity, failures = self.activity, self.failures
        busy_ns = idle_ns = most_ns = 0
        for worker in range(len(self.meters)):
            each = activity(worker)
            busy_ns, idle_ns = busy_ns + each.busy_ns, idle_ns + each.idle_ns
            most_ns = max(most_ns, each.busy_ns)
        return {
            "busy_ns": busy_ns,
            "idle_ns": idle_ns,
            "busiest_ns": most_ns,
            "deaths": 0 if self.restart_policy is None else self.restart_policy.total,
            "retries": 0 if failures is None else failures.retries,
            "skipped": 0 if failures is None else failures.totals["skipped"],
        }

    def slowest(self) -> list[SlowSample]:
        return [sample for meters in self.meters for sample in meters.slowest.read()]

    def decision(self) -> ThresholdDecision:
        return self.slow_threshold.decision

    @property
    def held_by_budget(self) -> bool:
        return self.window is not None and self.window.held_by_budget
