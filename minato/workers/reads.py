"""Reads in flight: several samples of one dataset at once, in threads, as coroutines, or by a library of its own."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

from minato._core import now_ns
from minato._fork_safety import check_owner, end_copy
from minato._support.objects import attribute
from minato._support.text import text_of
from minato._support.threads import start_thread
from minato.transforms.rng import SampleRandomness

__all__ = [
    "Begin",
    "BegunReads",
    "CoroutineReads",
    "FinishedReads",
    "Read",
    "Reads",
    "ThreadReads",
    "reads_of",
]

Begin = Callable[[Any, Callable[[Callable[[], Any] | None], None]], bool]
"""``__begin__`` of a dataset: ``(index, done) -> whether it has begun``; see :func:`reads_of`."""

_GRACE_S = 2.0
"""How long a shutdown waits for reads in flight; the threads end with the process."""


class Read:
    """One sample to read, and its result.

    Args:
        seed: Seed of the sample's randomness; None if it is not bound to the sample.
        tag: The caller's own value.
        again_for: The read that this second request hedges.
        occurrence: How often the index came before in the epoch.
    """

    __slots__ = (
        "again_for",
        "answered",
        "asked",
        "attempts",
        "complete",
        "duration_ns",
        "epoch",
        "error",
        "key",
        "occurrence",
        "seed",
        "started_ns",
        "step",
        "tag",
        "value",
    )

    def __init__(
        self,
        key: Any,
        epoch: int,
        seed: int | None,
        tag: Any,
        again_for: Read | None = None,
        occurrence: int = 0,
    ) -> None:
        self.key = key
        self.occurrence = occurrence
        self.epoch = epoch
        self.seed = seed
        self.tag = tag
        self.again_for = again_for
        self.attempts = 1
        """Requests for this sample in flight; two if it is hedged."""
        self.answered = False
        """Whether the sample is there, so that nobody waits for a further request."""
        self.complete: Callable[[], Any] | None = None
        """Makes the value of what has arrived, in the worker's thread; None if ``value`` is there."""
        self.value: Any = None
        self.error: BaseException | None = None
        self.started_ns = 0
        """When it began; 0 before that."""
        self.duration_ns = 0
        self.asked = 0
        """Number of generators that the read has got from minato."""
        self.step = -1
        """The transform that raised ``error``, if that was not the dataset."""

    def hedge(self) -> Read:
        """A second request for the sample."""
        self.attempts += 1
        return Read(self.key, self.epoch, self.seed, self.tag, self, self.occurrence)

    def bound(self) -> SampleRandomness | None:
        """Bind what ``minato.numpy_rng`` and the like return in this thread to the sample."""
        if self.seed is None:
            return None
        # The global generators belong to the process, not to one of its reads.
        randomness = SampleRandomness(self.seed, bind_globals=False)
        randomness.bind(self.epoch, self.key, self.occurrence)
        return randomness


class Reads(Protocol):
    """The reads of a worker. Only the worker's own thread may call the methods.

    Attributes:
        limit: Largest number of reads in flight.
        outstanding: Reads submitted and not yet returned by ``finished``.
        on_finished: Called, in any thread, after a read has finished.
    """

    limit: int
    outstanding: int
    on_finished: Callable[[], None]

    def submit(self, read: Read) -> None:
        """Start a read; reads beyond the limit wait in a queue."""

    def finished(self) -> Read | None:
        """Return the next read that has finished, in the order in which they finish; None if there is none."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a read has finished; returns whether one has."""

    def close(self) -> None:
        """Start no further reads, and wait for those in flight, for a limited time."""


