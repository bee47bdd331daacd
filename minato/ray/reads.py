"""A worker's side of a Ray actor: it requests samples and receives results, or finds the actor lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minato._core import now_ns
from minato.observe.stats.costs import Meters
from minato.ray.actor import SampleResult, unpack
from minato.transforms.rng import current
from minato.workers.reads import FinishedReads, Read
from minato.workers.supervision import WorkerLoss

__all__ = ["ActorLost", "ActorReads"]

_NOTICEABLE = 0.1
"""A round trip to the actor is noticeable if it takes more than this share of a sample's time."""
_MOST_AHEAD = 8
_SMOOTHING = 0.3
"""Weight of the latest sample in the mean times."""

_NODE_DIED = "its node has died"
"""Part of Ray's error text."""


class ActorLost(BaseException):
    """The actor is lost, so its worker ends.

    A BaseException, because handlers of samples' errors must not catch it.

    Args:
        pid: Its process id; None if unknown.
    """

    def __init__(self, pid: int | None, loss: WorkerLoss) -> None:
        super().__init__(loss.words)
        self.pid = pid
        self.loss = loss


class ActorReads(FinishedReads):
    """The samples that an actor runs, as in-flight reads of a worker and as a dataset.

    If round trips are noticeable, it requests the next samples while one runs. Until the actor has started, the limit
    is 0: a worker whose actor waits for free resources claims nothing.

    Args:
        actor: Handle of a :class:`minato.ray.actor.SampleServer`.
        end: Ends the actor.
        connected: Returns whether there is a connection to the cluster.
        lease: The worker's lease words; the third is the index of the transform that ran.
        meters: Receive the times of dataset and transforms.
    """

    def __init__(
        self,
        actor: Any,
        end: Callable[[], None],
        connected: Callable[[], bool],
        lease: Any,
        meters: Meters,
    ) -> None:
        super().__init__(0)
        self._actor = actor
        self._end = end
        self._connected = connected
        self._lease = lease
        self._meters = meters
        self._mean_sample_ns = self._round_trip_ns = 0.0
        self._alone: Read | None = None
        self._pid: int | None = None
        self._host = ""
        self._lost: Exception | None = None
        actor.process_and_node.remote().future().add_done_callback(self._on_started)

    def _on_started(self, future: Any) -> None:
        # Ray calls this and the other callbacks in a thread of its own.
        try:
            self._pid, self._host = future.result()
        except Exception as error:
            self._lost = error
        self._any_done.set()

    def submit(self, read: Read) -> None:
        """Request a sample; requests beyond the limit wait in the actor's queue."""
        if not self.outstanding:
            self._alone = read
        self.outstanding += 1
        read.started_ns = now_ns()
        try:
            future = self._ask(read.key, read.epoch, read.seed, read.occurrence)
        except Exception as error:  # the connection is closed, or the key cannot be pickled
            read.error = error
            self._finish(read)
            return
        future.add_done_callback(functools.partial(self._on_result, read))

    def _ask(self, key: Any, epoch: int, seed: int | None, occurrence: int) -> Any:
        if not self._connected():  # the call would open another one
            raise ConnectionError("the connection to the cluster is closed")
        return self._actor.sample.remote(key, epoch, seed, occurrence).future()

    def _on_result(self, read: Read, future: Any) -> None:
        try:
            read.value = future.result()
        except Exception as error:
            read.error = error
        self._finish(read)

    def finished(self) -> Read | None:
        """Return the oldest finished sample; None if there is none.

        Raises:
            ActorLost: The actor is lost.
        """
        if self._lost is not None:
            raise self._actor_lost(self._lost)
        if self.limit == 0:
            # The event stays set, so that the worker does not sleep before it has claimed a sample.
            self.limit = int(self._pid is not None)
            return None
        read = super().finished()
        if read is None:
            return None
        if read.error is not None:
            raise self._actor_lost(read.error)
        result: SampleResult = read.value
        read.duration_ns = sum(result.laps_ns)
        read.step = result.step
        self._update_limit(read)
        read.value, read.error = self._unpack(result)
        return read

    def __getitem__(self, key: Any) -> Any:
        """Run this thread's current sample once more and wait for it."""
        seed, epoch, _, occurrence = current() or (None, 0, None, 0)
        try:
            result: SampleResult = self._ask(key, epoch, seed, occurrence).result()
        except Exception as error:
            raise self._actor_lost(error) from None
        value, raised = self._unpack(result)
        if raised is not None:
            self._lease[2] = result.step
            raise raised
        return value

    def close(self) -> None:
        """End the actor, even while it runs a sample."""
        self._end()

    def _update_limit(self, read: Read) -> None:
        """Set the limit so that the actor never waits for the next request."""
        self._mean_sample_ns = _smoothed(self._mean_sample_ns, read.duration_ns)
        if read is self._alone:  # the other samples also waited for the actor
            self._alone = None
            self._round_trip_ns = _smoothed(
                self._round_trip_ns, now_ns() - read.started_ns - read.duration_ns
            )
        is_noticeable = self._round_trip_ns > _NOTICEABLE * self._mean_sample_ns
        ahead = 1 + int(self._round_trip_ns / max(self._mean_sample_ns, 1)) if is_noticeable else 0
        self.limit = 1 + min(ahead, _MOST_AHEAD)

    def _unpack(self, result: SampleResult) -> tuple[Any, BaseException | None]:
        """Return a sample or its exception, and record its times."""
        try:
            value = unpack(result.pickled, result.arrays)
        except Exception as error:
            return None, error
        if result.failed:
            return None, value
        meters = self._meters
        dataset_ns, *steps_ns = result.laps_ns
        meters.dataset.record(dataset_ns)
        for histogram, step_ns in zip(meters.steps, steps_ns, strict=True):
            histogram.record(step_ns)
        meters.size.record(result.size_bytes)
        meters.cpu.record(result.cpu_ns)
        meters.transforms.record(len(steps_ns))
        return value, None

    def _actor_lost(self, error: BaseException) -> ActorLost:
        """Return the exception for an actor that no longer responds."""
        started = self._pid is not None
        # Ray reports whether the actor failed while it started; without a report it could not be started.
        unable = not started and getattr(error, "actor_init_failed", True)
        infrastructure_fault = started or _NODE_DIED in str(error)
        where = f" on {self._host}" if started else ""
        return ActorLost(
            self._pid,
            WorkerLoss(f"is lost{where} ({_reason(error)})", infrastructure_fault, unable),
        )


def _smoothed(mean_ns: float, latest_ns: int) -> float:
    return mean_ns + (_SMOOTHING if mean_ns else 1.0) * (latest_ns - mean_ns)


def _reason(error: BaseException) -> str:
    """Return Ray's message without the lines that name the actor."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    return " ".join(lines[1:] or lines) or type(error).__name__
