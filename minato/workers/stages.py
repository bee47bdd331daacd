"""A sample stage by stage: the dataset, then each transform, with a clock in between.

A worker may defer a slow sample between two transforms, and resume it later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any

from minato._core import Lease, WorkerLedger, now_ns, run_steps
from minato.observe.meters import Meters
from minato.observe.size import nbytes_of
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.transforms.compose import Transforms
from minato.transforms.rng import Captured

__all__ = ["Deferral", "DeferredSample", "StageRunner"]


@dataclass(eq=False)
class DeferredSample:
    """A sample between two of its transforms.

    Attributes:
        position: Its position in the ledger, where it stays claimed.
        index: Its index in the dataset.
        value: The result of the transforms so far.
        step: The transform that is next.
        randomness: State of its generators (``SampleRandomness.capture``); None: they are not bound to samples.
        active_ns: Time spent on it so far.
        cpu_ns: Processor time spent on it so far; None: not measured.
        longest: The longest stage so far (-1: the dataset) and its time in ns; unused if not measured.
        deferred_ns: When it was deferred.
    """

    position: int
    index: Any
    value: Any
    step: int
    randomness: Captured | None
    active_ns: int
    cpu_ns: int | None
    longest: tuple[int, int]
    deferred_ns: int


class Deferral:
    """Decides which slow sample a worker defers, keeps it, and decides when the worker resumes it.

    Deferral changes the order of work, not its amount. A worker therefore defers a sample only while the consumer waits
    for a batch that quicker samples can fill. It resumes the sample when the consumer no longer waits, or when few
    other samples remain: otherwise the other workers would idle at the end while this one completes it.

    A worker defers one sample at a time: more would only pile up work, and need memory.

    Args:
        num_workers: Returns how many workers share the samples that are left to claim.
    """

    def __init__(
        self, *, ledger: WorkerLedger, meters: Meters, num_workers: Callable[[], int]
    ) -> None:
        self._ledger = ledger
        self._meters = meters
        self._num_workers = num_workers
        self._sample: DeferredSample | None = None
        self.num_deferred = 0
        """How many samples the worker has deferred so far."""

    def allows(self, position: int) -> bool:
        """Whether the worker defers the slow sample at this position now."""
        ledger = self._ledger
        return (
            self._sample is None
            and bool(ledger.waiting)
            and self._others_have_work()
            # A sample that started early must be complete when its batch is due.
            and position < ledger.front
            and not ledger.is_placed(position)
        )

    def defer(self, sample: DeferredSample) -> None:
        """Keep a sample until ``take``."""
        self._sample = sample
        self.num_deferred += 1

    def is_due(self) -> bool:
        """Whether the deferred sample goes before samples that no worker has begun."""
        sample, ledger = self._sample, self._ledger
        return sample is not None and (
            not ledger.waiting
            or not self._others_have_work()
            # ``max_lag`` is reached: the batch that needs this sample is settled.
            or ledger.is_placed(sample.position)
        )

    def take(self) -> DeferredSample | None:
        """Return the deferred sample, which the worker then resumes; None if there is none."""
        sample, self._sample = self._sample, None
        if sample is not None:
            self._meters.deferred.record(max(now_ns() - sample.deferred_ns, 0))
        return sample

    def _others_have_work(self) -> bool:
        """Whether each worker can claim another sample meanwhile."""
        return self._ledger.unclaimed() > self._num_workers()


class StageRunner:
    """Runs samples stage by stage, so that it can time the stages and defer a slow sample.

    Args:
        dataset: Has the samples, by index.
        lease: The worker's; its step always names the stage that runs, -1 being the dataset's.
        meters: Receive the times of the stages of measured samples.
        deferral: Decides which slow samples are deferred; None: none is.
        tracer: Records these stages.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Transforms,
        *,
        lease: Lease,
        meters: Meters,
        deferral: Deferral | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._dataset = dataset
        self._steps = transforms.steps
        self._lease = lease
        self._meters = meters
        self.deferral = deferral
        self._names = transforms.names
        self._tracer = tracer
        self._laps = array("q", bytes(8 * len(transforms.steps)))
        self._longest = -1, 0
        self.longest: list[tuple[int, int]] = []
        """The longest stage (-1: the dataset) and its time, of each sample measured since the list was cleared."""
        self.slow_ns = 0
        """A sample that has taken longer may be deferred; 0: none is, as without a ``deferral``."""
        self.capture: Callable[[], Captured] | None = None
        """Saves the randomness of the current sample; None while it is not bound to samples."""

    def straight(self, index: object) -> Any:
        """The sample of an index, not measured; a DeferredSample if it was deferred."""
        value = self._dataset[index]
        return self._transform(index, value, 0, 0, None, self._is_slow())

    def measured(self, index: object) -> Any:
        """The sample of an index, measured; a DeferredSample if it was deferred."""
        cpu_ns, begin_ns = thread_time_ns(), now_ns()
        value = self._dataset[index]
        end_ns = now_ns()
        if self._tracer.enabled:
            self._tracer.slice("dataset", begin_ns, end_ns)
        return self.transformed(index, value, end_ns - begin_ns, cpu_ns)

    def transformed(self, index: object, value: object, dataset_ns: int, cpu_ns: int) -> Any:
        """The sample of an index whose read took ``dataset_ns``, measured; a DeferredSample if it was deferred.

        Args:
            cpu_ns: Thread time at which its work in this thread began.
        """
        self._meters.dataset.record(dataset_ns)
        self._meters.size.record(nbytes_of(value))
        self._longest = -1, dataset_ns
        return self._transform(index, value, 0, 0, cpu_ns, self._is_slow())

    def resume(self, sample: DeferredSample) -> Any:
        """Resume a deferred sample, for at least one transform; a DeferredSample if it is deferred again."""
        self._longest = sample.longest
        cpu_ns = None if sample.cpu_ns is None else thread_time_ns() - sample.cpu_ns
        # Transforms may change the value in place: no other reference may remain.
        value, sample.value = sample.value, None
        return self._transform(sample.index, value, sample.step, sample.active_ns, cpu_ns, False)

    def _is_slow(self) -> bool:
        """Whether the dataset alone has made the sample slow."""
        return self.slow_ns > 0 and now_ns() - self._lease.started_ns >= self.slow_ns

    def _transform(
        self,
        index: object,
        value: object,
        step: int,
        active_ns: int,
        cpu_ns: int | None,
        is_slow: bool,
    ) -> Any:
        """Run the transforms from ``step`` on, or those until the sample is deferred.

        Args:
            active_ns: Time spent on the sample before this lease.
            cpu_ns: Thread time at which it would have begun without the deferral; None: not measured.
            is_slow: Whether it may be deferred before the first of them.
        """
        steps, num_steps, laps, lease = self._steps, len(self._steps), self._laps, self._lease
        deferral = self.deferral if self.slow_ns else None
        deadline_ns = 0
        if deferral is not None:
            deadline_ns = max(lease.started_ns + self.slow_ns - active_ns, 1)
        while step < num_steps:
            if is_slow and deferral is not None and deferral.allows(_position(lease)):
                return self._defer(deferral, index, value, step, active_ns, cpu_ns)
            # Past its deadline a sample runs one transform at a time.
            first, is_slow = step, True
            if cpu_ns is None:
                value, step = run_steps(steps, value, step, deadline_ns, None, lease)
                continue
            value, step = run_steps(steps, value, step, deadline_ns, laps, lease)
            self._note(first, step)
        if cpu_ns is not None:
            self._meters.cpu.record(max(thread_time_ns() - cpu_ns, 0))
            self._meters.transforms.record(num_steps)
            self.longest.append(self._longest)
        return value

    def _note(self, first: int, stop: int) -> None:
        """Record the times of the transforms that have just run."""
        laps = self._laps
        for i in range(first, stop):
            self._meters.steps[i].record(laps[i])
            if laps[i] > self._longest[1]:
                self._longest = i, laps[i]
        if self._tracer.enabled:
            # Computed backwards from now, so that no slice overlaps the one before it.
            begin_ns = now_ns() - sum(laps[first:stop])
            for i in range(first, stop):
                end_ns = begin_ns + laps[i]
                self._tracer.slice(self._names[i], begin_ns, end_ns)
                begin_ns = end_ns

    def _defer(
        self,
        deferral: Deferral,
        index: object,
        value: object,
        step: int,
        active_ns: int,
        cpu_ns: int | None,
    ) -> DeferredSample:
        now = now_ns()
        sample = DeferredSample(
            position=_position(self._lease),
            index=index,
            value=value,
            step=step,
            randomness=None if self.capture is None else self.capture(),
            active_ns=active_ns + now - self._lease.started_ns,
            cpu_ns=None if cpu_ns is None else thread_time_ns() - cpu_ns,
            longest=self._longest,
            deferred_ns=now,
        )
        deferral.defer(sample)
        return sample


def _position(lease: Lease) -> int:
    position = lease.position
    assert position is not None
    return position
