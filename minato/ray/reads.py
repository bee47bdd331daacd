"""A worker's end of a Ray actor: samples are asked for, answers come back, or the actor is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minato._core.clock import now_ns
from minato.observe.stats.profile import Meters
from minato.ray.actor import Answer, unpacked
from minato.transforms.rng import current
from minato.workers.reads import FinishedReads, Read
from minato.workers.supervision import WorkerLoss

__all__ = ["ActorLost", "ActorReads"]

_FELT = 0.1
"""The way to the actor and back is felt where it takes more than this part of a sample."""
_MOST_AHEAD = 8
_SMOOTHING = 0.3
"""Weight of the latest sample in the mean times."""

_NODE_DIED = "its node has died"
"""In what Ray says of an actor."""


class ActorLost(BaseException):
    """The actor is gone, and so its worker ends. No error of a sample: nothing that catches these may see it.

    Args:
        pid: Of its process, None if nobody knows.
    """

    def __init__(self, pid: int | None, loss: WorkerLoss) -> None:
        super().__init__(loss.words)
        self.pid = pid
        self.loss = loss


class ActorReads(FinishedReads):
    """Samples that an actor runs one after the other, as reads of a worker; and the same as a dataset.

    The next one is asked for while one runs, where the way to the actor would be felt. Until the actor has begun, the
    limit is 0: a worker whose actor has no room in the cluster claims nothing.

    Args:
        actor: Handle of a :class:`minato.ray.actor.SampleServer`.
        end: Ends it.
        connected: Tells whether there is a connection to the cluster.
        lease: The worker's lease words, the third of which names the transform that ran.
        meters: Receive what the stages cost.
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
        self._usual_ns = self._way_ns = 0.0
        self._alone: Read | None = None
        self._pid: int | None = None
        self._host = ""
        self._lost: Exception | None = None
        actor.whereabouts.remote().future().add_done_callback(self._arrive)

    def _arrive(self, future: Any) -> None:
        # In a thread of Ray's, as the other callbacks.
        try:
            self._pid, self._host = future.result()
        except Exception as error:
            self._lost = error
        self._news.set()

    def submit(self, read: Read) -> None:
        """Ask for a sample; those beyond the limit queue up."""
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
        future.add_done_callback(functools.partial(self._answered, read))

    def _ask(self, key: Any, epoch: int, seed: int | None, occurrence: int) -> Any:
        if not self._connected():  # the call would open another one
            raise ConnectionError("the connection to the cluster is closed")
        return self._actor.sample.remote(key, epoch, seed, occurrence).future()

    def _answered(self, read: Read, future: Any) -> None:
        try:
            read.value = future.result()
        except Exception as error:
            read.error = error
        self._finish(read)

    def finished(self) -> Read | None:
        """Take back a sample that was run, the first first; None if there is none.

        Raises:
            ActorLost: There will be no more.
        """
        if self._lost is not None:
            raise self._loss(self._lost)
        if self.limit == 0:
            # The news stays, so that the worker does not rest before it has claimed.
            self.limit = int(self._pid is not None)
            return None
        read = super().finished()
        if read is None:
            return None
        if read.error is not None:
            raise self._loss(read.error)
        answer: Answer = read.value
        read.duration_ns = sum(answer.laps_ns)
        read.step = answer.step
        self._learn(read)
        read.value, read.error = self._taken(answer)
        return read

    def __getitem__(self, key: Any) -> Any:
        """The sample that this thread has in hand, run once more while the caller waits."""
        seed, epoch, _, occurrence = current() or (None, 0, None, 0)
        try:
            answer: Answer = self._ask(key, epoch, seed, occurrence).result()
        except Exception as error:
            raise self._loss(error) from None
        value, raised = self._taken(answer)
        if raised is not None:
            self._lease[2] = answer.step
            raise raised
        return value

    def close(self) -> None:
        """End the actor, whatever it does."""
        self._end()

    def _learn(self, read: Read) -> None:
        """Ask for as many samples ahead as it takes for the actor not to wait for the next one."""
        self._usual_ns = _smoothed(self._usual_ns, read.duration_ns)
        if read is self._alone:  # any other had to wait for the actor, too
            self._alone = None
            self._way_ns = _smoothed(self._way_ns, now_ns() - read.started_ns - read.duration_ns)
        felt = self._way_ns > _FELT * self._usual_ns
        ahead = 1 + int(self._way_ns / max(self._usual_ns, 1)) if felt else 0
        self.limit = 1 + min(ahead, _MOST_AHEAD)

    def _taken(self, answer: Answer) -> tuple[Any, BaseException | None]:
        """A sample, or what it raised; its costs are noted."""
        try:
            result = unpacked(answer.pickled, answer.arrays)
        except Exception as error:
            return None, error
        if answer.failed:
            return None, result
        meters = self._meters
        dataset_ns, *steps_ns = answer.laps_ns
        meters.dataset.record(dataset_ns)
        for histogram, step_ns in zip(meters.steps, steps_ns, strict=True):
            histogram.record(step_ns)
        meters.size.record(answer.size_bytes)
        meters.cpu.record(answer.cpu_ns)
        meters.transforms.record(len(steps_ns))
        return result, None

    def _loss(self, error: BaseException) -> ActorLost:
        """What to tell of an actor that does not answer any more."""
        started = self._pid is not None
        # Ray says whether it was lost while it was made, and nothing where it could not be made at all.
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
    """What Ray says, without the lines that name the actor."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    return " ".join(lines[1:] or lines) or type(error).__name__
