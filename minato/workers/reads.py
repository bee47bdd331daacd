"""Reads in flight: several samples of one dataset at once, in threads or as coroutines."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from queue import SimpleQueue
from typing import Any, Protocol

from minato._core.clock import now_ns
from minato.transforms.rng import SampleRandomness

__all__ = ["CoroutineReads", "FinishedReads", "Read", "Reads", "ThreadReads", "reads_of"]

_GRACE_S = 2.0
"""How long the end of a loader waits for reads that are under way; the threads do not outlive the process."""


class Read:
    """One sample to be read, and what came of it.

    Args:
        seed: What the sample's randomness starts from, or None if it is not bound to the sample.
        tag: What the caller wants to find again.
        again_for: The read that this is a second request for.
        occurrence: How often the key came before in the epoch.
    """

    __slots__ = (
        "again_for",
        "asked",
        "attempts",
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
        """Reads of this sample under way; with a second request two."""
        self.value: Any = None
        self.error: BaseException | None = None
        self.started_ns = 0
        """When it began; 0 as long as it has not."""
        self.duration_ns = 0
        self.asked = 0
        """How many generators the read asked minato for."""
        self.step = -1
        """The transform that raised ``error``, if that was not the dataset."""

    def again(self) -> Read:
        """A second request for the sample."""
        self.attempts += 1
        return Read(self.key, self.epoch, self.seed, self.tag, self, self.occurrence)

    def bound(self) -> SampleRandomness | None:
        """Bind what ``minato.numpy_rng`` and its siblings give in this thread to the sample."""
        if self.seed is None:
            return None
        # The global generators belong to the whole process and so to no single one of its reads.
        randomness = SampleRandomness(self.seed, bind_globals=False)
        randomness.bind(self.epoch, self.key, self.occurrence)
        return randomness


class Reads(Protocol):
    """What a worker has asked its dataset for. All methods are for the worker's own thread.

    Attributes:
        limit: How many are under way at once.
        outstanding: Reads submitted and not yet taken back by ``finished``.
        on_finished: Called, in any thread, after a read has finished.
    """

    limit: int
    outstanding: int
    on_finished: Callable[[], None]

    def submit(self, read: Read) -> None:
        """Ask for a sample; those beyond the limit queue up."""

    def finished(self) -> Read | None:
        """Take back a read that has finished, the first first; None if there is none."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is something to take back; whether there is."""

    def close(self) -> None:
        """Begin no further reads, and wait a while for those under way."""


class FinishedReads:
    """The part that all kinds share: finished reads on their way to the worker's thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self.on_finished: Callable[[], None] = lambda: None
        self._done: deque[Read] = deque()
        self._news = threading.Event()

    def finished(self) -> Read | None:
        """Take back a read that has finished, the first first; None if there is none."""
        if not self._done:
            self._news.clear()
            if not self._done:
                return None
        self.outstanding -= 1
        return self._done.popleft()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is something to take back; whether there is."""
        return self._news.wait(timeout_s)

    def _finish(self, read: Read) -> None:
        read.duration_ns = now_ns() - read.started_ns
        self._done.append(read)
        self._news.set()
        self.on_finished()


class ThreadReads(FinishedReads):
    """``dataset[key]`` in threads, which are started as they are needed."""

    def __init__(self, get: Callable[[Any], Any], limit: int) -> None:
        super().__init__(limit)
        self._get = get
        self._asked: SimpleQueue[Read | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, read: Read) -> None:
        """Ask for a sample; those beyond the limit queue up."""
        self.outstanding += 1
        self._asked.put(read)
        if len(self._threads) < min(self.limit, self.outstanding):
            name = f"minato-read-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (read := self._asked.get()) is not None and not self._closed:
            read.started_ns = now_ns()
            try:
                randomness = read.bound()
                read.value = self._get(read.key)
                read.asked = randomness.asked if randomness else 0
            except BaseException as error:  # the worker's thread decides what may end the worker
                read.error = error
            self._finish(read)

    def close(self) -> None:
        """Begin no further reads, and wait a while for those under way."""
        self._closed = True
        for _ in self._threads:
            self._asked.put(None)
        deadline_ns = now_ns() + int(_GRACE_S * 1e9)
        for thread in self._threads:
            thread.join(max(deadline_ns - now_ns(), 0) / 1e9)


class CoroutineReads(FinishedReads):
    """``await dataset.__aget__(key)`` on an event loop in a thread of its own."""

    def __init__(self, aget: Callable[[Any], Coroutine[Any, Any, Any]], limit: int) -> None:
        super().__init__(limit)
        self._aget = aget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued: deque[Read] = deque()

    def submit(self, read: Read) -> None:
        """Ask for a sample; those beyond the limit queue up."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="minato-reads", daemon=True
            )
            self._thread.start()
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
            # Passed on, it would look as if the worker were to end.
            read.error = RuntimeError(f"the read of {read.key!r} was cancelled")
            read.error.__cause__ = error
        except BaseException as error:  # the worker's thread decides what may end the worker
            read.error = error
        self._finish(read)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.run_until_complete(self._cancel())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queued.clear()
        loop.stop()

    def close(self) -> None:
        """Cancel all reads, and end the event loop."""
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop, self._loop)
            self._thread.join(_GRACE_S)


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
            except BaseException as error:  # a cancellation, which is the coroutine's to handle
                argument, advance = error, coroutine.throw
            randomness.restore(state)


def reads_of(dataset: Any, limit: int) -> Reads:
    """The kind that the dataset is made for.

    Args:
        dataset: With ``async def __aget__(key)``, coroutines; otherwise ``dataset[key]`` in threads.
    """
    aget = getattr(dataset, "__aget__", None)
    if aget is not None:
        return CoroutineReads(aget, limit)
    return ThreadReads(functools.partial(operator.getitem, dataset), limit)
