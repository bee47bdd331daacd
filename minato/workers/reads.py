"""Reads in flight: several samples at once, in threads or as coroutines; several batches, by the dataset's library.

Their limit is that of all workers; a read that takes long is hedged by a second request.
"""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import thread_time_ns
from typing import Any

from minato._compat import AsWorker, be_worker_of_thread, worker_of_thread
from minato._core import Histogram, now_ns
from minato._fork_safety import check_owner, end_copy
from minato._support.objects import attribute
from minato._support.threads import living, set_is_over, start_thread
from minato._support.values import text_of
from minato.options import FetchOptions
from minato.sampling.samplers import as_given
from minato.transforms.rng import SampleRandomness, enter_task
from minato.workers.shared_state import SharedReadLimit

_Begin = Callable[[Any, Callable[[Callable[[], Any] | None], None]], bool]
"""``__beginitems__`` of a dataset: ``(indices, done) -> whether it has begun``."""

_GRACE_S = 2.0  # how long a shutdown waits for reads in flight; the threads end with the process
LEAST_LISTS = 2
"""While the worker completes one batch, another is read; and as many are read at once if that is useful."""
_MOST_IN_FLIGHT = 128
"""Samples of the batches that a worker reads at once, unless two batches have more."""
_NEWEST = 0.25  # weight of the newest time between two batches in their mean
_WORTH_HIDING = 1 / 3
"""The least share of the time between two batches; a further batch in flight costs about an eighth of that time."""
_MEASURED_EVERY_NS = 100_000_000
_LEAST_READS = 20  # reads that must have finished before a read counts as a straggler
_LEAST_NS = 1_000_000  # a second request for a faster read saves nothing
_MOST_SAVED = 2.0
"""Second requests that may accumulate in a time without stragglers, so that congestion causes no burst of them."""


@dataclass(eq=False, slots=True)
class Read:
    """One sample to read, and its result; the caller has a ``tag`` for it."""

    index: Any
    epoch: int
    seed: int | None  # seed of the sample's randomness; None if it is not bound to the sample
    tag: Any
    again_for: Read | None = None  # the read that this second request hedges
    occurrence: int = 0  # how often the index came before in the epoch
    attempts: int = 1  # requests for this sample in flight; two if it is hedged
    # Whether the sample is there, so that nobody waits for a further request.
    answered: bool = False
    used: bool = False  # whether transforms have had the value, which they may have changed
    # Makes the value of what has arrived, in the worker's thread; None if ``value`` is there.
    complete: Callable[[], object] | None = None
    value: Any = None
    error: BaseException | None = None
    started_ns: int = 0  # when it began; 0 before that
    duration_ns: int = 0
    cpu_ns: int = 0  # processor time of the thread that read it; 0 if it was not alone there
    asked: int = 0  # number of generators that the read has got from minato
    step: int = -1  # the transform that raised ``error``, if that was not the dataset

    def hedge(self) -> Read:
        """A second request for the sample."""
        self.attempts += 1
        return Read(self.index, self.epoch, self.seed, self.tag, self, self.occurrence)

    def bound(self) -> SampleRandomness | None:
        """Bind what ``minato.numpy_rng`` and the like return in this thread, or task, to the sample."""
        if self.seed is None:
            return None
        # The global generators belong to the process, not to one of its reads.
        randomness = SampleRandomness(self.seed, bind_globals=False)
        randomness.bind(self.epoch, self.index, self.occurrence)
        return randomness


class Reads(ABC):
    """The reads of a worker, and a queue of those that have finished; only the worker's own thread calls the methods.

    Attributes:
        limit: Largest number of reads in flight.
        outstanding: Reads submitted and not yet returned by ``finished``.
        on_finished: Called, in any thread, after a read has finished.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self.on_finished: Callable[[], None] = lambda: None
        self._done: deque[Read] = deque()
        self._any_done = threading.Event()
        self._owner = os.getpid()

    @abstractmethod
    def submit(self, read: Read) -> None:
        """Start a read; reads beyond the limit wait in a queue."""

    @abstractmethod
    def close(self) -> None:
        """Start no further reads, and wait for those in flight, for a limited time."""

    def finished(self) -> Read | None:
        """Return the next read that has finished, in the order in which they finish; None if there is none."""
        if not self._done:
            self._any_done.clear()
            if not self._done:
                return None
        self.outstanding -= 1
        return self._done.popleft()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a read has finished; returns whether one has."""
        check_owner(self._owner)
        return self._any_done.wait(timeout_s)

    def finish(self, read: Read) -> None:
        """Say, in any thread, that a read has finished."""
        end_copy(self._owner, read.error)  # in which no worker waits for the read
        read.duration_ns = now_ns() - read.started_ns
        self._done.append(read)
        self._any_done.set()
        self.on_finished()

    def wake(self) -> None:
        """Wake the worker that waits for a read, although none may have finished."""
        self._any_done.set()


