"""Reads batches before the training loop asks for them, and starts their copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from minato._core import Ledger
from minato._core.codes import ENDED, ERROR_BLOB, FAILED, KIND_MASK, SKIPPED, STATES
from minato.batching.arena import Slot
from minato.batching.reader import BatchReader
from minato.errors import Postponed

__all__ = ["Copier", "PrefetchReader", "Upcoming"]


class Upcoming(Protocol):
    """A complete batch that ``next()`` has not returned yet."""

    record: int
    slot: Slot


class Copier(Protocol):
    """Copies batches to a device or to pinned memory.

    ``read`` makes the batch: tensors that view its slot. A slot is free when its last view is gone, so a copier holds
    the batch until nothing reads the slot by CPU. For reads by a device, which no reference shows, it records an event
    with :meth:`PinnedSlots.in_use_until`.
    """

    def wants(self, nbytes: int) -> bool:
        """Whether to start the copy of a batch of this size before ``next()`` asks for it."""

    def start(self, slot: Slot, read: Callable[[], object]) -> Any:
        """Start to copy a batch; returns the argument of ``finish``."""

    def finish(self, started: Any) -> Any:
        """Return the batch, whose copy was started earlier."""

    def copy(self, slot: Slot, read: Callable[[], object]) -> Any:
        """Return a batch whose copy was not started earlier."""


class PrefetchReader:
    """Reads batches like :class:`BatchReader`, and has the next ones copied early.

    A batch that was read early counts as open until ``next()`` returns it: neither the loader's state nor the memory
    budget takes it for delivered.

    Args:
        reader: Reads a batch from its slot.
        ledger: Holds the records of batches.
        copier: Copies what was read.
    """

    def __init__(self, reader: BatchReader, ledger: Ledger, copier: Copier) -> None:
        self._reader = reader
        self._ledger = ledger
        self._copier = copier
        # By record: the started copy, or the exception that starting it raised.
        self._started: dict[int, Any] = {}
        # Read with the batch: the slot that holds the state may be in use again before ``next()`` asks for it.
        self._states: dict[int, tuple[int, Any] | None] = {}

    def failure(self, record: int, slot: Slot) -> BaseException | None:
        """Return what a sample of the batch, or its collation, has raised (see :meth:`BatchReader.failure`)."""
        return self._reader.failure(record, slot)

    def read(self, record: int, slot: Slot) -> Any:
        """Return a batch.

        Raises:
            Exception: Its copy raised it.
        """
        if isinstance(self._started.get(record), Postponed):
            self._started[record].reraise()
        started = self._started.get(record)
        if started is None:
            return self._copier.copy(slot, functools.partial(self._reader.read, record, slot))
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
            lacks_data = record.flags & (FAILED | ENDED | SKIPPED)
            if lacks_data or record.result & KIND_MASK == ERROR_BLOB:
                continue
            if item.record in self._started or not self._copier.wants(record.used_nbytes):
                continue
            try:
                if record.flags & STATES:
                    self._states[item.record] = self._reader.state(item.record)
                read = functools.partial(self._reader.read, item.record, item.slot)
                self._started[item.record] = self._copier.start(item.slot, read)
            except Exception as error:
                self._started[item.record] = Postponed(error)
