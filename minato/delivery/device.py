"""Reads the next batches early, and copies them to a device or to pinned memory while the training computes."""

from __future__ import annotations

import collections.abc
import copy
import functools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch

from minato._compat import has_cuda_context
from minato._core import Ledger, now_ns
from minato._core.codes import ENDED, ERROR_BLOB, FAILED, KIND_MASK, SKIPPED, STATES
from minato._support.objects import attribute
from minato.batching.arena import Arena, DeviceEvent, DeviceTimes, MemoryPinner, Slot
from minato.batching.collate import like
from minato.batching.reader import BatchReader
from minato.errors import Postponed
from minato.observe.tracer import NULL_TRACER, Tracer

_PORTABLE = 1  # ``cudaHostRegisterPortable``: pinned for all devices of this process
_WORTH_A_THREAD_BYTES = 1 << 20
"""The iterator itself pins smaller batches: that takes less time than a switch between two threads."""

Pin = Callable[[Any], Any]  # copies a batch to memory that torch has pinned


class Upcoming(Protocol):
    """A complete batch that ``next()`` has not returned yet."""

    record: int
    slot: Slot


class Copier(ABC):
    """Copies batches to a device or to pinned memory.

    ``read`` makes the batch: tensors that view its slot. A slot is free when its last view is gone, so a copier holds
    the batch until nothing reads the slot by CPU. For reads by a device, which no reference shows, it records an event
    with :meth:`PinnedSlots.in_use_until`.
    """

    least_nbytes = 0  # copies of smaller batches do not start before ``next()`` asks for them

    @abstractmethod
    def start(self, slot: Slot, read: Callable[[], object]) -> Any:
        """Start to copy a batch; returns the argument of ``finish``."""

    @abstractmethod
    def finish(self, started: Any) -> Any:
        """Return the batch, whose copy was started earlier."""

    def copy(self, slot: Slot, read: Callable[[], object]) -> Any:
        """Return a batch whose copy was not started earlier."""
        return self.finish(self.start(slot, read))


class PrefetchReader:
    """Reads batches like :class:`BatchReader`, and has the next ones copied early.

    Those count as open until ``next()`` returns them: neither the state nor the memory budget takes them for delivered.
    """

    def __init__(self, reader: BatchReader, ledger: Ledger, copier: Copier) -> None:
        self._reader = reader
        self.failure = reader.failure
        self._ledger = ledger
        self._copier = copier
        # By record: the started copy, or the exception that starting it raised.
        self._started: dict[int, Any] = {}
        # Read with the batch: the slot that holds the state may be in use again before ``next()`` asks for it.
        self._states: dict[int, tuple[int, Any] | None] = {}

    def read(self, record: int, slot: Slot) -> Any:
        """Return a batch, or raise what its copy raised."""
        started = self._started.get(record)
        if started is None:
            return self._copier.copy(slot, functools.partial(self._reader.read, record, slot))
        if isinstance(started, Postponed):
            started.reraise()
        return self._copier.finish(started)

    def state(self, record: int) -> tuple[int, Any] | None:
        """Return the state of the worker's dataset (see :meth:`BatchReader.state`)."""
        return self._states[record] if record in self._states else self._reader.state(record)

    def discard(self, record: int, slot: Slot) -> None:
        """Drop a batch, apart from what ``read`` has returned."""
        self._states.pop(record, None)
        self._started.pop(record, None)
        self._reader.discard(record, slot)

    def prefetch(self, upcoming: Iterable[Upcoming]) -> None:
        """Start the copies of the next batches; :meth:`read` raises their exceptions."""
        for item in upcoming:
            record = self._ledger.describe(item.record)
            is_failed = record.result & KIND_MASK == ERROR_BLOB
            if is_failed or record.flags & (FAILED | ENDED | SKIPPED):
                continue
            if item.record in self._started or record.used_nbytes < self._copier.least_nbytes:
                continue
            try:
                if record.flags & STATES:
                    self._states[item.record] = self._reader.state(item.record)
                read = functools.partial(self._reader.read, item.record, item.slot)
                self._started[item.record] = self._copier.start(item.slot, read)
            except Exception as error:
                self._started[item.record] = Postponed(error)


