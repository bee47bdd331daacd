"""Batches on their way to a device."""

from __future__ import annotations

import collections.abc
import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minato._core.ledger import Ledger
from minato.batching.arena import Arena, Slot
from minato.batching.pinned_slots import DeviceEvent
from minato.batching.reader import BatchReader
from minato.delivery.device_copy import Accelerator, accelerator_of
from minato.delivery.prefetch import PrefetchReader
from minato.observe.trace.tracer import NULL_TRACER, Tracer

__all__ = ["Staged", "StagedReader", "move_leaves", "onto_device"]


class Staged(NamedTuple):
    """A batch whose copy to the device is under way.

    Attributes:
        batch: On the device.
        host: In the arena, whose slot must stay: it also holds what comes with the batch.
        mark: Behind its copy.
    """

    batch: Any
    host: Any
    mark: DeviceEvent


class StagedReader(PrefetchReader):
    """Reads batches onto a device, to which those whose turn comes next are sent beforehand.

    Args:
        reader: Reads them from their slots.
        arena: Where these are.
        accelerator: The device.
        tracer: Records the copies, and the time that asking for them takes.
    """

    def __init__(
        self,
        reader: BatchReader,
        ledger: Ledger,
        arena: Arena,
        accelerator: Accelerator,
        *,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        super().__init__(reader, ledger)
        self._locks = arena.locks
        self._accelerator = accelerator
        self._tracer = tracer
        self._copies: deque[tuple[int, DeviceEvent]] = deque()  # under way, if a trace is recorded

    def _begin(self, record: int, slot: Slot) -> Staged:
        begun_ns = self._tracer.now()
        try:
            host = self._reader.read(record, slot)
            with self._accelerator.copying():
                try:
                    batch = move_leaves(host, self._accelerator.copy)
                finally:
                    mark = self._accelerator.mark()
                    if self._locks is not None:
                        self._locks.in_use_until(slot, mark)
        finally:
            self._tracer.slice("send to device", begun_ns)
        if self._tracer.enabled:
            self._copies.append((begun_ns, mark))
            self._record_copies()
        return Staged(batch, host, mark)

    def _finish(self, begun: Staged) -> Any:
        """The batch on the device; what the program asks of that from now on waits for the copy."""
        self._accelerator.wait(begun.mark)
        self._record_copies()
        return begun.batch

    def _record_copies(self) -> None:
        """Record the copies that have ended; asked at every batch, this is late by a batch at most."""
        while self._copies and self._copies[0][1].query():
            begun_ns, _ = self._copies.popleft()
            self._tracer.span("copy to device", begun_ns, self._tracer.now())


def onto_device(
    device: torch.device | None,
    reader: BatchReader,
    ledger: Ledger,
    arena: Arena,
    *,
    tracer: Tracer = NULL_TRACER,
) -> StagedReader | None:
    """What reads batches onto a device, from page-locked slots if the device can make use of that.

    Args:
        device: None: they stay in main memory, and so there is no such reader.
        tracer: Records what it does.
    """
    if device is None:
        return None
    accelerator = accelerator_of(device)
    if accelerator.pins_memory:
        arena.pin_slots(accelerator)
    return StagedReader(reader, ledger, arena, accelerator, tracer=tracer)


def move_leaves(data: Any, move: Callable[[Any], Any]) -> Any:
    """A batch with all tensors, and all objects that have torch's ``to``, moved, as torch's pinning goes through it.

    Source: ``torch.utils.data._utils.pin_memory``.
    """
    if isinstance(data, torch.Tensor) or hasattr(data, "to"):
        return move(data)
    if isinstance(data, (str, bytes)):
        return data
    make: Any = type(data)  # which may take something else, and raises TypeError then
    if isinstance(data, collections.abc.Mapping):
        moved = {key: move_leaves(value, move) for key, value in data.items()}
        try:
            if isinstance(data, collections.abc.MutableMapping):
                clone = copy.copy(data)  # of a type that may have more to it than its items
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
