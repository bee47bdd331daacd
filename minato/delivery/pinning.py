"""Batches that torch pins beside the training, before their turn has come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from minato._core.ledger import Ledger
from minato.batching.arena import Slot
from minato.batching.reader import BatchReader
from minato.delivery.prefetch import PrefetchReader, Upcoming

__all__ = ["Pin", "Pinned", "PinnedReader"]

_WORTH_A_THREAD_BYTES = 1 << 20
"""Smaller batches are copied in less time than two threads need to take turns."""

Pin = Callable[[Any], Any]
"""Copies a batch to memory that torch has pinned."""


class Pinned(Protocol):
    """A batch on its way there."""

    def result(self) -> Any:
        """The batch, once it is pinned. Raises what pinning raised."""


class _Unpinned(NamedTuple):
    """One that whoever asks for it has to pin."""

    pin: Pin
    batch: Any

    def result(self) -> Any:
        return self.pin(self.batch)


class PinnedReader(PrefetchReader):
    """Reads batches as :class:`Pinned`; a thread pins large ones whose turn comes next.

    It belongs to the device that is current when the reader is made, and ends with the reader.

    Args:
        reader: Reads them from their slots.
    """

    def __init__(self, reader: BatchReader, ledger: Ledger, pin: Pin) -> None:
        super().__init__(reader, ledger)
        self._pin = pin
        thread = ThreadPoolExecutor(1, "minato-pin", _enter_thread, (_current_device(),))
        self._submit = thread.submit
        # Not waiting: the last reference may go in the thread itself.
        weakref.finalize(self, thread.shutdown, wait=False, cancel_futures=True)

    def read(self, record: int, slot: Slot) -> Pinned:
        """The batch; one that the thread has not been given is for the caller to pin."""
        if record in self._begun:
            begun: Pinned = super().read(record, slot)
            return begun
        return _Unpinned(self._pin, self._reader.read(record, slot))

    def stage(self, upcoming: Iterable[Upcoming]) -> None:
        """As ever, of large batches."""
        super().stage(item for item in upcoming if self._is_large(item.record))

    def _is_large(self, record: int) -> bool:
        *_, used_bytes = self._ledger.contents(record)
        return used_bytes >= _WORTH_A_THREAD_BYTES

    def _begin(self, record: int, slot: Slot) -> Pinned:
        batch = self._reader.read(record, slot)
        try:
            return self._submit(self._pin, batch)
        except RuntimeError:  # no more threads: the main one has ended, and another trains on
            return _Unpinned(self._pin, batch)

    def _finish(self, begun: Pinned) -> Pinned:
        return begun


def _current_device() -> int:
    accelerator: Any = torch.accelerator
    # Torch 2.6 has another name for it, and for what sets it.
    now = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    return int(now())


def _enter_thread(device: int) -> None:
    accelerator: Any = torch.accelerator
    choose = getattr(accelerator, "set_device_index", None) or accelerator.set_device_idx
    choose(device)
    # For this thread, as torch: copying shall not take the training's cores.
    torch.set_num_threads(1)
