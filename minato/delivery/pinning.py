"""Copies batches to pinned memory by torch, in a thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from minato.batching.arena import Slot

__all__ = ["Pin", "PinCopier", "Pinned"]

_WORTH_A_THREAD_BYTES = 1 << 20
"""The iterator itself pins smaller batches: that takes less time than a switch between two threads."""

Pin = Callable[[Any], Any]
"""Copies a batch to memory that torch has pinned."""


class Pinned(Protocol):
    """A batch that is or will be pinned."""

    def result(self) -> Any:
        """Return the pinned batch; raises the exception of its pinning."""


class _Unpinned(NamedTuple):
    """A batch that ``result`` pins."""

    pin: Pin
    batch: Any

    def result(self) -> Any:
        return self.pin(self.batch)


class PinCopier:
    """Pins large batches early, in one thread (a :class:`minato.delivery.prefetch.Copier` of :class:`Pinned` batches).

    The thread uses the device that is current when the copier is made. It ends with the copier.

    Args:
        pin: Pins a batch.
    """

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        thread = ThreadPoolExecutor(1, "minato-pin", _enter_thread, (_current_device(),))
        self._submit = thread.submit
        # Without waiting: the thread itself may drop the last reference.
        weakref.finalize(self, thread.shutdown, wait=False, cancel_futures=True)

    def wants(self, nbytes: int) -> bool:
        """Return whether a batch is large enough for the thread."""
        return nbytes >= _WORTH_A_THREAD_BYTES

    def start(self, slot: Slot, read: Callable[[], object]) -> Pinned:
        """Read a batch and pin it in the thread."""
        batch = read()
        try:
            return self._submit(self._pin, batch)
        except RuntimeError:  # the main thread has ended: Python starts no more threads
            return _Unpinned(self._pin, batch)

    def finish(self, started: Pinned) -> Pinned:
        """Return the batch; its ``result`` waits for the thread."""
        return started

    def copy(self, slot: Slot, read: Callable[[], object]) -> Pinned:
        """Return a batch that its ``result`` pins in the calling thread."""
        return _Unpinned(self._pin, read())


def _current_device() -> int:
    accelerator: Any = torch.accelerator
    # The names of torch 2.6.
    current = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    return int(current())


def _enter_thread(device: int) -> None:
    accelerator: Any = torch.accelerator
    choose = getattr(accelerator, "set_device_index", None) or accelerator.set_device_idx
    choose(device)
    # For this thread alone, as torch does: copies must not use the cores of the training.
    torch.set_num_threads(1)
