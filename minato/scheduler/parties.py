"""Whom the dispatcher deals with, as it sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["KeyStore", "Pool", "Slots"]


class Pool(Protocol):
    """The workers, as the dispatcher sees them."""

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep, or work, until the ready gate has had an event since ``seen``."""

    def check(self) -> None:
        """Raise if a worker is gone."""


class Slots(Protocol):
    """Where slots come from (the assembler's arena)."""

    def acquire(self) -> Any:
        """Take a slot, a pair of arena offsets."""

    def release(self, slot: Any, used_bytes: int = 0) -> None:
        """Give it back."""


class KeyStore(Protocol):
    """Where keys lie that are no integers (the assembler's store)."""

    def put(self, allocate: Callable[[int], int], value: Any) -> tuple[int, int]:
        """Keep the keys of a batch; returns their offset and size."""

    def drop(self, offset: int) -> None:
        """Forget them."""
