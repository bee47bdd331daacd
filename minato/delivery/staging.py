"""Batches on their way to a device."""

from __future__ import annotations

import collections.abc
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minato._core.codes import ENDED, ERROR_BLOB, FAILED, KIND_MASK, SKIPPED
from minato._core.ledger import Ledger
from minato.assembler.arena import Arena, Slot
from minato.assembler.page_locks import Mark
from minato.assembler.reader import BatchReader
from minato.delivery.accelerator import Accelerator, accelerator_of

__all__ = ["StagedReader", "Upcoming", "leaves_moved", "onto_device"]


class Upcoming(Protocol):
    """A complete batch whose turn comes."""

    record: int
    slot: Slot


@dataclass
class _Staged:
    """A batch whose copy to the device is under way.

    Attributes:
        batch: On the device.
        host: In the arena, whose slot must stay: it also holds what comes with the batch.
        mark: Behind its copy.
        error: What came of the attempt instead.
    """

    batch: Any = None
    host: Any = None
    mark: Mark | None = None
    error: Exception | None = None


class StagedReader:
    """Reads batches as a :class:`BatchReader`, onto a device.

    Those whose turn comes next are sent beforehand. They count as open all the while, so that neither the loader's
    state nor the memory budget takes them for delivered.

    Args:
        reader: Reads them from their slots.
        arena: Where these are.
        accelerator: The device.
    """

    def __init__(
        self, reader: BatchReader, ledger: Ledger, arena: Arena, accelerator: Accelerator
    ) -> None:
        self._reader = reader
        self._ledger = ledger
        self._locks = arena.locks
        self._accelerator = accelerator
        self._staged: dict[int, _Staged] = {}  # by the ledger's record

    def read(self, record: int, slot: Slot) -> Any:
        """The batch on the device; what the program asks of that from now on waits for the copy.

        Raises:
            Exception: What a sample of the batch, its collation, or its copying raised.
        """
        staged = self._staged.pop(record, None) or self._send(record, slot)
        if staged.error is not None:
            raise staged.error
        assert staged.mark is not None
        self._accelerator.wait(staged.mark)
        return staged.batch

    def state(self, record: int) -> tuple[int, Any, Any, bool] | None:
        """As :meth:`BatchReader.state`."""
        return self._reader.state(record)

    def discard(self, record: int, slot: Slot) -> None:
        """Drop a batch that nobody wants any more."""
        if self._staged.pop(record, None) is None:
            self._reader.discard(record, slot)

    def stage(self, upcoming: Iterable[Upcoming]) -> None:
        """Send batches whose turn comes next; what goes wrong is raised when it has come."""
        for item in upcoming:
            flags, _, result, *_ = self._ledger.contents(item.record)
            plain = not flags & (FAILED | ENDED | SKIPPED) and result & KIND_MASK != ERROR_BLOB
            if plain and item.record not in self._staged:
                try:
                    staged = self._send(item.record, item.slot)
                except Exception as error:
                    staged = _Staged(error=error)
                self._staged[item.record] = staged

    def _send(self, record: int, slot: Slot) -> _Staged:
        host = self._reader.read(record, slot)
        with self._accelerator.copying():
            try:
                batch = leaves_moved(host, self._accelerator.copy)
            finally:
                mark = self._accelerator.mark()
                if self._locks is not None:
                    self._locks.read_until(slot, mark)
        return _Staged(batch, host, mark)


def onto_device(
    device: torch.device | None,
    reader: BatchReader,
    ledger: Ledger,
    arena: Arena,
    make: Callable[..., StagedReader] = StagedReader,
) -> StagedReader | None:
    """What reads batches onto a device, from page-locked slots if the device can make use of that.

    Args:
        device: None: they stay in main memory, and so there is no such reader.
        make: Makes it.
    """
    if device is None:
        return None
    accelerator = accelerator_of(device)
    if accelerator.locks_pages:
        arena.lock_pages(accelerator)
    return make(reader, ledger, arena, accelerator)


def leaves_moved(data: Any, move: Callable[[Any], Any]) -> Any:
    """A batch with all tensors, and all objects that have torch's ``to``, moved, as torch's pinning goes through it.

    Source: ``torch.utils.data._utils.pin_memory``.
    """
    if isinstance(data, torch.Tensor) or hasattr(data, "to"):
        return move(data)
    if isinstance(data, (str, bytes)):
        return data
    make: Any = type(data)  # which may take something else, and raises TypeError then
    if isinstance(data, collections.abc.Mapping):
        moved = {key: leaves_moved(value, move) for key, value in data.items()}
        try:
            if isinstance(data, collections.abc.MutableMapping):
                clone = copy.copy(data)  # of a type that may have more to it than its items
                clone.update(moved)
                return clone
            return make(moved)
        except TypeError:
            return moved
    if isinstance(data, tuple):
        items = [leaves_moved(value, move) for value in data]
        return make(*items) if hasattr(data, "_fields") else make(items)
    if isinstance(data, collections.abc.Sequence):
        items = [leaves_moved(value, move) for value in data]
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
