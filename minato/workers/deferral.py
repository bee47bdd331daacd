"""Deferral: a worker interrupts a slow sample between two transforms, and resumes it later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minato._core import WorkerLedger, now_ns
from minato.observe.meters import Meters

__all__ = ["Deferral", "DeferredSample"]


@dataclass(eq=False)
class DeferredSample:
    """A sample between two of its transforms.

    Attributes:
        position: Its position in the ledger, where it stays claimed.
        key: Its index in the dataset.
        value: The result of the transforms so far.
        step: The transform that is next.
        randomness: State of its generators (``SampleRandomness.capture``); None: they are not bound to samples.
        active_ns: Time spent on it so far.
        cpu_ns: Processor time spent on it so far; None: not measured.
        longest: The longest stage so far (-1: the dataset) and its time in ns; unused if not measured.
        deferred_ns: When it was deferred.
    """

    position: int
    key: Any
    value: Any
    step: int
    randomness: object
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
