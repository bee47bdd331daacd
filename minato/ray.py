"""Workers in a Ray cluster (extra ``ray``).

Each is a local thread, which requests samples, and a remote actor, which runs them with all transforms.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import pickle
import platform
import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np

from minato._compat import ExceptionWithTraceback, kill_actor
from minato._core import Lease, now_ns, run_steps
from minato._support.objects import nbytes_of
from minato._support.pickling import SidePickler
from minato.batching.blobs import ErrorTransport, reported, wrapped
from minato.errors import warn
from minato.observe.meters import Meters
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness, current
from minato.workers.pools import ThreadPool
from minato.workers.reads import Read, Reads
from minato.workers.shared_state import SharedState
from minato.workers.supervision import WorkerLoss, WorkerRecovery
from minato.workers.worker import Worker
from minato.workers.worker_process import WorkerContext, seed_worker

_NOTICEABLE = 0.1
"""A round trip to the actor is noticeable if it takes more than this share of a sample's time."""
_MOST_AHEAD = 8
_SMOOTHING = 0.3  # weight of the latest sample in the mean times


@dataclass(frozen=True)
class ActorSpec:
    """Arguments that all actors of a loader share; number of workers and seed are as in torch's worker processes."""

    dataset: Any
    transforms: Transforms
    num_workers: int
    base_seed: int
    worker_init_fn: Callable[[int], None] | None


class SampleResult(NamedTuple):
    """The result of one sample."""

    failed: bool
    pickled: bytes  # the sample or its exception, without the data of arrays
    arrays: list[np.ndarray]  # the bytes of these
    laps_ns: list[int]  # of the dataset and each transform; one total if the sample raised
    cpu_ns: int  # of all of them
    size_bytes: int  # of the dataset's item
    step: int  # index of the transform that ran last; -1: the dataset itself


# ---- here -----------------------------------------------------------------------------------


class ActorGroup:
    """The actors of a loader, with Ray's options for each (``ActorClass.options``).

    It refers to no object of the user's, which may refer to the loader: whatever ends the loader keeps it.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = options
        self._ray: Any = None
        self._job = ""
        self._make_actor: Callable[[int], Any] | None = None
        self._actors: dict[int, Any] = {}
        self._lock = threading.Lock()

    def connect(self, spec: ActorSpec) -> None:
        """Connect to the cluster with Ray's defaults, unless the program is; the actors' arguments go there once."""
        ray = self._ray = importlib.import_module("ray")
        if not ray.is_initialized():
            ray.init()
        self._job = ray.get_runtime_context().get_job_id()
        server = ray.remote(SampleServer).options(**{"num_cpus": 1, **self._options})
        stored = ray.put(spec)
        self._make_actor = lambda number: server.remote(number, stored)

    def check(self) -> None:
        """Raise a RuntimeError if the actors cannot be reached any more."""
        ray, job = self._ray, ""
        # A call of an actor after the connection was closed would connect again, as another job.
        with contextlib.suppress(Exception):  # while Ray connects or disconnects
            job = ray.get_runtime_context().get_job_id() if ray.is_initialized() else ""
        if not job or job != self._job:
            raise RuntimeError(
                "Ray was shut down while a loader with workers=RayWorkers(...) was in use"
            )

    def start_actor(self, number: int) -> Any:
        """Start an actor for worker ``number``; it begins as soon as the cluster has free resources for it."""
        assert self._make_actor is not None
        with self._lock:
            actor = self._actors[number] = self._make_actor(number)
        return actor

    def run(self, actor: Any, *sample: object) -> Any:
        """Have an actor run a sample; returns the future result. ConnectionError: Ray is not connected any more."""
        if not self._ray.is_initialized():  # a call of an actor would open another connection
            raise ConnectionError("the connection to the cluster is closed")
        return actor.sample.remote(*sample).future()

    def end_all(self) -> None:
        """End all actors."""
        with self._lock:
            actors, self._actors = self._actors, {}
        for actor in actors.values():
            self.end(actor)

    def end(self, actor: object) -> None:
        """End an actor, even while it runs a sample."""
        with contextlib.suppress(Exception):  # the actor has ended with the connection
            kill_actor(self._ray, actor)


class ActorPool(ThreadPool):
    """Worker threads with one actor each; a worker whose actor is lost is replaced."""

    def __init__(
        self,
        state: SharedState,
        context: WorkerContext,
        recovery: WorkerRecovery,
        options: Mapping[str, object],
    ) -> None:
        group = ActorGroup(options)

        def stop() -> None:
            state.stop()
            group.end_all()  # which wakes their threads

        super().__init__(state, context, stop)
        self._group = group
        self._recover = recovery
        self._lost: dict[int, ActorLost] = {}

    def make_worker(self, number: int) -> Worker:
        errors = ErrorTransport((Exception,), wrapped(f"Ray actor {number}"))
        reads = functools.partial(ActorReads, self._group, number)
        end = self.state.worker_ledger(number)
        return self.context.worker(end, self.state, errors, remote_reads=reads)

    def start(self, enough: Callable[[], object] | None = None) -> None:
        # Each works as soon as the cluster has free resources for its actor.
        plan, pipeline = self.context.plan, self.context.plan.pipeline
        numbers = plan.most_workers, plan.base_seed
        spec = ActorSpec(pipeline.dataset, pipeline.transforms, *numbers, plan.init_fn)
        self._group.connect(spec)
        super().start(enough)

    def work(self, number: int) -> Callable[[], bool] | None:
        """Work as worker ``number``; its thread ends when its actor is lost."""
        try:
            return super().work(number)
        except ActorLost as lost:
            self.leave()
            self._lost[number] = lost
            return None

    def check(self) -> None:
        self._group.check()
        super().check()
        for number, lost in list(self._lost.items()):
            warning = self._recover(number, lost.pid, lost.loss)
            del self._lost[number]
            self.replace(number)
            if warning is not None:
                warn(warning)

    def may_leave(self, number: int) -> bool:
        # The loss of an actor was noted before the thread ended, which is replaced.
        return number in self._lost or super().may_leave(number)


class ActorLost(BaseException):
    """The actor is lost, so its worker ends: a BaseException, as handlers of samples' errors must not catch it."""

    def __init__(self, pid: int | None, loss: WorkerLoss) -> None:
        super().__init__(loss.words)
        self.pid, self.loss = pid, loss


