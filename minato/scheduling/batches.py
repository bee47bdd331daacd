"""Batches from their opening until their records are free again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minato._core import ConsumerLedger
from minato.batching.arena import Arena, Slot
from minato.batching.serialization import Store
from minato.sampling.progress import Progress
from minato.sampling.samplers import Drawn


class BatchStorage(NamedTuple):
    """The memory of open batches: indices that are no integers; ``discard(record, slot)`` of one not read."""

    slots: Arena
    indices: Store
    discard: Callable[[int, Slot], None]


@dataclass(eq=False)
class OpenEpoch:
    """An epoch some of whose batches are open, with its slot in the ledger and the seed of its samples.

    ``start`` is the position of the first; None until its batch is open. ``progress`` is None while it is prefetched.
    """

    number: int
    seed: int
    slot: int
    start: int | None = None
    progress: Progress | None = None


@dataclass(eq=False, slots=True)
class OpenBatch:
    """A batch from its opening until its record is free."""

    record: int  # index of its record in the ledger
    indices: list[Any]
    slot: Slot
    # The slot that holds its indices if they are no integers, at ``indices_offset``.
    indices_slot: Slot | None
    indices_offset: int
    epoch: OpenEpoch
    owner: int  # number of its worker + 1; 0 for any
    bound: bool = True  # whether its samples keep their places
    # When it was opened, and ``next()`` chose it; 0 if no trace is recorded.
    opened_ns: int = 0
    found_ns: int = 0
    retired: bool = False  # whether its record is free
    drawn: Drawn = field(default_factory=Drawn)
    first: int = -1  # position of its first sample
    # Functions that record it when the training loop has it; None before ``next()`` has prepared that.
    records: list[Callable[[], object]] | None = None
    # Whether it is complete without samples to return; None: not known yet.
    is_empty: bool | None = None
    is_plain: bool = False  # whether it is complete and consists of its fields alone
    nbytes: int = 0  # bytes that it takes, once it is complete
    num_samples: int = 0  # number of samples that are returned, once the records are made
    is_prepared: bool = False  # whether it was read, and its memory dropped
    # Whether its memory was freed, or belongs to the tensors of the training loop.
    is_discarded: bool = False


@dataclass(eq=False)
class RetiringBatches:
    """Batches that were returned or cancelled, while some of their samples still run; each may keep its own place."""

    ledger: ConsumerLedger
    storage: BatchStorage
    keeps_places: bool
    skips: bool
    returned: list[OpenBatch] = field(default_factory=list)
    cancelled: list[OpenBatch] = field(default_factory=list)

    def records(self, item: OpenBatch, ahead: int) -> list[Callable[[], object]]:
        """Return the functions that record the samples of a batch as delivered or skipped, ``ahead`` batches later."""
        ledger, (progress, start) = self.ledger, _epoch_of(item)
        records: list[Callable[[], object]] = []
        occupants, num_slow = ledger.occupants(item.record), ledger.num_slow(item.record)
        item.num_samples = len(item.indices)
        if item.bound and (missing := progress.missing(item.indices)):
            first = len(occupants) - missing
            positions = range(item.first + first, item.first + len(occupants))
            occupants = occupants[:first]
            records.append(functools.partial(progress.drop, positions, start))
            item.num_samples -= missing
        if self.skips:
            if self.keeps_places:
                skipped = ledger.skipped(item.record)
                records.append(functools.partial(progress.skipped, skipped, start))
            placed = sum(position >= 0 for position in occupants)
            item.num_samples = min(item.num_samples, placed)
        records.append(progress.returns(occupants, start, num_slow, ahead))
        return records

    def add_returned(self, item: OpenBatch) -> None:
        """Add a batch that was read; it ends at once where each sample keeps its own place."""
        if self.keeps_places:
            self._retire(item)
        elif not (self.returned and self.returned[-1] is item):
            self.returned.append(item)
        if self.returned or self.cancelled:
            self.sweep()

    def note_skipped(self, item: OpenBatch) -> None:
        """Record all samples of a batch as skipped, which is dropped because of skipped samples."""
        progress, start = _epoch_of(item)
        if self.keeps_places and self.skips:
            progress.skipped(self.ledger.skipped(item.record), start)
        progress.skipped([*self.ledger.occupants(item.record)], start)

    def note_missing(self, item: OpenBatch) -> None:
        """Record that a batch has no items, because their reader has ended before."""
        progress, start = _epoch_of(item)
        progress.drop(range(item.first, item.first + len(item.indices)), start)
        progress.tell()

    def add_empty(self, item: OpenBatch) -> None:
        """Add a batch without samples, and discard its memory."""
        self.discard(item)
        self.add_returned(item)

    def add_cancelled(self, batches: Iterable[OpenBatch]) -> None:
        """Add batches that are not needed any more."""
        self.cancelled.extend(batches)
        self.sweep()

    def discard(self, item: OpenBatch) -> None:
        """Drop the memory of a batch, apart from what the training loop's tensors view, once."""
        if not item.is_discarded:
            # First: an interruption may leave a slot unused, but never frees one twice.
            item.is_discarded = True
            self.storage.discard(item.record, item.slot)

    def sweep(self) -> None:
        """Free the records of batches none of whose samples still run."""
        for item in self.returned[:]:
            if item.retired or self.ledger.settled(item.record):
                if self.skips and not item.retired and item.epoch.progress is not None:
                    progress, start = _epoch_of(item)
                    progress.skipped(self.ledger.skipped(item.record), start)
                self._retire(item)
                self.returned.remove(item)
        # A sample of a cancelled epoch may take a place in any of its batches, so these end together. They also wait
        # for the samples whose own batch was returned.
        if not self.cancelled:
            return
        ledger, running = self.ledger, {item.epoch.slot for item in self.returned}

        def has_ended(item: OpenBatch) -> bool:
            if item.retired or item.epoch.slot in running:
                return item.retired
            return ledger.settled(item.record) and ledger.close(item.record)

        if all(map(has_ended, self.cancelled)):
            for item in self.cancelled:
                self.discard(item)
                self._retire(item)
            self.cancelled.clear()

    def _retire(self, item: OpenBatch) -> None:
        if item.retired:
            return
        self.ledger.retire(item.record, item.first)
        item.retired = True
        if item.indices_slot is not None:
            slot, item.indices_slot = item.indices_slot, None
            self.storage.indices.drop(item.indices_offset)
            self.storage.slots.release(slot)


def _epoch_of(item: OpenBatch) -> tuple[Progress, int]:
    """Progress and first position of the epoch of a batch that the training loop has asked for."""
    progress, start = item.epoch.progress, item.epoch.start
    assert progress is not None
    assert start is not None
    return progress, start


def offset_in_slot(slot: Slot, nbytes: int) -> int:
    """The offset of ``nbytes`` bytes of indices in a slot; raises MemoryError if they do not fit."""
    if slot.start + nbytes > slot.end:
        raise MemoryError(f"the indices of one batch take {nbytes} bytes, more than a slot holds")
    return int(slot.start)
