"""The parts of a scheduler that have something to tell, with a lane to which they tell it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from time import thread_time_ns
from typing import Any, NamedTuple

from minato._core.clock import now_ns
from minato.scheduler.concurrent_worker import ConcurrentWorker
from minato.scheduler.deaths import Loss
from minato.scheduler.deferral import DeferredSample
from minato.scheduler.dispatcher import Dispatcher
from minato.scheduler.fetch import Fetcher, StreamFetcher
from minato.scheduler.in_flight import InFlight
from minato.scheduler.reads import Read
from minato.scheduler.runner import Fetch, Runner
from minato.scheduler.stepper import Stepper
from minato.scheduler.worker import Worker
from minato.trace.lanes import REPEATED, SAMPLE, Lane, in_json

__all__ = ["PLAIN", "Parts", "TracedDispatcher", "telling_deaths", "traced_parts"]


class TracedStepper(Stepper):
    """Tells of the stages of a sample.

    Args:
        names: Of the transforms.
    """

    def __init__(self, lane: Lane, names: tuple[str, ...], *args: Any) -> None:
        super().__init__(*args)
        self._lane = lane
        self._names = names

    def measured(self, key: Any) -> Any:
        """As ever."""
        cpu_ns, begun_ns = thread_time_ns(), now_ns()
        value = self._dataset[key]
        ended_ns = now_ns()
        self._lane.slice("dataset", begun_ns, ended_ns)
        return self.transformed(key, value, ended_ns - begun_ns, cpu_ns)

    def resume(self, sample: DeferredSample) -> Any:
        """As ever, and told as a sample."""
        return _told(self._lane, self._lease, super().resume, sample, sample.key)

    def _note(self, first: int, stop: int) -> None:
        super()._note(first, stop)
        # They have ended by now, so that none is shown to begin before the one before it has ended.
        begun_ns = now_ns() - sum(self._laps[first:stop])
        for i in range(first, stop):
            ended_ns = begun_ns + self._laps[i]
            self._lane.slice(self._names[i], begun_ns, ended_ns)
            begun_ns = ended_ns


class TracedRunner(Runner):
    """Tells of samples, and has the stages of each one measured."""

    def __init__(self, lane: Lane, *args: Any) -> None:
        super().__init__(*args)
        self._lane = lane
        self.whole: Any = None
        """A key that stands for all samples of a batch."""
        self.name = SAMPLE
        """What samples are called."""

    def run_steps(
        self, position: int, epoch: int, keys: list[Any], plain: Fetch, slow_ns: int
    ) -> tuple[list[Any], BaseException | None]:
        """As ever, but stage by stage in any case."""
        if self._stepper is None:
            return self.run(position, epoch, keys, plain)
        self._stepper.slow_ns = 0 if self._reruns(len(keys)) else slow_ns
        return self.run(position, epoch, keys, self._stepper.measured)

    def run(
        self,
        position: int,
        epoch: int,
        keys: list[Any],
        fetch: Fetch,
        probes: bool = False,
        batch_size: int = 0,
    ) -> tuple[list[Any], BaseException | None]:
        """As ever."""
        lane, lease = self._lane, self._lease
        lane.epoch = epoch

        def told(key: Any) -> Any:
            if key is self.whole:
                return _told_as_one(lane, fetch, key)
            return _told(lane, lease, fetch, key, key, self.name)

        return super().run(position, epoch, keys, told, batch_size=batch_size)

    def resume(
        self, deferred: DeferredSample, epoch: int
    ) -> tuple[list[Any], BaseException | None]:
        """As ever."""
        self._lane.epoch = epoch
        return super().resume(deferred, epoch)


def _told(lane: Lane, lease: Any, fetch: Fetch, what: Any, key: Any, name: str = SAMPLE) -> Any:
    """Tell of one sample."""
    line, begun_ns, position = lane.begin(), now_ns(), lease[0]
    args = f'"index":{in_json(key)},"epoch":{lane.epoch}'
    try:
        sample = fetch(what)
    except BaseException as error:
        args = f'{args},"error":{in_json(type(error).__name__)}'
        lane.sample(line, position, f"{SAMPLE} (failed)", begun_ns, args)
        raise
    if type(sample) is DeferredSample:
        name = f"{SAMPLE} (deferred)"
    lane.sample(line, position, name, begun_ns, args)
    return sample


def _told_as_one(lane: Lane, fetch: Fetch, key: Any) -> Any:
    """Tell of all samples of a batch."""
    line, begun_ns = lane.begin(), now_ns()
    samples = fetch(key)
    count = len(samples) if isinstance(samples, list) else len(key)
    lane.end(line, f"{SAMPLE}s", begun_ns, f'"count":{count},"epoch":{lane.epoch}')
    return samples


class TracedWorker(Worker):
    """Tells when it waits, and has all that was told written at the end of each lease.

    Args:
        args: Those of :class:`Worker`.
    """

    _runner: TracedRunner

    def __init__(self, lane: Lane, *args: Any) -> None:
        super().__init__(*args)
        self._lane = lane
        lane.instant(f"process {os.getpid()}, thread {threading.get_native_id()}")
        lane.flush()
        self.endings.append(lane.flush)

    def rest(self, seen: int, timeout_s: float) -> bool:
        """As ever."""
        begun_ns = now_ns()
        try:
            return super().rest(seen, timeout_s)
        finally:
            what = "enough is loaded" if self._lacks_room else "nothing is left to begin"
            what = what if self.idle else "for reads"
            self._lane.slice(f"wait ({what})", begun_ns, now_ns())

    def _end(self, samples: int, started_ns: int) -> int:
        busy_ns = super()._end(samples, started_ns)
        self._lane.flush()
        return busy_ns

    def _run_again(self, batch: int) -> list[Any]:
        self._runner.name = REPEATED
        try:
            return super()._run_again(batch)
        finally:
            self._runner.name = SAMPLE

    def _run_list(
        self,
        fetcher: Fetcher,
        fetch: Fetch,
        batch: int,
        first: int,
        count: int,
        epoch: int,
        keys: Sequence[Any],
    ) -> None:
        self._runner.whole = keys
        super()._run_list(fetcher, fetch, batch, first, count, epoch, keys)
        self._runner.whole = None

    def _run_stream(
        self, stream: StreamFetcher, batch: int, first: int, this_pass: object, wanted: int
    ) -> None:
        self._runner.whole = wanted
        super()._run_stream(stream, batch, first, this_pass, wanted)
        self._runner.whole = None


class TracedConcurrentWorker(TracedWorker, ConcurrentWorker):
    """Tells of its reads too, which overlap."""

    def _finish(self, read: Read, position: int) -> None:
        ended_ns, args = read.started_ns + read.duration_ns, f'"index":{in_json(read.key)}'
        self._lane.span("read", read.started_ns, ended_ns, args)
        super()._finish(read, position)


class TracedDispatcher(Dispatcher):
    """Tells of what happens inside ``next()``, and of each batch from its opening to its delivery.

    Args:
        sleep: What the consumer does while it has no batch.
    """

    def __init__(self, lane: Lane, sleep: str, *args: Any) -> None:
        super().__init__(*args)
        self._lane = lane
        self._sleep_name = sleep
        self._opened_ns: dict[int, int] = {}
        self._found_ns = 0

    def next(self) -> InFlight:
        """As ever."""
        item = super().next()
        self._found_ns = now_ns()
        return item

    def done(self, item: InFlight, batch_bytes: int) -> None:
        """As ever."""
        now = now_ns()
        self._lane.slice("read", self._found_ns, now)
        args = f'"epoch":{item.epoch},"samples":{len(item.keys)}'
        self._lane.span("batch", self._opened_ns[item.record], now, args)
        super().done(item, batch_bytes)

    def _publish(self, keys: list[Any], owner: int) -> InFlight:
        begun_ns = now_ns()
        item = super()._publish(keys, owner)
        self._opened_ns[item.record] = begun_ns
        return item

    def _sleep(self, deadline: float | None, seen: int | None = None) -> float:
        begun_ns = now_ns()
        try:
            return super()._sleep(deadline, seen)
        finally:
            self._lane.slice(self._sleep_name, begun_ns, now_ns())


class Parts(NamedTuple):
    """What makes the parts of a worker."""

    stepper: Callable[..., Stepper]
    runner: Callable[..., Runner]
    worker: Callable[..., Worker]
    concurrent_worker: Callable[..., Worker]


PLAIN = Parts(Stepper, Runner, Worker, ConcurrentWorker)


def traced_parts(lane: Lane, names: tuple[str, ...]) -> Parts:
    """What makes those that tell this lane; ``names`` are the transforms'."""
    return Parts(
        functools.partial(TracedStepper, lane, names),
        functools.partial(TracedRunner, lane),
        functools.partial(TracedWorker, lane),
        functools.partial(TracedConcurrentWorker, lane),
    )


def telling_deaths(
    lane_of: Callable[[int], Lane], buried: Callable[[int, int | None, int | Loss | None], None]
) -> Callable[[int, int | None, int | Loss | None], None]:
    """The same as ``buried``, which also tells of it in the lane of the dead worker."""

    def told(number: int, pid: int | None, exit_code: int | Loss | None) -> None:
        lane = lane_of(number)
        how = "lost" if isinstance(exit_code, Loss) else f"exit code {exit_code}"
        lane.instant(f"process {pid} has died ({how})")
        lane.flush()
        buried(number, pid, exit_code)

    return told