class ThreadReads(Reads):
    """``dataset[index]`` in threads, which start on demand. A thread that waits does not refer to the dataset."""

    def __init__(self, get: Callable[[object], object], limit: int) -> None:
        super().__init__(limit)
        self._get, self._of_worker = get, worker_of_thread()
        self._asked: SimpleQueue[Read | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._reading: dict[threading.Thread, Read] = {}
        self.is_closed = False
        weakref.finalize(self, self._asked.put, None).atexit = False

    def submit(self, read: Read) -> None:
        check_owner(self._owner)
        self.outstanding += 1
        self._asked.put(read)
        # As many threads as there may be reads.
        if len(self._threads) < min(self.limit, self.outstanding):
            name = f"minato-read-{len(self._threads)}"
            arguments = weakref.ref(self), self._asked
            thread = threading.Thread(
                target=_read_in_thread, args=arguments, name=name, daemon=True
            )
            start_thread(thread)
            self._threads.append(thread)  # now that it can be joined

    def perform(self, read: Read) -> bool:
        """Read, in a thread; False if the thread is to end."""
        if self.is_closed:
            return False
        self._reading[threading.current_thread()] = read
        read.started_ns, cpu_ns = now_ns(), thread_time_ns()
        try:
            randomness = read.bound()
            with AsWorker(self._of_worker):
                read.value = self._get(read.index)
            read.asked = randomness.asked if randomness else 0
        except BaseException as error:  # the worker's thread decides whether it ends the worker
            read.error = error
        read.cpu_ns = thread_time_ns() - cpu_ns
        self.finish(read)
        return True

    def close(self) -> None:
        # It waits for those that are not answered alone.
        self.is_closed = True
        self._asked.put(None)
        deadline_ns = now_ns() + int(_GRACE_S * 1e9)
        for thread in self._threads:
            read = self._reading.get(thread)
            if read is None or not (read.again_for or read).answered:
                thread.join(max(deadline_ns - now_ns(), 0) / 1e9)


def _read_in_thread(reference: weakref.ref[ThreadReads], asked: SimpleQueue[Read | None]) -> None:
    set_is_over(lambda: (reads := reference()) is None or reads.is_closed)
    while (read := asked.get()) is not None:
        reads = reference()
        if reads is None or not reads.perform(read):
            break
        del reads, read
    asked.put(None)  # for the next thread: nobody knows of one whose start was interrupted


class CoroutineReads(Reads):
    """``await dataset.__aget__(key)`` on an event loop in a thread of its own."""

    def __init__(self, aget: Callable[[object], Awaitable[object]], limit: int) -> None:
        super().__init__(limit)
        self._aget, self._of_worker = aget, worker_of_thread()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(limit)
        self.is_closed = False

    def submit(self, read: Read) -> None:
        check_owner(self._owner)
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(weakref.ref(self), loop), name="minato-reads", daemon=True
            )
            try:
                start_thread(self._thread)
            except BaseException:
                loop.close()
                raise
            self._loop = loop
            weakref.finalize(self, _stop_loop, loop).atexit = False
        self.outstanding += 1
        self._loop.call_soon_threadsafe(self._begin, self._loop, read)

    def _begin(self, loop: asyncio.AbstractEventLoop, read: Read) -> None:
        task = loop.create_task(self._perform(read))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        be_worker_of_thread(self._of_worker)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            be_worker_of_thread(None)  # which refers to the dataset

    async def _perform(self, read: Read) -> None:
        try:
            async with self._slots:
                read.started_ns = now_ns()
                enter_task()
                randomness = read.bound()
                read.value = await self._aget(read.index)
                read.asked = randomness.asked if randomness else 0
        except asyncio.CancelledError as error:
            # A CancelledError would end the worker.
            read.error = RuntimeError(f"the read of {text_of(read.index)} was cancelled")
            read.error.__cause__ = error
        except BaseException as error:  # the worker's thread decides whether it ends the worker
            read.error = error
        self.finish(read)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closed = True
        loop.stop()

    def close(self) -> None:
        if self._loop is not None and self._thread is not None and living(self._thread):
            self._loop.call_soon_threadsafe(self._stop, self._loop)
            self._thread.join(_GRACE_S)