class ActorReads(Reads):
    """The samples that an actor runs, as in-flight reads of a worker and as a dataset.

    If round trips are noticeable, it requests the next samples while one runs. Until the actor has started, the limit
    is 0: a worker whose actor waits for free resources claims nothing. The step of the worker's lease is the index of
    the transform that ran; the meters get the times of dataset and transforms.
    """

    def __init__(self, group: ActorGroup, number: int, lease: Lease, meters: Meters) -> None:
        super().__init__(0)
        self._group = group
        self._actor = actor = group.start_actor(number)
        self._lease, self._meters = lease, meters
        self._mean_sample_ns = self._round_trip_ns = 0.0
        self._alone: Read | None = None
        self._pid: int | None = None
        self._host = ""
        self._lost: Exception | None = None
        actor.process_and_node.remote().future().add_done_callback(self._on_started)

    def _on_started(self, future: Future[tuple[int, str]]) -> None:
        # Ray calls this and the other callbacks in a thread of its own.
        try:
            self._pid, self._host = future.result()
        except Exception as error:
            self._lost = error
        self.wake()

    def submit(self, read: Read) -> None:
        # Requests beyond the limit wait in the actor's queue.
        if not self.outstanding:
            self._alone = read
        self.outstanding += 1
        read.started_ns = now_ns()
        try:
            sample = read.index, read.epoch, read.seed, read.occurrence
            future = self._group.run(self._actor, *sample)
        except Exception as error:  # the connection is closed, or the key cannot be pickled
            read.error = error
            self.finish(read)
            return
        future.add_done_callback(functools.partial(self._on_result, read))

    def _on_result(self, read: Read, future: Future[object]) -> None:
        try:
            read.value = future.result()
        except Exception as error:
            read.error = error
        self.finish(read)

    def finished(self) -> Read | None:
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

    def __getitem__(self, key: object) -> Any:
        """Run this thread's current sample once more and wait for it."""
        seed, epoch, _, occurrence = current() or (None, 0, None, 0)
        try:
            future = self._group.run(self._actor, key, epoch, seed, occurrence)
            result: SampleResult = future.result()
        except Exception as error:
            raise self._actor_lost(error) from None
        value, raised = self._unpack(result)
        if raised is not None:
            self._lease.step = result.step
            raise raised
        return value

    def close(self) -> None:
        self._group.end(self._actor)

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
        started = self._pid is not None
        # Ray reports whether the actor failed while it started; without a report it could not be started.
        unable = not started and getattr(error, "actor_init_failed", True)
        where = f" on {self._host}" if started else ""
        # Ray's message, without the lines that name the actor.
        lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
        words = f"is lost{where} ({' '.join(lines[1:] or lines) or type(error).__name__})"
        node_died = "its node has died" in str(error)  # Ray's words
        return ActorLost(self._pid, WorkerLoss(words, started or node_died, unable))


