"""Readers that begin with a batch before its turn has come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from minato._core.codes import ENDED, ERROR_BLOB, FAILED, KIND_MASK, SKIPPED, STATES
from minato._core.ledger import Ledger
from minato._support.exceptions import Postponed
from minato.batching.arena import Slot
from minato.batching.reader import BatchReader

__all__ = ["AheadReader", "Upcoming"]


class Upcoming(Protocol):
    """A complete batch whose turn comes."""

    record: int
    slot: Slot


class AheadReader(ABC):
    """Reads batches as a :class:`BatchReader`, and does more with them, beforehand with those whose turn comes next.

    These count as open all the while: neither the loader's state nor the memory budget takes them for delivered.

    Args:
        reader: Reads them from their slots.
    """

    def __init__(self, reader: BatchReader, ledger: Ledger) -> None:
        self._reader = reader
        self._ledger = ledger
        # By the ledger's record: what was begun, or the error that this raised.
        self._begun: dict[int, Any] = {}
        # A batch that is on its way may have left its slot, where this lay, to others.
        self._states: dict[int, tuple[int, Any] | None] = {}

    def read(self, record: int, slot: Slot) -> Any:
        """The batch.

        Raises:
            Exception: What a sample of the batch, its collation, or what is done with it raised.
        """
        begun = self._begun.pop(record, None)
        self._states.pop(record, None)
        if isinstance(begun, Postponed):
            begun.reraise()
        return self._finish(self._begin(record, slot) if begun is None else begun)

    def state(self, record: int) -> tuple[int, Any] | None:
        """As :meth:`BatchReader.state`."""
        return self._states[record] if record in self._states else self._reader.state(record)

    def discard(self, record: int, slot: Slot) -> None:
        """Drop a batch that nobody wants any more."""
        self._states.pop(record, None)
        if self._begun.pop(record, None) is None:
            self._reader.discard(record, slot)

    def stage(self, upcoming: Iterable[Upcoming]) -> None:
        """Begin with batches whose turn comes next; what goes wrong is raised when it has come."""
        for item in upcoming:
            flags, _, result, *_ = self._ledger.contents(item.record)
            plain = not flags & (FAILED | ENDED | SKIPPED) and result & KIND_MASK != ERROR_BLOB
            if plain and item.record not in self._begun:
                try:
                    if flags & STATES:
                        self._states[item.record] = self._reader.state(item.record)
                    self._begun[item.record] = self._begin(item.record, item.slot)
                except Exception as error:
                    self._begun[item.record] = Postponed(error)

    @abstractmethod
    def _begin(self, record: int, slot: Slot) -> Any:
        """Read a batch and begin with it; returns what ``_finish`` needs."""

    @abstractmethod
    def _finish(self, begun: Any) -> Any:
        """The batch."""