class FinishedReads:
    """The common part of all kinds: a queue of finished reads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self.on_finished: Callable[[], None] = lambda: None
        self._done: deque[Read] = deque()
        self._any_done = threading.Event()
        self._owner = os.getpid()

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

    def _finish(self, read: Read) -> None:
        end_copy(self._owner, read.error)  # in which no worker waits for the read
        read.duration_ns = now_ns() - read.started_ns
        self._done.append(read)
        self._any_done.set()
        self.on_finished()


class ThreadReads(FinishedReads):
    """``dataset[index]`` in threads, which start on demand. A thread that waits does not refer to the dataset."""

    def __init__(self, get: Callable[[Any], Any], limit: int) -> None:
        super().__init__(limit)
        self._get = get
        self._asked: SimpleQueue[Read | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._reading: dict[threading.Thread, Read] = {}
        self._closed = False
        weakref.finalize(self, _end_threads, self._asked, self._threads).atexit = False

    def submit(self, read: Read) -> None:
        """Start a read; reads beyond the limit wait in a queue."""
        check_owner(self._owner)
        self.outstanding += 1
        self._ask(read)

    def _ask(self, read: Read) -> None:
        """Let a thread read; there are as many threads as there may be reads."""
        self._asked.put(read)
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
        if self._closed:
            return False
        self._reading[threading.current_thread()] = read
        read.started_ns = now_ns()
        try:
            randomness = read.bound()
            read.value = self._get(read.key)
            read.asked = randomness.asked if randomness else 0
        except BaseException as error:  # the worker's thread decides whether it ends the worker
            read.error = error
        self._finish(read)
        return True

    def close(self) -> None:
        """Start no further reads, and wait for those in flight that are not answered, for a limited time."""
        self._closed = True
        _end_threads(self._asked, self._threads)
        deadline_ns = now_ns() + int(_GRACE_S * 1e9)
        for thread in self._threads:
            read = self._reading.get(thread)
            if read is None or not (read.again_for or read).answered:
                thread.join(max(deadline_ns - now_ns(), 0) / 1e9)


def _read_in_thread(reference: weakref.ref[ThreadReads], asked: SimpleQueue[Read | None]) -> None:
    while (read := asked.get()) is not None:
        reads = reference()
        if reads is None or not reads.perform(read):
            return
        del reads, read


def _end_threads(asked: SimpleQueue[Read | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        asked.put(None)


class BegunReads(ThreadReads):
    """``dataset.__begin__(key, done)``, whose library reads without a thread for each read.

    The library's thread only notes that a read has finished, and begins the next one: no thread of ours stands between
    the library and the worker, which makes the value itself. What cannot begin, or has failed, ``dataset[key]`` reads
    in a thread, where it may wait and try again.
    """

    def __init__(self, begin: Begin, get: Callable[[Any], Any], limit: int) -> None:
        super().__init__(get, limit)
        self._begin = begin
        self._free = limit
        self._queued: deque[Read] = deque()
        self._lock = threading.Lock()

    def submit(self, read: Read) -> None:
        """Start a read; reads beyond the limit wait in a queue."""
        check_owner(self._owner)
        self.outstanding += 1
        with self._lock:
            if not self._free:
                self._queued.append(read)
                return
            self._free -= 1
        self._start(read)

    def _start(self, read: Read) -> None:
        read.started_ns = now_ns()
        try:
            begun = self._begin(read.key, functools.partial(self._arrive, read))
        except Exception:  # of which dataset[key] tells, or which it overcomes
            begun = False
        if not begun:
            self._ask(read)

    def _ask(self, read: Read) -> None:
        with self._lock:  # a thread of the library may be here, too
            super()._ask(read)

    def _arrive(self, read: Read, complete: Callable[[], Any] | None) -> None:
        if complete is None:
            self._ask(read)
        else:
            read.complete = complete
            self._finish(read)

    def _finish(self, read: Read) -> None:
        super()._finish(read)
        with self._lock:
            if not self._queued or self._closed:
                self._free += 1
                return
            following = self._queued.popleft()
        self._start(following)

    def finished(self) -> Read | None:
        """Return the next read that has finished, in the order in which they finish; None if there is none."""
        read = super().finished()
        if read is not None and read.complete is not None:
            self._make_value(read, read.complete)
        return read

    def _make_value(self, read: Read, complete: Callable[[], Any]) -> None:
        began_ns = now_ns()
        try:
            randomness = read.bound()
            read.value = complete()
            read.asked = randomness.asked if randomness else 0
        except BaseException as error:  # the worker decides whether it ends the worker
            read.error = error
        read.complete = None
        read.duration_ns += now_ns() - began_ns


class CoroutineReads(FinishedReads):
    """``await dataset.__aget__(key)`` on an event loop in a thread of its own."""

    def __init__(self, aget: Callable[[Any], Coroutine[Any, Any, Any]], limit: int) -> None:
        super().__init__(limit)
        self._aget = aget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued: deque[Read] = deque()
        self._closed = False

    def submit(self, read: Read) -> None:
        """Start a read; reads beyond the limit wait in a queue."""
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
        if len(self._tasks) == self.limit:
            self._queued.append(read)
            return
        task = loop.create_task(self._perform(read))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._end, loop))

    def _end(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._queued:
            self._begin(loop, self._queued.popleft())

    async def _perform(self, read: Read) -> None:
        read.started_ns = now_ns()
        try:
            randomness = read.bound()
            coroutine = self._aget(read.key)
            read.value = await (_Bound(coroutine, randomness) if randomness else coroutine)
            read.asked = randomness.asked if randomness else 0
        except asyncio.CancelledError as error:
            # A CancelledError would end the worker.
            read.error = RuntimeError(f"the read of {text_of(read.key)} was cancelled")
            read.error.__cause__ = error
        except BaseException as error:  # the worker's thread decides whether it ends the worker
            read.error = error
        self._finish(read)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    async def cancel(self) -> None:
        """Cancel all reads, in the thread of the event loop."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queued.clear()
        self._closed = True
        loop.stop()

    def close(self) -> None:
        """Cancel all reads, and end the event loop."""
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop, self._loop)
            self._thread.join(_GRACE_S)


