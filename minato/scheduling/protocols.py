"""What the scheduler needs of later stages: workers, slots, and storage of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["IndexStore", "Pool", "Slots"]


class Pool(Protocol):
    """The workers, as the dispatcher sees them."""

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep, or work, until the count of ready events exceeds ``seen`` or the time is over."""

    def check(self) -> None:
        """Raise if a worker died and is not replaced."""


class Slots(Protocol):
    """Provides slots for batches; ``minato.batching.arena`` implements it."""

    def acquire(self) -> Any:
        """Return a free slot, with its ``start`` and ``end`` in the arena."""

    def release(self, slot: Any, used_bytes: int = 0) -> None:
        """Return a slot to the free ones."""


class IndexStore(Protocol):
    """Stores indices that are no integers; ``minato.batching.serialization`` implements it."""

    def put(self, allocate: Callable[[int], int], value: Any) -> tuple[int, int]:
        """Store the indices of a batch; returns their offset and size in bytes."""

    def drop(self, offset: int) -> None:
        """Forget the indices at an offset."""
