"""Batches between their opening and their end, and what is left of them when they are out of the schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minato._core.ledger import Ledger
from minato.scheduling.protocols import IndexStore, Progress, Slots

__all__ = ["BatchStorage", "OpenBatch", "RetiringBatches", "fitting"]


@dataclass(frozen=True)
class BatchStorage:
    """Where batches lie while they are open.

    Attributes:
        slots: Yields slots of the arena.
        keys: Stores indices that are no integers.
        discard: Called with ``(record, slot)`` of a batch that is not read.
    """

    slots: Slots
    keys: IndexStore
    discard: Callable[[int, Any], None]


@dataclass(eq=False)
class OpenBatch:
    """A batch between its opening and its end.

    Attributes:
        opened_ns, found_ns: When it was opened, and when its turn came; 0 if no trace is recorded.
    """

    record: int
    keys: list[Any]
    slot: Any
    keys_slot: Any
    keys_offset: int
    epoch_slot: int
    epoch: int
    seed: int
    owner: int
    pass_start: int
    progress: Progress | None
    opened_ns: int = 0
    found_ns: int = 0
    retired: bool = False


class RetiringBatches:
    """Batches that were delivered or abandoned, and whose samples may still be running.

    Args:
        storage: Where slots and indices lie.
        bound: Whether each sample keeps its own place.
        skips: Whether samples may be left out.
    """

    def __init__(
        self,
        ledger: Ledger,
        storage: BatchStorage,
        bound: bool,
        skips: bool,
    ) -> None:
        self._ledger = ledger
        self._slots = storage.slots
        self._keys = storage.keys
        self._discard = storage.discard
        self._bound = bound
        self._skips = skips
        self.delivered: list[OpenBatch] = []
        """Some of their samples are still running."""
        self.cancelled: list[OpenBatch] = []
        """Nobody wants them."""

    def deliver(self, item: OpenBatch) -> None:
        """Take a batch that was read."""
        occupants, num_slow = (
            self._ledger.occupants(item.record),
            self._ledger.num_slow(item.record),
        )
        samples = None if self._bound else functools.partial(self._ledger.samples, item.record)
        self._progress_of(item).delivered(occupants, item.pass_start, num_slow, samples)
        self._take(item)

    def drop(self, item: OpenBatch) -> None:
        """Take a batch too many of whose samples were skipped."""
        self._progress_of(item).skipped(self._ledger.occupants(item.record), item.pass_start)
        self.drop_empty(item)

    def drop_empty(self, item: OpenBatch) -> None:
        """Take a batch that never had a sample."""
        self._discard(item.record, item.slot)
        self._take(item)

    def _progress_of(self, item: OpenBatch) -> Progress:
        """Who is told of a batch; and of its own samples that were skipped, now that this is known."""
        assert item.progress is not None
        if self._bound and self._skips:
            item.progress.skipped(self._ledger.skipped(item.record), item.pass_start)
        return item.progress

    def _take(self, item: OpenBatch) -> None:
        self.delivered.append(item)
        self.sweep()

    def cancel(self, batches: Iterable[OpenBatch]) -> None:
        """Take batches that nobody wants."""
        self.cancelled.extend(batches)
        self.sweep()

    def sweep(self) -> None:
        """Free the records of those that nobody works on any more."""
        for item in self.delivered[:]:
            if self._bound or self._ledger.settled(item.record):
                self.delivered.remove(item)
                if self._skips and not self._bound and item.progress is not None:
                    item.progress.skipped(self._ledger.skipped(item.record), item.pass_start)
                self._retire(item)
        # Samples of a cancelled pass may take places in any of its batches, so it ends as a whole; and not before those
        # samples have run whose own batch is delivered.
        if not self.cancelled:
            return
        running = {item.epoch_slot for item in self.delivered}
        if all(
            item.epoch_slot not in running
            and self._ledger.settled(item.record)
            and self._ledger.close(item.record)
            for item in self.cancelled
        ):
            for item in self.cancelled:
                self._discard(item.record, item.slot)
                self._retire(item)
            self.cancelled.clear()

    def _retire(self, item: OpenBatch) -> None:
        item.retired = True
        self._ledger.retire(item.record)
        if item.keys_slot is not None:
            self._keys.drop(item.keys_offset)
            self._slots.release(item.keys_slot)


def fitting(slot: Any, nbytes: int) -> int:
    """Where so many bytes of keys lie in a slot; raises MemoryError if they do not fit."""
    if slot.start + nbytes > slot.end:
        raise MemoryError(f"the keys of one batch take {nbytes} bytes, more than a slot holds")
    return int(slot.start)
