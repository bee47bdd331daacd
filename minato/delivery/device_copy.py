"""What delivery needs of a device: page-locked memory, and copies that run beside the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch

from minato._compat import has_cuda_context
from minato.batching.pinned_slots import DeviceEvent, MemoryPinner

__all__ = ["Accelerator", "Cuda", "SyncDevice", "accelerator_of", "memory_pinner"]

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices of this process."""


class Accelerator(MemoryPinner, Protocol):
    """A device to which batches are copied while it works on others."""

    @property
    def pins_memory(self) -> bool:
        """Whether it copies from page-locked memory by itself."""

    def copying(self) -> AbstractContextManager[None]:
        """What is copied inside is copied beside the training."""

    def copy(self, value: Any) -> Any:
        """A tensor, or an object with torch's ``to``, on the device; the copy may still have to run."""

    def wait(self, mark: Any) -> None:
        """Have what is asked of the device from now on, by this thread, wait until it has passed the mark."""


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # a type that knows the device only
        return value.to(device)


class Cuda:
    """A CUDA or ROCm device: copies go to a stream beside the training's.

    Memory on the device that a batch leaves is taken for a later one; before that is written, the side stream waits
    for all that the streams of the training have been told until then.

    Args:
        device: The device; without an index torch's current one when the first batch is copied. None: whichever the
            program copies to by itself.
    """

    pins_memory = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._beside: _Side | None = None

    def lock(self, address: int, nbytes: int) -> None:
        """Register pages with ``cudaHostRegister``."""
        with self._current():
            status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            if status:
                # CUDA keeps the error and would let the program's next kernel raise it.
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda")
        if status:
            raise OSError(f"cudaHostRegister of {nbytes} bytes gave CUDA's error {status}")

    def unlock(self, address: int) -> None:
        """Unregister them."""
        with self._current():
            torch.cuda.cudart().cudaHostUnregister(address)

    def _current(self) -> AbstractContextManager[Any]:
        # Else CUDA would begin to use the first device, which is another rank's, and takes memory there for that.
        if self._device is None or self._device.index is None:
            return nullcontext()
        return torch.cuda.device(self._device)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Use the side stream, from where the training's streams are now."""
        if self._beside is None:
            index = None if self._device is None else self._device.index
            self._beside = _beside(torch.cuda.current_device() if index is None else index)
        for reader in tuple(self._beside.readers):
            self._beside.stream.wait_stream(reader)
        with torch.cuda.stream(self._beside.stream):
            yield

    def copy(self, value: Any) -> Any:
        """On the device, by way of page-locked memory if it does not lie there already."""
        assert self._beside is not None
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.layout == torch.strided:
                value = value.pin_memory()  # itself, if it is
        elif hasattr(value, "pin_memory"):
            value = value.pin_memory()
        return _moved(value, self._beside.stream.device)

    def mark(self) -> DeviceEvent:
        """Events on the current stream of each device in use; inside ``copying``, on the side stream."""
        side = None if self._beside is None else self._beside.stream
        if side is not None and torch.cuda.current_stream(side.device) == side:
            return _All([side.record_event()])
        if torch.cuda.is_current_stream_capturing():
            return _AfterCapture(self.mark)  # an event would become a part of the program's graph
        # Only where this process uses a device can something be under way.
        in_use = filter(has_cuda_context, range(torch.cuda.device_count()))
        return _All([torch.cuda.current_stream(index).record_event() for index in in_use])

    def wait(self, mark: _All) -> None:
        """Let the current stream wait."""
        assert self._beside is not None
        reader = torch.cuda.current_stream(self._beside.stream.device)
        for event in mark.events:
            reader.wait_event(event)
        self._beside.readers.add(reader)


class _Side(NamedTuple):
    """The stream that copies to a device, and those that were given what it copied."""

    stream: torch.cuda.Stream
    readers: set[torch.cuda.Stream]


@functools.cache
def _beside(index: int) -> _Side:
    """One for all loaders of the process: torch has 32 streams, and gives them out again and again."""
    return _Side(torch.cuda.Stream(index), set())


class _All:
    """Several events as one mark."""

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self.events = events

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class _AfterCapture:
    """A mark that is set when it is first asked for after a CUDA graph has been captured.

    Args:
        mark: Sets it.
    """

    def __init__(self, mark: Callable[[], DeviceEvent]) -> None:
        self._make = mark
        self._mark: DeviceEvent | None = None

    def query(self) -> bool:
        if self._mark is None and not torch.cuda.is_current_stream_capturing():
            self._mark = self._make()
        return self._mark is not None and self._mark.query()

    def synchronize(self) -> None:
        (self._mark or self._make()).synchronize()


class SyncDevice:
    """Any other device of torch's, to which each copy is over when it returns."""

    pins_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """Nothing is gained by it."""

    def unlock(self, address: int) -> None:
        """Nothing was locked."""

    def copying(self) -> AbstractContextManager[None]:
        """No other than the training's."""
        return nullcontext()

    def copy(self, value: Any) -> Any:
        """On the device when it returns."""
        return value.to(self._device)

    def mark(self) -> DeviceEvent:
        """Passed."""
        return _All([])

    def wait(self, mark: DeviceEvent) -> None:
        """It is."""


def accelerator_of(device: torch.device) -> Accelerator:
    """What there is for batches that go to this device."""
    return Cuda(device) if device.type == "cuda" else SyncDevice(device)


def memory_pinner() -> MemoryPinner | None:
    """What locks pages for programs that copy by themselves; None where torch has to do it its own way."""
    return Cuda() if torch.cuda.is_available() else None
