"""Copies batches to a device while it computes."""

from __future__ import annotations

import collections.abc
import copy
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minato._support.objects import attribute
from minato.batching.arena import Arena, Slot
from minato.batching.pinned_slots import DeviceEvent, PinnedSlots
from minato.delivery.accelerator import Accelerator, accelerator_of
from minato.observe.trace.tracer import NULL_TRACER, Tracer

__all__ = ["DeviceCopier", "copy_batch", "device_copier", "move_leaves"]


class _Copy(NamedTuple):
    """A batch whose copies were queued.

    Attributes:
        batch: The batch on the device.
        host: The batch in the arena. A reference to it keeps the slot leased.
        event: Passes when the copies have run.
    """

    batch: Any
    host: Any
    event: DeviceEvent


class DeviceCopier:
    """Copies batches to a device (a :class:`minato.delivery.prefetch.Copier`).

    Args:
        accelerator: The device.
        keep: Called for each batch with its slot, the batch in host memory, and the event until which the device may
            read it; None: nothing depends on it.
        tracer: Records the time to queue copies, and the time until they have run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        keep: Callable[[Slot, Any, DeviceEvent], object] | None = None,
        *,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._accelerator = accelerator
        self._keep = keep
        self._tracer = tracer
        self._traced: deque[tuple[int, DeviceEvent]] = deque()  # copies that may still run

    def wants(self, nbytes: int) -> bool:
        """Return True: a device copies batches of any size while it computes."""
        return True

    def start(self, slot: Slot, read: Callable[[], Any]) -> _Copy:
        """Read a batch and queue its copies."""
        start_ns = self._tracer.now()
        try:
            host = read()
            keep = None if self._keep is None else functools.partial(self._keep, slot)
            batch, event = copy_batch(self._accelerator, lambda: host, keep)
        finally:
            self._tracer.slice("send to device", start_ns)
        if self._tracer.enabled:
            self._traced.append((start_ns, event))
            self._trace_copies()
        return _Copy(batch, host, event)

    def finish(self, started: _Copy) -> Any:
        """Return the batch; work that the program queues from now on waits for the copies."""
        self._accelerator.wait_event(started.event)
        self._trace_copies()
        return started.batch

    def copy(self, slot: Slot, read: Callable[[], Any]) -> Any:
        """Copy a batch, and return it as :meth:`finish` does."""
        return self.finish(self.start(slot, read))

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
    slots, keep = arena.pinned_slots, None
    if slots is not None:
        keep = functools.partial(_keep_slot, slots)
    return DeviceCopier(accelerator, keep, tracer=tracer)


def _keep_slot(slots: PinnedSlots, slot: Slot, host: object, event: DeviceEvent) -> None:
    slots.in_use_until(slot, event)


def copy_batch(
    accelerator: Accelerator,
    take: Callable[[], Any],
    keep: Callable[[Any, DeviceEvent], object] | None = None,
) -> tuple[Any, DeviceEvent]:
    """Queue the copies of a batch; returns the batch on the device, and the event after its copies.

    Args:
        take: Returns the batch in host memory. If nobody else refers to it, it is dropped while copies are queued: a
            pinned slot then waits for the copies alone, and not for the training.
        keep: Called with the batch and the event, which says how long the device may read the host memory. It is called
            too when a copy raises, as copies queued before still run.
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


def move_leaves(data: object, move: Callable[[Any], Any]) -> Any:
    """Return a batch with ``move`` applied to each tensor and each object that has torch's ``to``.

    Containers are rebuilt by the rules of ``torch.utils.data._utils.pin_memory``.
    """
    if isinstance(data, torch.Tensor) or attribute(data, "to") is not None:
        return move(data)
    if isinstance(data, (str, bytes)):
        return data
    make: Any = type(data)  # raises TypeError if its constructor takes other arguments
    if isinstance(data, collections.abc.Mapping):
        moved = {key: move_leaves(value, move) for key, value in data.items()}
        try:
            if isinstance(data, collections.abc.MutableMapping):
                clone = copy.copy(data)  # keeps attributes of a subclass
                clone.update(moved)
                return clone
            return make(moved)
        except TypeError:
            return moved
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