def _smoothed(mean_ns: float, latest_ns: int) -> float:
    return mean_ns + (_SMOOTHING if mean_ns else 1.0) * (latest_ns - mean_ns)


# ---- in the cluster -------------------------------------------------------------------------


class SampleServer:
    """Runs samples one after the other; torch and the dataset see its process as a worker process."""

    def __init__(self, number: int, spec: ActorSpec) -> None:
        self._dataset = spec.dataset
        self._steps = spec.transforms.steps
        self._roots = {"dataset": spec.dataset, **spec.transforms.by_name}
        self._randomness: SampleRandomness | None = None
        self._rescanned = False
        self._laps = array("q", bytes(8 * len(self._steps)))
        self._lease = Lease()
        self._failure: BaseException | None = None
        seed_worker(number, spec.num_workers, spec.base_seed, spec.dataset)
        try:
            if spec.worker_init_fn is not None:
                spec.worker_init_fn(number)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._failure = error

    def process_and_node(self) -> tuple[int, str]:
        """Return the process id and the name of the machine."""
        return os.getpid(), platform.node()

    def sample(self, key: object, epoch: int, seed: int | None, occurrence: int) -> SampleResult:
        """Run a sample, which occurred so often in the epoch before; its random numbers follow from a ``seed``."""
        self._lease.step = -1
        size_bytes = 0
        cpu_ns, begun_ns = thread_time_ns(), now_ns()
        try:
            if self._failure is not None:
                raise self._failure
            while True:
                if seed is not None:
                    if self._randomness is None or self._randomness.base_seed != seed:
                        self._randomness = SampleRandomness(
                            seed, owned=OwnedGenerators(self._roots)
                        )
                    self._randomness.bind(epoch, key, occurrence)
                value = self._dataset[key]
                laps_ns = [now_ns() - begun_ns]
                size_bytes = nbytes_of(value)
                value, _ = run_steps(self._steps, value, 0, 0, self._laps, self._lease)
                if self._rescanned or self._randomness is None:
                    break
                # The first sample may create generators, which were not seeded while it ran.
                self._rescanned = True
                if not self._randomness.look():
                    break
            failed, parts = False, _pack(value)
            laps_ns += self._laps
        except KeyboardInterrupt:  # it alone ends the actor
            raise
        except BaseException as error:
            failed, parts = True, _pack_error(reported(error))
            laps_ns = [now_ns() - begun_ns]
        cpu_ns = thread_time_ns() - cpu_ns
        return SampleResult(failed, *parts, laps_ns, cpu_ns, size_bytes, self._lease.step)


@functools.cache
def _pickler() -> type[SidePickler]:
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

    class Pickler(SidePickler, cloudpickle.Pickler):  # type: ignore[misc]  # an untyped package's class
        """Pickles arrays out of band, and definitions of the user's main module by value."""

        def reducer_override(self, value: object) -> Any:
            reduced = super().reducer_override(value)
            if reduced is NotImplemented:
                reduced = cloudpickle.Pickler.reducer_override(self, value)
            return reduced

    return Pickler


def _pack(value: object) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    pickler = _pickler()(file, "sample", {})
    pickler.dump(value)
    return file.getvalue(), [np.asarray(raw) for raw in pickler.raws()]


def _pack_error(error: Exception) -> tuple[bytes, list[Any]]:
    """Pickle an exception with its traceback as text; a RuntimeError replaces one that cannot be pickled."""
    try:
        packed = _pack(ExceptionWithTraceback(error, error.__traceback__))
        unpack(*packed)
        return packed
    except Exception:
        replacement = RuntimeError(f"{type(error).__qualname__}: {error}")
        return _pack(ExceptionWithTraceback(replacement, error.__traceback__))


def unpack(pickled: bytes, arrays: list[np.ndarray]) -> Any:
    """Return the packed object in writable memory; Ray's own buffers are read-only."""
    return pickle.loads(pickled, buffers=[bytearray(part) for part in arrays])