def _run_loop(reference: weakref.ref[CoroutineReads], loop: asyncio.AbstractEventLoop) -> None:
    # The loop also ends where a task of the dataset's raises SystemExit or KeyboardInterrupt, or calls stop().
    # The task keeps its exception for the read that awaits it, and the loop goes on with the other reads.
    while _is_open(reference) and not loop.is_closed():
        with suppress(BaseException):
            loop.run_forever()
    for ending in (_cancel_tasks, loop.shutdown_asyncgens):
        with suppress(BaseException):
            loop.run_until_complete(ending())
    loop.close()


async def _cancel_tasks() -> None:
    """Cancel all tasks of the event loop, also those of the dataset's libraries."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_GRACE_S)


def _is_open(reference: weakref.ref[CoroutineReads]) -> bool:
    reads = reference()
    return reads is not None and not reads.is_closed


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


class BegunLists(Reads):
    """``dataset.__beginitems__(indices, done)``: a read is that of a whole batch.

    One read is in flight while the worker completes the batch before. More hide the time in which nothing could be done
    for a read on this machine: as many as the worker takes in that time. So the limit grows while the worker waits for
    a distant store. It stays at one where the processors are the limit: further batches in flight would only cost
    memory and processor time. A read that was alone in flight is measured, at most every tenth of a second.

    Nothing runs in a thread of ours: a read that cannot begin counts as finished, and has nothing ``complete``.
    ``busy_ns`` returns how long the threads of the worker have run, or were ready to run; 0: nobody knows.
    """

    def __init__(self, begin: _Begin, busy_ns: Callable[[], int] = int) -> None:
        # 1 as long as none could begin, too: then a worker reads one batch after the other.
        super().__init__(1)
        self._begin = begin
        self._busy_ns = busy_ns
        self._alone: Read | None = None
        self._busy_before_ns = self._measured_ns = 0
        self._waited_ns = self._taken_ns = 0
        self._pace_ns = 0.0

    def submit(self, read: Read) -> None:
        read.started_ns = now_ns()
        if not self.outstanding and read.started_ns - self._measured_ns > _MEASURED_EVERY_NS:
            self._alone, self._measured_ns = read, read.started_ns
            self._busy_before_ns = self._busy_ns()
        self.outstanding += 1
        try:
            begun = self._begin(as_given(read.index), functools.partial(self._arrive, read))
        except Exception:  # of which __getitems__ tells, or which it overcomes
            begun = False
        if not begun:
            self.finish(read)

    def _arrive(self, read: Read, complete: Callable[[], object] | None) -> None:
        read.complete = complete
        self.finish(read)

    def finished(self) -> Read | None:
        read = super().finished()
        if read is None:
            return None
        if read.complete is None:
            self.limit = 1
            return read
        waited_ns = None
        if read is self._alone:
            self._alone = None
            waited_ns = read.duration_ns - (self._busy_ns() - self._busy_before_ns)
        self.adapt(read.started_ns, read.duration_ns, waited_ns, now_ns(), len(read.index))
        return read

    def adapt(
        self, started_ns: int, duration_ns: int, waited_ns: int | None, taken_ns: int, samples: int
    ) -> None:
        """Set the limit after a read of a batch of ``samples``, which the worker took at ``taken_ns``.

        ``waited_ns`` says how long nothing could be done for it on this machine, if it was measured.
        """
        if waited_ns is not None:
            before_ns, waited_ns = self._waited_ns, max(waited_ns, 0)
            if 0 < before_ns < waited_ns:  # a pause of the store comes and goes
                waited_ns = (waited_ns + before_ns) // 2
            self._waited_ns = waited_ns
        self._waited_ns = min(self._waited_ns, duration_ns)
        since_ns = max(taken_ns - max(self._taken_ns, started_ns), 1)
        self._pace_ns += (since_ns - self._pace_ns) * (_NEWEST if self._pace_ns else 1)
        self._taken_ns = taken_ns
        hidden = self._waited_ns / self._pace_ns
        wanted = 1 + math.ceil(hidden) if hidden > _WORTH_HIDING else 1
        self.limit = min(wanted, max(_MOST_IN_FLIGHT // samples, LEAST_LISTS))

    def close(self) -> None:
        """What the library still reads is dropped with its connections."""


def reads_of(dataset: object, limit: int) -> Reads:
    """Return the reads that the dataset supports: by ``async def __aget__(key)``, or ``dataset[key]`` in threads."""
    aget = attribute(dataset, "__aget__")
    if aget is not None:
        return CoroutineReads(aget, limit)
    return ThreadReads(functools.partial(operator.getitem, dataset), limit)


class Hedging:
    """Finds stragglers among the reads of a worker, each once: those longer than a percentile (0 to 100) of all.

    Under congestion every read is a straggler. Beyond the expected share, only one read at a time is hedged.
    """

    def __init__(self, percentile: float) -> None:
        self._quantile = percentile / 100
        self._durations = Histogram()
        self._allowed = 0.0
        self._limit_ns = self._pending = 0

    def note(self, duration_ns: int) -> None:
        """Record the duration of a read."""
        self._durations.record(duration_ns)
        self._allowed = min(self._allowed + 1 - self._quantile, _MOST_SAVED)
        if self._durations.count >= _LEAST_READS:
            self._limit_ns = max(self._durations.percentile(self._quantile), _LEAST_NS)

    def straggler(self, in_flight: Iterable[Read], now_ns: int) -> tuple[Read | None, float | None]:
        """The read to hedge now, with ``on_hedge``; if there is none, after how many seconds there may be one."""
        if not self._limit_ns or (self._allowed < 1 and self._pending):
            return None, None
        late = (read for read in in_flight if read.started_ns and not read.duration_ns)
        waiting = (read for read in late if read.attempts == 1)
        oldest = min(waiting, key=lambda read: read.started_ns, default=None)
        if oldest is None:
            return None, None
        remaining_ns = oldest.started_ns + self._limit_ns - now_ns
        return (oldest, None) if remaining_ns <= 0 else (None, remaining_ns / 1e9)

    def on_hedge(self) -> None:
        """Count a second request."""
        self._allowed = max(self._allowed - 1, 0.0)
        self._pending += 1

    def on_answer(self) -> None:
        """Count the answer to a second request."""
        self._pending -= 1


class InFlight:
    """The reads of a worker, and their ``positions`` until they are complete, without second requests, oldest first."""

    def __init__(
        self, number: int, reads: Reads, read_limit: SharedReadLimit, options: FetchOptions
    ) -> None:
        self.reads = reads
        self.positions: dict[Read, int] = {}
        self._number, self._read_limit = number, read_limit
        self._read_limit.begin(number)
        self._counters = options.counters
        percentile = options.hedge_percentile
        self._hedging = None if percentile is None else Hedging(percentile)
        self._waiting: deque[Read] = deque()

    @property
    def may_read_more(self) -> bool:
        """Whether the reads themselves have room for another one."""
        return self.reads.outstanding < self.reads.limit

    def room(self) -> int:
        """Number of reads that may begin now; none as long as earlier ones wait."""
        self.begin()
        if self._waiting or not self.may_read_more:
            return 0
        # Ask how many reads the other workers leave to this one.
        free = self._read_limit.take(self._number, self.reads.limit - self.reads.outstanding)
        self._read_limit.give_back(self._number, free)
        return free

    def add(self, read: Read, position: int) -> None:
        """Add a read, which begins as soon as the limits allow."""
        self.positions[read] = position
        self._waiting.append(read)

    def begin(self) -> None:
        """Begin the reads that wait, as far as the limits allow."""
        if not self._waiting:
            return
        count = len(self._waiting)
        if not self._read_limit.unlimited:  # otherwise they queue for the threads
            count = min(count, self.reads.limit - self.reads.outstanding)
        granted = self._read_limit.take(self._number, count) if count > 0 else 0
        for _ in range(granted):
            self.reads.submit(self._waiting.popleft())

    def hedge(self) -> float | None:
        """Hedge a straggler if there is one; else return in how many seconds there may be one, None if unknown."""
        if self._hedging is None or not self.may_read_more:
            return None
        straggler, later_s = self._hedging.straggler(self.positions, now_ns())
        if straggler is not None and self._read_limit.take(self._number, 1):
            self._hedging.on_hedge()
            self._count(hedged=1)
            self.reads.submit(straggler.hedge())
        return later_s

    def take(self, read: Read) -> int | None:
        """Take a read that has finished; returns the position of its sample, None if it is not needed."""
        self._read_limit.give_back(self._number)
        first = read.again_for or read
        first.attempts -= 1
        if self._hedging is not None and read is not first:
            self._hedging.on_answer()
        if read.error is not None and first.attempts and first in self.positions:
            return None  # the other request may succeed
        position = self.positions.pop(first, None)
        if position is None:
            return None  # the other request has succeeded, or nobody needs it any more
        first.answered = True
        if self._hedging is not None:
            self._hedging.note(read.duration_ns)
        self._count(reads=1, hedges_won=int(read is not first))
        return position

    def forget(self) -> None:
        """Drop all reads: what they return is not needed."""
        self.positions.clear()
        self._waiting.clear()

    def _count(self, **by: int) -> None:
        if self._counters is not None:
            self._counters.add(**by)