# ---- to a device ----


class Accelerator:
    """A device that batches are copied to while it computes; here one whose copies have ended when they return."""

    pins_memory = False  # whether the device reads pinned host memory by itself

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """Pin pages; raises OSError if the system refuses."""

    def unlock(self, address: int) -> None:
        """Unpin the pages that were pinned at this address."""

    def copying(self) -> AbstractContextManager[None]:
        """Return a context in which copies go to a stream of their own."""
        return nullcontext()

    def copy(self, value: Any) -> Any:
        """Queue the copy of a tensor, or of an object with torch's ``to``; returns it on the device."""
        return value.to(self._device)

    def record_event(self) -> DeviceEvent:
        """Return an event after all work that the device has been given so far."""
        return _Events([])

    def wait_event(self, event: Any) -> None:
        """Make work that this thread queues from now on wait for an event of :meth:`record_event`."""


class Cuda(Accelerator):
    """A CUDA or ROCm device: copies go to a copy stream.

    torch's allocator reuses the device memory of a dropped batch for a later one. So before a copy starts, the copy
    stream waits for the work that is queued on the streams of the training by then. Memory is allocated before that:
    another thread may queue a step on a batch and drop it at any moment, and this copy may get its memory.

    Subclasses of tensors, and objects with a ``to``, allocate by themselves, after the wait. So only one thread may
    train on batches with such parts on one device.

    ``device`` without an index is torch's current one when the first batch is copied. None: the program itself copies
    to its devices, and only pins and events are needed.
    """

    pins_memory = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self._copies: _CopyStream | None = None

    def lock(self, address: int, nbytes: int) -> None:
        with self._current():
            status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            if status:
                # CUDA keeps the error, and the next kernel of the program would raise it.
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda")
        if status:
            raise OSError(f"cudaHostRegister of {nbytes} bytes failed with CUDA error {status}")

    def unlock(self, address: int) -> None:
        with self._current():
            torch.cuda.cudart().cudaHostUnregister(address)

    def _current(self) -> AbstractContextManager[Any]:
        # Without it CUDA makes a context on the first device, which another rank uses, and takes memory there.
        if self._device is None or self._device.index is None:
            return nullcontext()
        return torch.cuda.device(self._device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        if self._copies is None:
            index = None if self._device is None else self._device.index
            self._copies = _copy_stream(torch.cuda.current_device() if index is None else index)
        with torch.cuda.stream(self._copies.stream):
            yield

    def _wait_for_readers(self) -> None:
        # For the work that the training has queued so far.
        assert self._copies is not None
        for reader in tuple(self._copies.readers):
            self._copies.stream.wait_stream(reader)

    def copy(self, value: Any) -> Any:
        # From pinned memory: what is not pinned yet is pinned first.
        assert self._copies is not None
        device = self._copies.stream.device
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout == torch.strided:
                value = value.pin_memory()  # returns itself if it is pinned
                if type(value) is torch.Tensor and not (value.is_quantized or value.is_nested):
                    if torch.are_deterministic_algorithms_enabled():
                        self._wait_for_readers()  # as torch then fills what it allocates
                    target = torch.empty_like(value, device=device)
                    self._wait_for_readers()
                    return target.copy_(value, non_blocking=True)
        elif callable(attribute(value, "pin_memory")):
            value = value.pin_memory()
        self._wait_for_readers()
        try:
            return value.to(device, non_blocking=True)
        except TypeError:
            if isinstance(value, torch.Tensor):
                raise
            return value.to(device)  # its ``to`` takes the device only

    def record_event(self) -> DeviceEvent:
        # On the current stream of each device in use; inside ``copying``, on the copy stream.
        side = None if self._copies is None else self._copies.stream
        if side is not None and torch.cuda.current_stream(side.device) == side:
            return _Events([side.record_event()])
        if torch.cuda.is_current_stream_capturing():
            return _AfterCapture(self.record_event)  # an event now would become a node of the graph
        # Work can be queued only on devices that this process uses.
        in_use = filter(has_cuda_context, range(torch.cuda.device_count()))
        return _Events([torch.cuda.current_stream(index).record_event() for index in in_use])

    def wait_event(self, event: _Events) -> None:
        assert self._copies is not None
        reader = torch.cuda.current_stream(self._copies.stream.device)
        for each in event.events:
            reader.wait_event(each)
        self._copies.readers.add(reader)


class _CopyStream(NamedTuple):
    """The stream that copies to a device, and the streams that use the copied batches."""

    stream: torch.cuda.Stream
    readers: set[torch.cuda.Stream]


@functools.cache
def _copy_stream(index: int) -> _CopyStream:
    """One for all loaders of the process: torch has a pool of 32 streams, which it returns in rotation."""
    return _CopyStream(torch.cuda.Stream(index), set())


class _Events:
    """Several CUDA events as one."""

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self.events = events

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class _AfterCapture:
    """An event that is recorded at the first query after the capture of a CUDA graph."""

    def __init__(self, record: Callable[[], DeviceEvent]) -> None:
        self._record = record
        self._event: DeviceEvent | None = None

    def query(self) -> bool:
        if self._event is None and not torch.cuda.is_current_stream_capturing():
            self._event = self._record()
        return self._event is not None and self._event.query()

    def synchronize(self) -> None:
        (self._event or self._record()).synchronize()


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the accelerator for batches on this device."""
    return Cuda(device) if device.type == "cuda" else Accelerator(device)


def memory_pinner() -> MemoryPinner | None:
    """Return what pins slots for programs that copy by themselves; None without CUDA."""
    return Cuda() if torch.cuda.is_available() else None


class _Copy(NamedTuple):
    """A batch whose copies have run after ``event``; ``host``, the batch in the arena, keeps the slot leased."""

    batch: Any
    host: Any
    event: DeviceEvent


class DeviceCopier(Copier):
    """Copies batches to a device, those of any size while it computes.

    ``keep`` is called for each batch with its slot, the batch in host memory, and the event until which the device may
    read it; None: nothing depends on it. ``times`` counts the time to queue copies; the ``tracer`` records it, and the
    time until they have run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        keep: Callable[[Slot, object, DeviceEvent], object] | None = None,
        *,
        times: DeviceTimes | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._accelerator = accelerator
        self._keep = keep
        self._times = times or DeviceTimes()
        self._tracer = tracer
        self._traced: deque[tuple[int, DeviceEvent]] = deque()  # copies that may still run

    def start(self, slot: Slot, read: Callable[[], object]) -> _Copy:
        start_ns = self._tracer.now()
        try:
            host = read()
            keep = None if self._keep is None else functools.partial(self._keep, slot)
            began_ns = now_ns()
            batch, event = copy_batch(self._accelerator, lambda: host, keep)
            self._times.queueing_ns += now_ns() - began_ns
        finally:
            self._tracer.slice("send to device", start_ns)
        if self._tracer.enabled:
            self._traced.append((start_ns, event))
            self._trace_copies()
        return _Copy(batch, host, event)

    def finish(self, started: _Copy) -> Any:
        # Work that the program queues from now on waits for the copies.
        self._accelerator.wait_event(started.event)
        self._trace_copies()
        return started.batch

    def _trace_copies(self) -> None:
        """Record the copies that have ended. Called for each batch: their recorded end is late by one batch at most."""
        while self._traced and self._traced[0][1].query():
            start_ns, _ = self._traced.popleft()
            self._tracer.span("copy to device", start_ns, self._tracer.now())


def device_copier(
    device: torch.device, arena: Arena, *, tracer: Tracer = NULL_TRACER
) -> DeviceCopier:
    """Return a copier to a device, and pin the arena's slots if the device copies faster from pinned memory."""
    accelerator = accelerator_of(device)
    if accelerator.pins_memory:
        arena.pin_slots(accelerator)
    slots = arena.pinned_slots
    keep = None if slots is None else lambda slot, _, end: slots.in_use_until(slot, end)
    return DeviceCopier(accelerator, keep, times=arena.device_times, tracer=tracer)


def copy_batch(
    accelerator: Accelerator,
    take: Callable[[], object],
    keep: Callable[[object, DeviceEvent], object] | None = None,
) -> tuple[Any, DeviceEvent]:
    """Queue the copies of a batch; returns the batch on the device, and the event after its copies.

    ``take`` returns the batch in host memory. If nobody else refers to it, it is dropped while copies are queued: a
    pinned slot then waits for the copies alone, and not for the training. ``keep`` is called with it and the event
    until which the device may read it, also when a copy raises, as copies queued before still run.
    """
    with accelerator.copying():
        host = take()
        try:
            batch = move_leaves(host, accelerator.copy)
        finally:
            event = accelerator.record_event()
            if keep is not None:
                keep(host, event)
            del host
    return batch, event


def move_leaves(data: object, move: Callable[[Any], object]) -> Any:
    """Return a batch with ``move`` applied to each tensor and each object that has a method ``to``, as torch's have.

    Containers are rebuilt by the rules of ``torch.utils.data._utils.pin_memory``.
    """
    if isinstance(data, torch.Tensor) or callable(attribute(data, "to")):
        return move(data)
    if isinstance(data, (str, bytes)):
        return data
    make: Any = type(data)  # raises TypeError if its constructor takes other arguments
    if isinstance(data, collections.abc.Mapping):
        return like(data, {key: move_leaves(value, move) for key, value in data.items()})
    if isinstance(data, tuple):
        items = [move_leaves(value, move) for value in data]
        return make(*items) if hasattr(data, "_fields") else make(items)
    if isinstance(data, collections.abc.Sequence):
        items = [move_leaves(value, move) for value in data]
        try:
            if isinstance(data, collections.abc.MutableSequence):
                changed = copy.copy(data)
                for number, item in enumerate(items):
                    changed[number] = item
                return changed
            return make(items)
        except TypeError:
            return items
    return data


# ---- to pinned memory ----


class Unpinned(NamedTuple):
    """A batch that ``result`` pins."""

    pin: Pin
    batch: Any

    def result(self) -> Any:
        """The batch in pinned memory."""
        return self.pin(self.batch)


Pinned = Future[Any] | Unpinned
"""A batch that is or will be pinned: ``result`` returns it, or raises the exception of its pinning."""


class PinCopier(Copier):
    """Pins large batches early, in one thread; gives all as :class:`Pinned` batches.

    The thread uses the device that is current when the copier is made. It ends with the copier.
    """

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self.least_nbytes = _WORTH_A_THREAD_BYTES
        thread = ThreadPoolExecutor(1, "minato-pin", _enter_thread, (_current_device(),))
        self._submit = thread.submit
        # Without waiting: the thread itself may drop the last reference.
        weakref.finalize(self, thread.shutdown, wait=False, cancel_futures=True)

    def start(self, slot: Slot, read: Callable[[], object]) -> Pinned:
        batch = read()
        try:
            return self._submit(self._pin, batch)
        except RuntimeError:  # the main thread has ended: Python starts no more threads
            return Unpinned(self._pin, batch)

    def finish(self, started: Pinned) -> Pinned:
        return started

    def copy(self, slot: Slot, read: Callable[[], object]) -> Pinned:
        return Unpinned(self._pin, read())


def _current_device() -> int:
    accelerator: Any = torch.accelerator
    # The names of torch 2.6.
    current = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    return int(current())


def _enter_thread(device: int) -> None:
    accelerator: Any = torch.accelerator
    choose = getattr(accelerator, "set_device_index", None) or accelerator.set_device_idx
    choose(device)
    # For this thread alone, as torch does: copies must not use the cores of the training.
    torch.set_num_threads(1)
