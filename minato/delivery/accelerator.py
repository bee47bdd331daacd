"""Devices that batches are copied to: pinned memory, streams and events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch

from minato._compat import has_cuda_context
from minato._support.objects import attribute
from minato.batching.pinned_slots import DeviceEvent, MemoryPinner

__all__ = ["Accelerator", "Cuda", "SyncDevice", "accelerator_of", "memory_pinner"]

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of this process."""


class Accelerator(MemoryPinner, Protocol):
    """A device that batches are copied to while it computes."""

    @property
    def pins_memory(self) -> bool:
        """Whether the device reads pinned host memory by itself."""

    def copying(self) -> AbstractContextManager[None]:
        """Return a context in which copies go to a stream of their own."""

    def copy(self, value: Any) -> Any:
        """Queue the copy of a tensor, or of an object with torch's ``to``; returns it on the device."""

    def wait_event(self, event: Any) -> None:
        """Make work that this thread queues from now on wait for an event of :meth:`record_event`."""


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # its ``to`` takes the device only
        return value.to(device)


class Cuda:
    """A CUDA or ROCm device: copies go to a copy stream.

    torch's allocator reuses the device memory of a dropped batch for a later one. So before copies start, the copy
    stream waits for the work that is queued on the streams of the training by then.

    Args:
        device: The device; without an index, torch's current one when the first batch is copied. None: the program
            itself copies to its devices, and only pins and events are needed.
    """

    pins_memory = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._copies: _CopyStream | None = None

    def lock(self, address: int, nbytes: int) -> None:
        """Register pages with ``cudaHostRegister``."""
        with self._current():
            status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            if status:
                # CUDA keeps the error, and the next kernel of the program would raise it.
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda")
        if status:
            raise OSError(f"cudaHostRegister of {nbytes} bytes failed with CUDA error {status}")

    def unlock(self, address: int) -> None:
        """Unregister pages with ``cudaHostUnregister``."""
        with self._current():
            torch.cuda.cudart().cudaHostUnregister(address)

    def _current(self) -> AbstractContextManager[Any]:
        # Without it CUDA makes a context on the first device, which another rank uses, and takes memory there.
        if self._device is None or self._device.index is None:
            return nullcontext()
        return torch.cuda.device(self._device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Use the copy stream, after the work that the training has queued so far."""
        if self._copies is None:
            index = None if self._device is None else self._device.index
            self._copies = _copy_stream(torch.cuda.current_device() if index is None else index)
        for reader in tuple(self._copies.readers):
            self._copies.stream.wait_stream(reader)
        with torch.cuda.stream(self._copies.stream):
            yield

    def copy(self, value: Any) -> Any:
        """Queue a copy, from pinned memory: what is not pinned yet is pinned first."""
        assert self._copies is not None
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout == torch.strided:
                value = value.pin_memory()  # returns itself if it is pinned
        elif attribute(value, "pin_memory") is not None:
            value = value.pin_memory()
        return _moved(value, self._copies.stream.device)

    def record_event(self) -> DeviceEvent:
        """Record events on the current stream of each device in use; inside ``copying``, on the copy stream."""
        side = None if self._copies is None else self._copies.stream
        if side is not None and torch.cuda.current_stream(side.device) == side:
            return _Events([side.record_event()])
        if torch.cuda.is_current_stream_capturing():
            return _AfterCapture(self.record_event)  # an event now would become a node of the graph
        # Work can be queued only on devices that this process uses.
        in_use = filter(has_cuda_context, range(torch.cuda.device_count()))
        return _Events([torch.cuda.current_stream(index).record_event() for index in in_use])

    def wait_event(self, event: _Events) -> None:
        """Make the current stream wait."""
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
    """An event that is recorded at the first query after the capture of a CUDA graph.

    Args:
        record: Records it.
    """

    def __init__(self, record: Callable[[], DeviceEvent]) -> None:
        self._record = record
        self._event: DeviceEvent | None = None

    def query(self) -> bool:
        if self._event is None and not torch.cuda.is_current_stream_capturing():
            self._event = self._record()
        return self._event is not None and self._event.query()

    def synchronize(self) -> None:
        (self._event or self._record()).synchronize()


class SyncDevice:
    """Any other device of torch: a copy has ended when it returns."""

    pins_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """Do nothing: this device does not read host memory by itself."""

    def unlock(self, address: int) -> None:
        """Do nothing: nothing was pinned."""

    def copying(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def copy(self, value: Any) -> Any:
        """Copy a value to the device."""
        return value.to(self._device)

    def record_event(self) -> DeviceEvent:
        """Return an event that has passed."""
        return _Events([])

    def wait_event(self, event: DeviceEvent) -> None:
        """Do nothing: every copy has ended."""


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the accelerator for batches on this device."""
    return Cuda(device) if device.type == "cuda" else SyncDevice(device)


def memory_pinner() -> MemoryPinner | None:
    """Return what pins slots for programs that copy by themselves; None without CUDA."""
    return Cuda() if torch.cuda.is_available() else None