def _run_loop(reference: weakref.ref[CoroutineReads], loop: asyncio.AbstractEventLoop) -> None:
    # The loop also ends where a task of the dataset's raises SystemExit or KeyboardInterrupt, or calls stop().
    # The task keeps its exception for the read that awaits it, and the loop goes on with the other reads.
    while _is_open(reference) and not loop.is_closed():
        with suppress(BaseException):
            loop.run_forever()
    reads = reference()
    for ending in (
        (loop.shutdown_asyncgens,) if reads is None else (reads.cancel, loop.shutdown_asyncgens)
    ):
        with suppress(BaseException):
            loop.run_until_complete(ending())
    loop.close()


def _is_open(reference: weakref.ref[CoroutineReads]) -> bool:
    reads = reference()
    return reads is not None and not reads.is_closed


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


class _Bound:
    """A coroutine whose steps run bound to its sample, whatever other coroutines of the loop do in between."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], randomness: SampleRandomness) -> None:
        self._coroutine = coroutine
        self._randomness = randomness

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, randomness = self._coroutine, self._randomness
        advance: Callable[[Any], Any] = coroutine.send
        argument: Any = None
        while True:
            try:
                awaited = advance(argument)
            except StopIteration as end:
                return end.value
            state = randomness.capture()
            try:
                argument = yield awaited
                advance = coroutine.send
            except BaseException as error:  # a cancellation, which the coroutine handles
                argument, advance = error, coroutine.throw
            randomness.restore(state)


def reads_of(dataset: object, limit: int) -> Reads:
    """Return the kind of reads that the dataset supports.

    Args:
        dataset: With ``__begin__(key, done)``, which begins to read and returns True, or False if it cannot. Then
            ``done`` is called once, in any thread: with a function that returns the sample, or with None if
            ``dataset[key]`` must read it. With ``async def __aget__(key)``, coroutines; otherwise ``dataset[key]`` in
            threads.
    """
    get = functools.partial(operator.getitem, dataset)
    begin: Begin | None = attribute(dataset, "__begin__")
    if begin is not None:
        return BegunReads(begin, get, limit)
    aget = attribute(dataset, "__aget__")
    if aget is not None:
        return CoroutineReads(aget, limit)
    return ThreadReads(get, limit)
