"""Builds the batches of samples that this process has: without workers, samples need no place in shared memory."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from minato._compat import collates_texts
from minato.batching.arena import Arena, Slot
from minato.batching.collate import Collate
from minato.batching.layout import Layout, Rows

__all__ = ["BatchBuilder"]

Buffer: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_LEAST_RECYCLED_BYTES = 64 << 10
"""Smaller batches get memory of their own, which the C library hands out from warm pages."""
_MOST_KEPT_BYTES = 32 << 20
"""glibc keeps no larger block, whatever it has got back."""
_SHARED_WORK_BYTES = 2 << 20
"""From this size on, several threads copy faster than one, even if they have to wake up first: they may have made the
samples, which then lie in the caches of their cores."""


class BatchBuilder:
    """Builds batches by the rules of ``default_collate``, with one copy, or by another ``collate_fn``.

    Attributes:
        collates: Whether batches are built by calling ``collate_fn`` instead of in fields.
        draws: Whether ``collate_fn`` is the program's own, which may draw random numbers.
        nbytes: Bytes of the last batch that was built in fields; 0 for any other.
        explain: As :meth:`Collate.explain`.
    """

    def __init__(self, arena: Arena, collate: Collate) -> None:
        self.collates, self.draws, self.explain = collate.is_own, collate.draws, collate.explain
        self.nbytes = 0
        self._arena = arena
        self._collate_fn = collate
        self._largest = 0  # bytes of a batch that glibc has got back
        self._last: Layout | None = None
        self._slot: Slot | None = None
        self._last_slot: Slot | None = None

    @property
    def last_slot(self) -> Slot:
        """The slot of the arena that the last batch, or an earlier one, was built in."""
        return self._last_slot or self._next_slot()

    def _next_slot(self) -> Slot:
        if self._slot is None:
            self._slot = self._arena.acquire()
        return self._slot

    def pack(self, samples: list[object]) -> Any:
        """The batch of some samples, with one copy; None if they have no layout."""
        self.nbytes = 0
        kind, tried = type(samples[0]), self._last
        if kind is str or kind is bytes:
            return samples if collates_texts() else default_collate(samples)
        # Nearly always: the packer looks at each sample anyway.
        if tried is not None and tried.shows():
            batch = self._packed(tried, samples)
            if batch is not None:
                return batch
        else:
            tried = None
        layout = Layout.infer(samples[0], tried)
        if layout is None or layout is tried:
            return None
        self._last = layout
        return self._packed(layout, samples)

    def _packed(self, layout: Layout, samples: list[object]) -> Any:
        """The batch of samples of a layout; None if they have another one."""
        count = len(samples)
        nbytes = layout.fields_nbytes(count)
        slot = memory = None
        if nbytes >= _LEAST_RECYCLED_BYTES or self._arena.pinned_slots is not None:
            slot = self._slot_for(nbytes)
            memory = None if slot is None else self._arena.view(slot)
        batch = layout.collate(samples, _SHARED_WORK_BYTES // count, memory)
        if batch is not None:
            self.nbytes = nbytes
            if slot is not None and memory is not None:
                self._lease(slot, nbytes, memory)
        return batch

    def gather(self, rows: Rows) -> Any:
        """The batch of samples that are rows; None if they must be packed one by one, which may also be faster."""
        count = rows.size
        nbytes = sum(source.shape[1] for source in rows.sources) * count
        layout = Layout.infer(rows.first, self._last) if nbytes < _SHARED_WORK_BYTES else None
        if layout is None or not layout.packer(count).fits(rows.first):
            return None
        self._last, self.nbytes = layout, layout.fields_nbytes(count)
        slot = self._slot_for(self.nbytes)
        if slot is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").numpy()
        else:
            memory = self._arena.view(slot)
        layout.gather(memory, 0, count, 0, rows)
        if slot is not None:
            self._lease(slot, self.nbytes, memory)
        return layout.batch(memory, 0, count, ())

    def collate(self, samples: object) -> Any:
        """The batch that ``collate_fn`` makes of the samples."""
        self.nbytes = 0
        return self._collate_fn(samples)

    def _slot_for(self, nbytes: int) -> Slot | None:
        """The slot that a batch is built in; None: it gets memory of its own."""
        if nbytes < _LEAST_RECYCLED_BYTES and self._arena.pinned_slots is None:
            return None
        if self._largest < nbytes <= _MOST_KEPT_BYTES:
            # glibc keeps freed blocks that are no larger than the largest one that it has got back. torch's loader
            # frees its batches; without this, the kernel would clear new pages for each sample above 128 KiB.
            self._largest = nbytes
            torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        slot = self._next_slot()
        return slot if nbytes <= slot.end - slot.start else None

    def _lease(self, slot: Slot, nbytes: int, memory: Buffer) -> None:
        """Leave a slot to the batch that views its memory."""
        # First: an interruption may leave a slot unused, but never has two batches in one.
        self._slot, self._last_slot = None, slot
        self._arena.lease(slot, nbytes, memory)
